"""Lines of log files, gzip or not, or of standard input, without holding more than one; and JSON
that spans lines.
"""

import gzip
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

from kvire.core.errors import ConfigError

LONGEST_LINE_BYTES = 64 << 20
GZIP_MAGIC = b"\x1f\x8b"
# Stands for a line longer than LONGEST_LINE_BYTES: no JSON, so it is counted as malformed.
TOO_LONG = b"{ too long"

STRING_OR_BRACKET = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]')


class Readable(Protocol):
    """A source of lines."""

    def readline(self, size: int, /) -> bytes:
        """The next line, or `size` bytes of it; empty at the end."""


BytesRead = Callable[[int], None]  # hears how many more bytes of the file (as stored) were read
REPORT_BYTES = 1 << 20


def lines_of(path: str, progress: BytesRead | None = None) -> Iterator[bytes]:
    """The lines of a file, or of standard input for "-", without their ends. Raises ConfigError."""
    try:
        if path == "-":
            yield from _bounded(_plain(sys.stdin.buffer), None, progress)
            return
        with Path(path).open("rb") as file:
            yield from _bounded(_plain(file), file, progress)
    except (OSError, EOFError, zlib.error) as error:
        name = "standard input" if path == "-" else path
        raise ConfigError(f"cannot read {name}: {getattr(error, 'strerror', None) or error}") from error


def _plain(file: BinaryIO) -> Readable:
    """The file's content: gzip is known by its first two bytes, not by its name."""
    peek = getattr(file, "peek", None)
    if peek is not None and peek(2)[:2] == GZIP_MAGIC:
        return gzip.GzipFile(fileobj=file)
    return file


def _bounded(content: Readable, file: BinaryIO | None, progress: BytesRead | None) -> Iterator[bytes]:
    told = read = 0
    while line := content.readline(LONGEST_LINE_BYTES):
        read += len(line)
        too_long = False
        while not line.endswith(b"\n") and (more := content.readline(LONGEST_LINE_BYTES)):
            too_long = True
            line = more
        yield TOO_LONG if too_long else line.rstrip(b"\r\n")
        if progress is not None and read - told >= REPORT_BYTES:
            progress(_position(file, read))
            told = read
    if progress is not None:
        progress(_position(file, read))


def _position(file: BinaryIO | None, read: int) -> int:
    """Bytes of the file itself: of a gzip fewer than of its content."""
    return read if file is None else file.tell()


def json_values(lines: Iterable[bytes], *, in_array: bool) -> Iterator[bytes]:
    """Texts of JSON values over one or more lines: an array's elements, or objects in a row.

    Holds one value at a time. TOO_LONG stands for a value without an end or longer than
    LONGEST_LINE_BYTES.
    """
    outside = 1 if in_array else 0
    depth = size_bytes = 0
    value: list[bytes] = []
    for line in lines:
        start = 0
        for token in STRING_OR_BRACKET.finditer(line):
            mark = token[0][:1]
            if mark in b"[{":
                start = token.start() if depth == outside else start
                depth += 1
            elif mark in b"]}":
                depth -= 1
                if depth == outside:
                    yield b"\n".join((*value, line[start : token.end()]))
                    value, size_bytes = [], 0
            elif depth == outside:
                yield token[0]
        if depth > outside:
            value.append(line[start:])
            size_bytes += len(line) - start
            if size_bytes > LONGEST_LINE_BYTES:
                break
    if value:
        yield TOO_LONG
