"""A kind of remote tier is a file of store/remote/schemes: a toy, without a change anywhere else."""

import pytest
from extending.page import shown
from store.stores import blocks, load_all, ready, save_all

from kvire.codec.codec import codec_for
from kvire.core.config import StoreConfig
from kvire.core.errors import ConfigError
from kvire.store.open import open_store
from kvire.store.remote import scheme
from kvire.store.remote.open import open_remote

SHELF = shown("class Shelf:")


@pytest.fixture
def add_shelf(add_file):
    add_file(scheme.FOLDER, "shelf", SHELF)
    scheme.schemes.cache_clear()
    yield
    scheme.schemes.cache_clear()


def test_a_remote_scheme_is_a_file(add_shelf, tmp_path):
    config = StoreConfig(remote=("shelf://user:secret@here",), key_file=tmp_path / "keyring.json", encrypt=True)
    for _ in range(2):  # what one store wrote another one reads
        with open_store(config) as store:
            records = blocks(store, 6)
            save_all(store, records)
            assert ready(load_all(store, records)) == [True] * 6
            assert [*store.stats().handles] == ["shelf://here"]


def test_help_and_errors_name_it(add_shelf):
    assert "shelf://name" in scheme.examples()
    with pytest.raises(ConfigError, match="shelf://"):
        open_remote("ftp://host")
    with pytest.raises(ConfigError, match="write shelf://name"):
        open_remote("shelf://")


def test_its_bandwidth_chooses_the_codec(add_shelf):
    """Floats are packed where that pays: for object stores, not for Redis."""
    packs = {
        each: codec_for("float16", scheme.scheme_of(each).bytes_per_s).shortens for each in ("shelf", "s3", "redis")
    }
    assert packs == {"shelf": True, "s3": True, "redis": False}
