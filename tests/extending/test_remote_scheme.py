"""A kind of remote tier is a file of store/remote/schemes: a toy, without a change anywhere else."""

import pytest
from store.stores import blocks, load_all, ready, save_all

from kvire.codec.codec import codec_for
from kvire.core.config import StoreConfig
from kvire.core.errors import ConfigError
from kvire.store.open import open_store
from kvire.store.remote import scheme
from kvire.store.remote.open import open_remote

SHELF = '''
"""shelf://name: values in a dict of this process."""

from kvire.core.errors import BlockMissing, ConfigError, FrameDamaged
from kvire.store.remote.backend import BATCH, HEAD_BYTES, StoredObject, stamped

SHELVES = {}


class ShelfBackend:
    def __init__(self, values):
        self._values = values

    def exists(self, names, deadline):
        return [name in self._values for name in names]

    def get(self, name, buffers, deadline):
        if name not in self._values:
            raise BlockMissing(name)
        value = rest = self._values[name]
        if len(value) > sum(map(len, buffers)):
            raise FrameDamaged("length")
        for buffer in buffers:
            part, rest = rest[: len(buffer)], rest[len(buffer) :]
            buffer[: len(part)] = part
        return len(value)

    def put(self, name, value, ttl_s, deadline):
        self._values[name] = b"".join(value)

    def touch(self, names, ttl_s, deadline):
        pass

    def keep(self, names, ttl_s, deadline):
        pass

    def remove(self, names, deadline):
        for name in names:
            self._values.pop(name, None)

    def names(self, prefix, timeout_s):
        found = sorted(name for name in self._values if name.startswith(prefix))
        for start in range(0, len(found), BATCH):
            yield found[start : start + BATCH]

    def describe(self, names, deadline):
        values = [(name, self._values[name]) for name in names if name in self._values]
        return [StoredObject(name, value[:HEAD_BYTES], len(value), stamped(value)[1]) for name, value in values]

    def close(self):
        pass


class Shelf:
    schemes = ("shelf",)
    example = "shelf://name"
    bytes_per_s = 1e6

    def make(self, url, name, options):
        if not url.netloc:
            raise ConfigError(f"{name}: write shelf://name")
        return ShelfBackend(SHELVES.setdefault(url.netloc, {}))


SCHEME = Shelf()
'''


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
