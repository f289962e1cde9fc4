"""Host memory to device memory and back: the batch of every step, and blocks by their ids.

On a GPU both use pinned memory, the only kind whose copies overlap with other work.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from kvire.cache.batch import Batch

ALIGNMENT_BYTES = 16  # of each tensor in the buffer; the widest element has 8


class BatchStaging:
    """Brings batches to `device`, all their tensors in one copy that the host does not wait for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._host = _host_buffer(0, device)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def to_device(self, batch: Batch) -> Batch:
        """The same batch with every tensor on the device; lists stay on the host."""
        found = {f.name: getattr(batch, f.name) for f in fields(batch)}
        tensors = [x for value in found.values() for x in _tensors(value)]
        moved = iter(self._move(tensors))
        changed: dict[str, Any] = {}
        for name, value in found.items():
            if isinstance(value, Tensor):
                changed[name] = next(moved)
            elif parts := _tensors(value):
                changed[name] = tuple(next(moved) for _ in parts)
        return replace(batch, **changed)

    def _move(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        starts, end = [], 0
        for x in tensors:
            starts.append(end)
            end += -(-x.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if self._copied is not None:
            self._copied.synchronize()  # a step without logits may end before its batch has arrived
        if end > self._host.numel():
            self._host = _host_buffer(2 * end, self.device)
        for x, start in zip(tensors, starts, strict=True):
            self._host[start : start + x.nbytes].view(x.dtype).copy_(x.reshape(-1))
        arrived = torch.empty(end, dtype=torch.uint8, device=self.device)
        arrived.copy_(self._host[:end], non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self.device))
        return [
            arrived[start : start + x.nbytes].view(x.dtype).view(x.shape)
            for x, start in zip(tensors, starts, strict=True)
        ]


class BlockCopies:
    """Copies blocks of one group's slabs to a host buffer and back, overlapping with computation.

    slabs: [num_blocks, elements].

    A buffer from `host_blocks` is pinned; other host memory works, but the host waits for its
    copies. Copies run in the order of the calls.
    """

    def __init__(self, slabs: Tensor) -> None:
        self.slabs = slabs
        on_gpu = slabs.device.type == "cuda"
        self._stream = torch.cuda.Stream(slabs.device) if on_gpu else None  # type: ignore[no-untyped-call]

    def host_blocks(self, count: int) -> Tensor:
        """Room for `count` blocks: [count, elements]."""
        size_bytes = count * self.slabs.shape[1] * self.slabs.element_size()
        return _host_buffer(size_bytes, self.slabs.device).view(self.slabs.dtype).view(count, -1)

    def copy_out(self, block_ids: Sequence[int], host: Tensor) -> "Copy":
        """Copy blocks into host[i], after all device work queued so far.

        They must not be written before the copy is done.
        """
        with torch.cuda.stream(self._begin()):
            host.copy_(self.slabs.index_select(0, self._ids(block_ids)), non_blocking=True)
            return Copy(self._stream)

    def copy_in(self, host: Tensor, block_ids: Sequence[int]) -> "Copy":
        """Copy host[i] into the blocks; they must not be read or written before the copy is
        done.
        """
        with torch.cuda.stream(self._begin()):
            blocks = torch.empty(host.shape, dtype=host.dtype, device=self.slabs.device)
            blocks.copy_(host, non_blocking=True)
            self.slabs.index_copy_(0, self._ids(block_ids), blocks)
            return Copy(self._stream)

    def _begin(self) -> torch.cuda.Stream | None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.slabs.device))
        return self._stream

    def _ids(self, block_ids: Sequence[int]) -> Tensor:
        ids = torch.tensor(block_ids, dtype=torch.int64, device="cpu", pin_memory=self._stream is not None)
        return ids.to(self.slabs.device, non_blocking=True)


class Copy:
    """A copy that may still be in progress; on the CPU it is done when it is made."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._event = stream.record_event() if stream is not None else None

    def done(self) -> bool:
        """Whether all blocks have arrived; does not wait."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Return once all blocks have arrived."""
        if self._event is not None:
            self._event.synchronize()


def _tensors(value: object) -> tuple[Tensor, ...]:
    """The tensors in a field of a batch: itself, a tuple of them, or none."""
    if isinstance(value, Tensor):
        return (value,)
    return tuple(x for x in value if isinstance(x, Tensor)) if isinstance(value, tuple) else ()


def _host_buffer(size_bytes: int, device: torch.device) -> Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
