"""Packed files give back what was written, and a changed one is never used."""

from pathlib import Path

import numpy as np
import pytest
from step.forms import FORMS as BOOK
from step.forms import random_rows, weights_of

from kvire.weights.forms import FORMS, INT8, quantise_to_int8
from kvire.weights.packed_file import PackedFile, PackedFileDamagedError, SourceTensor, packed_size, write_packed

pytest.importorskip("kvire._native")


def tensors() -> list[SourceTensor]:
    found = []
    for name, form in FORMS.items():
        rows = random_rows(BOOK[name.upper()], 20, 256)
        found.append(SourceTensor(f"{name}.weight", form, (20, 256), rows))
    norm = np.arange(7, dtype=np.float32)
    return [*found, SourceTensor("norm.weight", FORMS["f32"], (7,), norm.view(np.uint8))]


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    write_packed(tmp_path / "weights.kvire", "source digest", tensors())
    return tmp_path / "weights.kvire"


def test_the_table_is_the_kernels_table() -> None:
    assert {name: (form.code, form.block_inputs, form.block_bytes) for name, form in FORMS.items()} == {
        name.lower(): (form.code, form.inputs, form.size) for name, form in BOOK.items()
    }


def test_what_was_written_is_read(packed: Path) -> None:
    file = PackedFile(packed)
    assert file.source == "source digest" and list(file) == [tensor.name for tensor in tensors()]
    for tensor in tensors()[:-1]:
        expected = weights_of(BOOK[tensor.form.name.upper()], tensor.rows)
        np.testing.assert_array_equal(file[tensor.name].floats(), expected)
        np.testing.assert_array_equal(file[tensor.name].floats(3, 9), expected[3:9])
        assert file[tensor.name].address % 64 == 0
    np.testing.assert_array_equal(file["norm.weight"].floats(), np.arange(7, dtype=np.float32))
    assert packed.stat().st_size <= packed_size((t.form, t.shape) for t in tensors()) + 8192


def test_the_same_tensors_have_the_same_digest(packed: Path, tmp_path: Path) -> None:
    write_packed(tmp_path / "again", "source digest", tensors())
    write_packed(tmp_path / "other", "another source", tensors())
    changed = tensors()
    changed[0].rows[0, 0] ^= 1
    write_packed(tmp_path / "changed", "source digest", changed)
    digest, again, other, different = (
        PackedFile(path).digest for path in (packed, *(tmp_path / name for name in ("again", "other", "changed")))
    )
    assert digest == again and len({digest, other, different}) == 3


def test_every_changed_bit_is_noticed(packed: Path) -> None:
    whole = packed.read_bytes()
    used = np.zeros(len(whole), bool)
    file = PackedFile(packed)
    start = int(np.frombuffer(file._map, np.uint8).ctypes.data)
    used[:32] = True
    used[32 : 32 + int.from_bytes(whole[8:16], "little")] = True
    for tensor in file.values():
        used[tensor.address - start : tensor.address - start + tensor.data.nbytes] = True
    places = np.random.default_rng(0).choice(np.flatnonzero(used), 200, replace=False)
    for place in (0, 7, 8, 15, 16, 31, 32, *map(int, places)):
        changed = bytearray(whole)
        changed[place] ^= 1 << place % 8
        packed.write_bytes(changed)
        with pytest.raises(PackedFileDamagedError):
            PackedFile(packed)


@pytest.mark.parametrize("left", [0, 5, 31, 100, 2000, -1])
def test_a_cut_file_is_noticed(packed: Path, left: int) -> None:
    packed.write_bytes(packed.read_bytes()[:left])
    with pytest.raises(PackedFileDamagedError):
        PackedFile(packed)


def test_int8_is_within_half_a_step() -> None:
    values = np.random.default_rng(0).standard_normal((9, 100)).astype(np.float32)
    values[3] = 0
    rows = quantise_to_int8(values)
    assert rows.shape == (9, 4 * INT8.block_bytes)
    found = weights_of(BOOK["Q8_0"], rows)
    most = np.abs(np.pad(values, ((0, 0), (0, 28))).reshape(9, 4, 32)).max(-1)
    step = np.repeat(most / 127, 32, axis=1)
    assert (np.abs(found[:, :100] - values) <= 0.51 * step[:, :100] + 1e-7).all()
    assert not found[:, 100:].any() and not found[3].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e9])
def test_int8_refuses_numbers_beyond_its_range(bad: float) -> None:
    values = np.zeros((2, 32), np.float32)
    values[1, 4] = bad
    with pytest.raises(ValueError, match="too large"):
        quantise_to_int8(values)
