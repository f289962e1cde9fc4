"""The digest of a model's weights in memory; files may differ from them by now.

A merged adapter, an optimiser step and an edit by hand all leave the files as they were, and many
leave no other trace: `weight.data += delta` moves neither the tensor's address nor its version
counter. So every byte is read. The name is SHA-256, once per model; a faster checksum confirms it
before each use, at about the cost of computing one token: both read all the weights once.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from hashlib import sha256

import torch
import xxhash
from torch import Tensor, nn

from kvire.core.errors import UnsupportedModelError
from kvire.core.keys import field
from kvire.models.loaded_state import plain_attributes

CHUNK_BYTES = 64 << 20  # copied or computed on at once, of a tensor outside memory
HASHING_THREADS = 8
FACTORS = 1 << 22  # random numbers of a checksum: bytes multiplied at once


class WeightsDigest:
    """Digest of a model's parameters and buffers, as they are now.

    without: ends of names of buffers that do not count.
    """

    def __init__(self, model: nn.Module, *, without: tuple[str, ...] = ()) -> None:
        self._model = model
        self._without = without
        self._checked: bytes | None = None
        self._digest = ""

    def current(self) -> str:
        """64 hexadecimal digits.

        Hashes everything anew when the checksum differs.

        Raises UnsupportedModelError for weights that cannot be read.
        """
        named = list(self._tensors())
        with ThreadPoolExecutor(min(HASHING_THREADS, os.cpu_count() or 1)) as threads:
            checksums = b"".join(threads.map(_checksum, [tensor for _, tensor in named]))
            structure = _structure(self._model, named)
            checked = sha256(structure + checksums).digest()
            if checked != self._checked:
                digests = threads.map(_sha256, [tensor for _, tensor in named])
                whole = sha256(field("kvire", b"weights in memory") + structure)
                for digest in digests:
                    whole.update(digest)
                self._digest, self._checked = whole.hexdigest(), checked
        return self._digest

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
            if name.endswith(self._without):
                continue
            if tensor.device.type == "meta" or type(tensor).__module__.startswith("torch.distributed"):
                raise UnsupportedModelError(
                    f"{name} is not in this process's memory, so nothing can tell which weights compute: load the "
                    "whole model onto a device (no disk offload, no sharding)"
                )
            yield name, tensor.detach()


def _structure(model: nn.Module, named: list[tuple[str, Tensor]]) -> bytes:
    """Text of every module's place, numbers and tensors.

    The same weights in other modules are another model.
    """
    modules = (
        f"{name} {type(module).__module__}.{type(module).__qualname__}" for name, module in model.named_modules()
    )
    tensors = (f"{name} {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in named)
    return (
        field("modules", "\n".join(modules).encode())
        + field("attributes", plain_attributes(model))
        + field("tensors", "\n".join(tensors).encode())
    )


def _sha256(tensor: Tensor) -> bytes:
    digest = sha256()
    for chunk in _chunks(tensor):
        digest.update(chunk.cpu().numpy().data)
    return digest.digest()


def _checksum(tensor: Tensor) -> bytes:
    if tensor.device.type == "cpu":
        checksum = xxhash.xxh3_128()
        for chunk in _chunks(tensor):
            checksum.update(chunk.numpy().data)
        return checksum.digest()
    return b"".join(checksum_on_device(chunk) for chunk in _chunks(tensor))


def checksum_on_device(chunk: Tensor) -> bytes:
    """16 bytes for up to CHUNK_BYTES of uint8, computed on their device.

    They are two sums of bytes times odd random numbers.

    Arithmetic is modulo 2^64. A single change always changes both sums; two contents that differ in
    more have the same sums with a chance of less than 2^-100, unless chosen on purpose.
    """
    sums = []
    for factors in _factors(chunk.device):
        total = torch.zeros((), dtype=torch.int64, device=chunk.device)
        for number, part in enumerate(torch.split(chunk, len(factors))):
            total += (part.to(torch.int64) * factors[: len(part)]).sum() * (2 * number + 1)
        sums.append(total)
    return torch.stack(sums).cpu().numpy().tobytes()


@cache
def _factors(device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-(2**62), 2**62, (2, FACTORS), generator=generator) * 2 + 1
    first, second = numbers.to(device)
    return first, second


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    """The bytes of a tensor, without a copy if contiguous."""
    return iter(torch.split(tensor.contiguous().reshape(-1).view(torch.uint8), CHUNK_BYTES))
