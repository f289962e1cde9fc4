"""Reading a GGUF's header. The file is hostile input: every size in it is a claim.

The gguf package parses; the reader here adds that no claim is followed past the end of the file,
nor for longer than any real model needs. (GGUFReader by itself reads short past the end, and walks
an array for as long as the file claims, 2^60 elements included.)
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader

from kvire.core.errors import UnsupportedModelError

# The largest vocabularies in use take about 2 million reads (tokens, scores, types and merges).
MAX_READS = 8_000_000


class _BoundedReader(GGUFReader):
    """GGUFReader that raises ValueError instead of reading beyond the file, or without end."""

    _reads = 0
    _bytes: npt.NDArray[np.uint8] | None = None

    def _get(
        self,
        offset: int,
        dtype: npt.DTypeLike,
        count: int = 1,
        override_order: Literal["I", "S", "<"] | None = None,
    ) -> npt.NDArray[Any]:
        """`count` values at `offset`: a view of the mapped file.

        Every read of the parser comes through here.
        """
        if self._bytes is None:
            self._bytes = self.data.view(np.ndarray)  # slicing a memmap costs ten times as much
        self._reads += 1
        if self._reads > MAX_READS:
            raise ValueError("its header has more entries than any model")
        kind = np.dtype(dtype)
        end = int(offset) + int(count) * kind.itemsize
        if end > self._bytes.size:
            raise ValueError(f"it claims to have {end} bytes and has {self._bytes.size}")
        order = self.byte_order if override_order is None else override_order
        return self._bytes[offset:end].view(kind if order == "I" else kind.newbyteorder(order))


class GgufHeader:
    """Fields and tensors of a GGUF, and the fields used so far: unused ones are refused.

    paths: of one file, or of all parts of a split GGUF in order; the fields are those of the first.
    tensors: the gguf package's records {name, shape (fastest first), tensor_type, data}, data
        mapped from disk.
    """

    def __init__(self, *paths: Path) -> None:
        readers = [_open(path) for path in paths]
        for i, (path, reader) in enumerate(zip(paths, readers, strict=True)):
            _check_part(path, reader, i, len(paths))
        self._reader = readers[0]
        self._used: set[str] = set()
        self.tensors = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
        stated = _number(readers[0], "split.tensors.count", len(self.tensors))
        if not len(self.tensors) == stated == sum(len(reader.tensors) for reader in readers):
            raise UnsupportedModelError(
                f"{paths[0]} and its other parts have {len(self.tensors)} different tensors, and should have {stated}: "
                "they do not belong together, download them again"
            )

    @property
    def architecture(self) -> str:
        """general.architecture, such as "llama"; empty if the file does not say."""
        value = self.get("general.architecture")
        return value if isinstance(value, str) else ""

    def get(self, name: str) -> Any:
        """Value of a field; None if the file does not have it. The field then counts as used."""
        self._used.add(name)
        found = self._reader.fields.get(name)
        try:
            return None if found is None else found.contents()
        except (ValueError, IndexError) as error:
            raise UnsupportedModelError(f"field {name} of the GGUF is damaged ({error})") from error

    def count(self, name: str) -> int:
        """Length of an array field, without taking it apart; 0 when absent."""
        found = self._reader.fields.get(name)
        return 0 if found is None else len(found.data)

    def unused(self, prefix: str) -> Iterator[str]:
        """Names of unused fields below `prefix`."""
        return (name for name in self._reader.fields if name.startswith(prefix) and name not in self._used)

    def parameters(self) -> int:
        """Numbers in all tensors."""
        return sum(int(tensor.n_elements) for tensor in self.tensors.values())

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Shape of a tensor, slowest dimension first as in torch."""
        return tuple(int(dim) for dim in reversed(self.tensors[tensor].shape))

    def close(self) -> None:
        """Unmap the file, so that it can be deleted; `tensors` must not be used after."""
        self.tensors = {}
        del self._reader


def _open(path: Path) -> _BoundedReader:
    try:
        return _BoundedReader(path)
    except OSError as error:
        raise UnsupportedModelError(f"{path} cannot be read as a GGUF: {error}") from error
    except (
        ValueError,
        IndexError,
        KeyError,
        TypeError,
        OverflowError,
        RecursionError,
        MemoryError,
    ) as error:
        raise UnsupportedModelError(f"{path} is not a sound GGUF ({error}): download it again") from error


def _check_part(path: Path, reader: _BoundedReader, place: int, count: int) -> None:
    """Raise UnsupportedModelError unless the file claims to be this part of that many."""
    number, parts = _number(reader, "split.no", 0), _number(reader, "split.count", 1)
    if (number, parts) == (place, count) or (count == 1 and parts == 0):
        return
    if count == 1:
        raise UnsupportedModelError(
            f"{path} is part {number + 1} of {parts} of a split GGUF, which its name does not say. Give all parts "
            f"their names NAME-00001-of-{parts:05}.gguf, or join them: llama-gguf-split --merge FIRST-PART WHOLE.gguf"
        )
    raise UnsupportedModelError(
        f"{path} is named as part {place + 1} of {count}, and says that it is part {number + 1} of {parts}: download "
        "it again"
    )


def _number(reader: _BoundedReader, name: str, default: int) -> int:
    found = reader.fields.get(name)
    try:
        value = default if found is None else found.contents()
    except (ValueError, IndexError) as error:
        raise UnsupportedModelError(f"field {name} of the GGUF is damaged ({error})") from error
    if not isinstance(value, int) or isinstance(value, bool):
        raise UnsupportedModelError(f"the GGUF has {name} = {value!r}: not a number")
    return value
