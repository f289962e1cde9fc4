"""A GGUF is input: whatever its header claims, the answer is a clear error, soon."""

import struct
import time
from pathlib import Path

import pytest

from kvire.core.errors import UnsupportedModelError
from kvire.models.gguf.header import GgufHeader

from .tiny_gguf import make_gguf

U32, STRING, ARRAY = 4, 8, 9


def _text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def _file(path: Path, *fields: bytes, kv_count: int | None = None, tensors: int = 0, tail: bytes = b"") -> Path:
    head = b"GGUF" + struct.pack("<IQQ", 3, tensors, len(fields) if kv_count is None else kv_count)
    path.write_bytes(head + b"".join(fields) + tail + b"\0" * 64)
    return path


def _array(kind: int, length: int, content: bytes = b"") -> bytes:
    return _text(b"a.b") + struct.pack("<IIQ", ARRAY, kind, length) + content


HUGE = 1 << 60
NESTED = _text(b"a.b") + struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * 100_000


@pytest.mark.parametrize(
    "make",
    [
        lambda p: _file(p, _array(U32, HUGE)),
        lambda p: _file(p, _array(STRING, HUGE)),
        lambda p: _file(p, _array(0, HUGE, b"\1" * 1000)),
        lambda p: _file(p, _array(ARRAY, HUGE)),
        lambda p: _file(p, NESTED),
        lambda p: _file(p, _text(b"a") + struct.pack("<IQ", STRING, HUGE)),
        lambda p: _file(p, struct.pack("<Q", HUGE) + b"name"),
        lambda p: _file(p, _text(b"a") + struct.pack("<I", 77)),
        lambda p: _file(p, _text(b"\xff\xfe") + struct.pack("<II", U32, 1)),
        lambda p: _file(p, kv_count=HUGE),
        lambda p: _file(p, tensors=HUGE),
        lambda p: _file(p, tensors=1, tail=_text(b"t") + struct.pack("<I", 1 << 31)),
        lambda p: _file(p, tensors=1, tail=_text(b"t") + struct.pack("<IQQIQ", 2, 1 << 32, 1 << 32, 0, 0)),
        lambda p: _file(p, tensors=1, tail=_text(b"t") + struct.pack("<IQIQ", 1, 4, 0, HUGE)),
        lambda p: _file(p, tensors=1, tail=_text(b"t") + struct.pack("<IQIQ", 1, 4, 999, 0)),
        lambda p: p.write_bytes(b""),
        lambda p: p.write_bytes(b"GGUF"),
        lambda p: p.write_bytes(b"PK\3\4" * 100),
        lambda p: p.write_bytes(b"GGUF" + struct.pack("<I", 1) + b"\0" * 100),
    ],
)  # fmt: skip
def test_claims_are_not_believed(tmp_path: Path, make) -> None:
    path = tmp_path / "hostile.gguf"
    make(path)
    started = time.monotonic()
    with pytest.raises(UnsupportedModelError, match="GGUF"):
        GgufHeader(path)
    assert time.monotonic() - started < 10


def test_cut_anywhere(tmp_path: Path) -> None:
    content = make_gguf(tmp_path / "tiny.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, 2000, 97), *range(2000, len(content), len(content) // 20)]:
        cut.write_bytes(content[:length])
        with pytest.raises(UnsupportedModelError):
            GgufHeader(cut)


def test_an_endless_header_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvire.models.gguf.header.MAX_READS", 100)
    with pytest.raises(UnsupportedModelError, match="more entries than any model"):
        GgufHeader(make_gguf(tmp_path / "tiny.gguf"))
