"""A file of packed weights: written once, mapped by every start, shared between processes.

    8 bytes   magic and version
    8 bytes   length of the header, little-endian
    16 bytes  XXH3-128 of the header
    header    JSON: {"source", "tensors": {name: {"form", "shape", "at", "bytes", "xxh3"}}}
    tensors   each at a multiple of 64 bytes; matrices in the kernels' order, vectors as float32

A reader checks everything before the first use: a bit that has changed makes the file unusable, and
the next start writes it again.
"""

import json
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from kvire.core.errors import ConfigError
from kvire.core.native import native_module
from kvire.weights.forms import FORMS, Bytes, Form

MAGIC = b"KVIREW\x00\x01"
PACKED = "weights.kvire"  # the file in a folder of its own
PACKER = 1  # raise it when the packed order changes: older files are then left aside
ALIGNMENT_BYTES = 64
LARGEST_HEADER_BYTES = 64 << 20


class PackedFileDamagedError(ValueError):
    """The file is not what was written."""


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor on its way into a packed file.

    shape: matrices [outputs, width]; vectors, and whatever else is no matrix, are float32.
    rows: uint8 [outputs, bytes], in the form's own order.
    """

    name: str
    form: Form
    shape: tuple[int, ...]
    rows: Bytes

    @property
    def is_matrix(self) -> bool:
        """Whether kernels multiply with it."""
        return len(self.shape) == 2


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor in a mapped file, in the kernels' order if it is a matrix.

    data: uint8, valid as long as the file is open.
    """

    name: str
    form: Form
    shape: tuple[int, ...]
    data: Bytes

    @property
    def address(self) -> int:
        """Of the first byte."""
        return int(self.data.ctypes.data)

    def kernel_weights(self) -> Any:
        """The kernels' view of a matrix; valid as long as the file is open."""
        native: Any = native_module()
        outputs, width = self.shape
        return native.PackedWeights(self.form.code, outputs, width, self.address)

    def floats(self, begin: int = 0, end: int | None = None) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The exact numbers: of rows begin .. end - 1 of a matrix, or of everything else whole."""
        if len(self.shape) != 2:
            return self.data.view(np.float32).reshape(self.shape)
        end = self.shape[0] if end is None else end
        out = np.empty((end - begin, self.shape[1]), np.float32)
        native: Any = native_module()
        native.unpack_weights(self.kernel_weights(), out.ctypes.data, begin, end, os.cpu_count() or 1)
        return out


class PackedFile(Mapping[str, PackedTensor]):
    """An open file: its tensors by name.

    digest: hex SHA-256 that stands for every byte.
    source: digest of the weights that it was made from.
    """

    def __init__(self, path: Path) -> None:
        """Map and check. Raises PackedFileDamagedError, OSError."""
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < len(MAGIC) + 24:
                raise PackedFileDamagedError(f"{path} is cut off")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        bytes_of = np.frombuffer(self._map, np.uint8)
        head = _header(path, bytes_of)
        self.path = path
        self.digest = sha256(b"kvire packed weights" + head).hexdigest()
        document = json.loads(head)
        self.source: str = document["source"]
        self._tensors = {name: _tensor(path, name, entry, bytes_of) for name, entry in document["tensors"].items()}
        _check_sums(path, document["tensors"], self._tensors)

    def __getitem__(self, name: str) -> PackedTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.data.nbytes for tensor in self._tensors.values())


def write_packed(path: Path, source: str, tensors: Iterable[SourceTensor]) -> None:
    """Write a new file; the caller renames it into place. Tensors are packed one at a time."""
    entries: dict[str, dict[str, Any]] = {}
    data = path.with_name(path.name + ".data")
    try:
        with data.open("wb") as out:
            for tensor in tensors:
                packed = _packed(tensor)
                entries[tensor.name] = {
                    "form": tensor.form.name,
                    "shape": list(tensor.shape),
                    "at": _pad(out),
                    "bytes": packed.nbytes,
                    "xxh3": xxhash.xxh3_128_hexdigest(packed.data),
                }
                out.write(packed.data)
        head = json.dumps({"source": source, "tensors": entries}, separators=(",", ":")).encode()
        with path.open("wb") as out, data.open("rb") as body:
            out.write(MAGIC + len(head).to_bytes(8, "little") + xxhash.xxh3_128_digest(head) + head)
            _pad(out)
            while piece := body.read(8 << 20):
                out.write(piece)
            out.flush()
            os.fsync(out.fileno())
    finally:
        data.unlink(missing_ok=True)


def packed_folder_name(name: str, source: str, weights: str) -> str:
    """Folder of a directory's packed weights in the cache.

    name: of the model.
    source: digest of its weights.
    weights: file or int8.
    """
    key = sha256(f"kvire packed {PACKER} {weights} {source}".encode()).hexdigest()
    return f"{name.replace('/', '--')}-{key[:16]}"


def packed_size(tensors: Iterable[tuple[Form, tuple[int, ...]]]) -> int:
    """Bytes of the tensors in a packed file, nearly."""
    return sum(_packed_bytes(form, shape) + ALIGNMENT_BYTES for form, shape in tensors)


def need_kernels() -> None:
    """Raise ConfigError if there are no kernels for packed weights."""
    if native_module() is None:
        raise ConfigError(
            "weights in their file's own form need kvire's C++ kernels, and kvire was installed without them. Install "
            "a C++ compiler (on Debian: apt install g++) and reinstall kvire, or use weights='float32'."
        )


def _packed_bytes(form: Form, shape: tuple[int, ...]) -> int:
    if len(shape) != 2:
        return 4 * prod(shape)
    native: Any = native_module()
    return int(native.packed_bytes(form.code, *shape))


def _packed(tensor: SourceTensor) -> Bytes:
    if not tensor.is_matrix:
        return np.ascontiguousarray(tensor.rows).reshape(-1)
    native: Any = native_module()
    rows = np.ascontiguousarray(tensor.rows)
    assert rows.nbytes == tensor.shape[0] * tensor.form.row_bytes(tensor.shape[1]), tensor.name
    out = np.empty(_packed_bytes(tensor.form, tensor.shape), np.uint8)
    native.pack_weights(tensor.form.code, *tensor.shape, rows.ctypes.data, out.ctypes.data, os.cpu_count() or 1)
    return out


def _pad(out: BinaryIO) -> int:
    at = -(-out.tell() // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    out.write(bytes(at - out.tell()))
    return at


def _header(path: Path, data: Bytes) -> bytes:
    if data[: len(MAGIC)].tobytes() != MAGIC:
        raise PackedFileDamagedError(f"{path} holds no packed weights of this version")
    length = int.from_bytes(data[8:16].tobytes(), "little")
    if length > min(LARGEST_HEADER_BYTES, data.nbytes - 32):
        raise PackedFileDamagedError(f"{path} is cut off")
    head = data[32 : 32 + length].tobytes()
    if xxhash.xxh3_128_digest(head) != data[16:32].tobytes():
        raise PackedFileDamagedError(f"the header of {path} has changed")
    return head


def _tensor(path: Path, name: str, entry: Mapping[str, Any], data: Bytes) -> PackedTensor:
    head_bytes = 32 + int.from_bytes(data[8:16].tobytes(), "little")
    begin = -(-head_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES + entry["at"]
    part = data[begin : begin + entry["bytes"]]
    if part.nbytes != entry["bytes"]:
        raise PackedFileDamagedError(f"{path} is cut off in {name}")
    return PackedTensor(name, FORMS[entry["form"]], tuple(entry["shape"]), part)


def _check_sums(path: Path, entries: Mapping[str, Any], tensors: Mapping[str, PackedTensor]) -> None:
    def is_whole(name: str) -> bool:
        return bool(xxhash.xxh3_128_hexdigest(tensors[name].data.data) == entries[name]["xxh3"])

    with ThreadPoolExecutor(os.cpu_count() or 1, "kvire weights") as threads:
        for name, whole in zip(tensors, threads.map(is_whole, tensors), strict=True):
            if not whole:
                raise PackedFileDamagedError(f"{name} of {path} is not what was written")
