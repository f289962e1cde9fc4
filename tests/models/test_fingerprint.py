"""Any change of weights or config changes the identity, and a remembered digest never outlives its file."""

import json
import os
import time
from pathlib import Path

import pytest

from kvire.core.spec import KVGroup, LayerKind
from kvire.models import fingerprint
from kvire.models.fingerprint import config_digest, file_digest, namespace, spec_text, weights_digest


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for i, path in enumerate(files):
        path.write_bytes(bytes([i]) * 3000)
        _age(path)
    return files


def _age(path: Path) -> None:
    """As if it had been written long ago (ctime cannot be set: see `settled`)."""
    os.utime(path, (1_000_000_000, 1_000_000_000))


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as settled at once; what a test writes has a ctime of now."""
    monkeypatch.setattr(fingerprint, "SETTLED_NS", -1)


def _hashes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the files that are really hashed from now on."""
    seen: list[int] = []
    inner = fingerprint._hash

    def counting(file, size, progress):
        seen.append(size)
        return inner(file, size, progress)

    monkeypatch.setattr(fingerprint, "_hash", counting)
    return seen


def test_every_byte_counts(shards: list[Path]) -> None:
    seen = {weights_digest(shards)}
    for place in (0, 1500, 2999):
        content = bytearray(shards[1].read_bytes())
        content[place] ^= 1
        shards[1].write_bytes(content)
        seen.add(weights_digest(shards))
    assert len(seen) == 4


def test_names_and_borders_count_but_not_the_order_given(shards: list[Path]) -> None:
    digest = weights_digest(shards)
    assert weights_digest(shards[::-1]) == digest
    moved = shards[0].rename(shards[0].with_name("c.safetensors"))
    assert weights_digest([moved, shards[1]]) != digest
    joined = shards[1].with_name("joined.safetensors")
    joined.write_bytes(moved.read_bytes() + shards[1].read_bytes())
    assert weights_digest([joined]) != digest


@pytest.mark.usefixtures("settled")
def test_a_digest_is_remembered(shards: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _hashes(monkeypatch)
    first = weights_digest(shards)
    assert weights_digest(shards) == first
    assert seen == [3000, 3000]


@pytest.mark.usefixtures("settled")
def test_other_content_of_the_same_size_and_mtime_is_hashed_again(shards: list[Path]) -> None:
    """ctime tells: it moves with every write and cannot be set back."""
    first = file_digest(shards[0])
    time.sleep(0.02)
    with shards[0].open("r+b") as file:
        file.write(b"x")
    _age(shards[0])
    assert file_digest(shards[0]) != first


@pytest.mark.usefixtures("settled")
def test_a_renamed_file_in_its_place_is_hashed_again(shards: list[Path]) -> None:
    first = file_digest(shards[0])
    shards[1].rename(shards[0])
    assert file_digest(shards[0]) != first


def test_a_file_written_just_now_is_not_remembered(shards: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another write within the same tick of the clock would leave no trace."""
    monkeypatch.setattr(fingerprint, "SETTLED_NS", 3600 * 10**9)  # this test is quicker than that
    seen = _hashes(monkeypatch)
    file_digest(shards[0])
    file_digest(shards[0])
    assert len(seen) == 2


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("damage", ["", "{", "[1]", "null", "\x00", '{"0:0": 5}'])
def test_a_damaged_memory_is_rebuilt(shards: list[Path], cache: Path, damage: str) -> None:
    first = file_digest(shards[0])
    (cache / "digests.json").write_text(damage)
    assert file_digest(shards[0]) == first
    assert any(entry["sha256"] == first for entry in _entries(cache))


def _entries(cache: Path) -> list[dict[str, str]]:
    return [value for value in json.loads((cache / "digests.json").read_text()).values() if isinstance(value, dict)]


@pytest.mark.usefixtures("settled")
def test_a_cache_folder_that_cannot_be_written_is_no_error(
    shards: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVIRE_CACHE_DIR", str(tmp_path / "file"))
    assert len(file_digest(shards[0])) == 64


def test_progress_runs_over_all_files(shards: list[Path]) -> None:
    seen: list[tuple[int, int]] = []
    weights_digest(shards, lambda _, done, total: seen.append((done, total)))
    assert seen[-1] == (6000, 6000)


CONFIG = {"model_type": "llama", "rope_parameters": {"rope_theta": 10000.0}, "rms_norm_eps": 1e-6, "dtype": "float32"}


@pytest.mark.parametrize(
    ("field", "value"),
    [("rms_norm_eps", 1e-5), ("rope_parameters", {"rope_theta": 10001.0}), ("never_heard_of", 1), ("model_type", "x")],
)
def test_any_field_changes_the_config_digest(field: str, value: object) -> None:
    assert config_digest(CONFIG | {field: value}) != config_digest(CONFIG)


def test_where_it_came_from_does_not(tmp_path: Path) -> None:
    inert = {"_name_or_path": str(tmp_path), "transformers_version": "9", "dtype": "bfloat16"}
    assert config_digest(CONFIG | inert) == config_digest(CONFIG)
    assert config_digest(dict(reversed(CONFIG.items()))) == config_digest(CONFIG)


def test_the_namespace_holds_all_of_it() -> None:
    groups = (
        KVGroup(LayerKind.FULL, (1,), 2, 16, 16),
        KVGroup(LayerKind.SLIDING, (0, 2), 2, 16, 16, window=24),
    )
    assert spec_text(groups) == (
        "full layers=1 heads=2 k=16 v=16 window=0;sliding layers=0,2 heads=2 k=16 v=16 window=24"
    )
    fields = {
        "weights": "w", "config": "c", "groups": groups, "numerics": "n", "kv_dtype": "float16", "block_size": 32,
        "build": "b",
    }  # fmt: skip
    roots = {namespace(**fields).root}
    for change in (
        {"weights": "v"}, {"config": "d"}, {"groups": groups[:1]}, {"numerics": "m"}, {"kv_dtype": "float32"},
        {"block_size": 16}, {"adapter": "a"}, {"salt": "s"}, {"shard": "0/2"}, {"build": "c"},
    ):  # fmt: skip
        roots.add(namespace(**(fields | change)).root)
    assert len(roots) == 11
