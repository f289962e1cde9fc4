"""vLLM's cache of one group as whole blocks.

The pages of all its layers are gathered into one row of bytes, and scattered back.

vLLM shows each layer as a tensor [blocks, heads, tokens, content], of any strides. A row is all
layers' pages one after the other, in the group's order, each as the bytes of a contiguous [heads,
tokens, content].
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from kvire.core.errors import UnsupportedModelError

Rows = npt.NDArray[np.uint8]  # [blocks, row_bytes]


def open_pages(layers: Sequence[Any], num_blocks: int) -> "HostPages | DevicePages":
    """Pages of a group, given vLLM's tensors in order.

    Raises UnsupportedModelError for anything but an attention cache.
    """
    import torch  # noqa: PLC0415 - vLLM has it by now; who only reads this module needs none

    views = []
    for layer in layers:
        if not isinstance(layer, torch.Tensor) or layer.dim() != 4 or layer.stride(-1) != 1:
            raise UnsupportedModelError(
                "Kvire cannot keep this model's KV under vLLM: a layer's cache is not one tensor of blocks, heads, "
                "tokens and content; start vLLM without the connector"
            )
        # the kernels may see a block as several: [blocks, pieces, heads, tokens, bytes]
        views.append(layer.view(torch.uint8).unflatten(0, (num_blocks, -1)))  # type: ignore[no-untyped-call]
    return HostPages(views) if views[0].device.type == "cpu" else DevicePages(views)


class HostPages:
    """Pages of a cache in main memory.

    Any thread may use it: NumPy copies with one thread, and starts no pool of its own.
    """

    def __init__(self, views: Sequence[Any]) -> None:
        self._pages: list[npt.NDArray[np.uint8]] = [view.numpy() for view in views]
        self._sizes = [prod(pages.shape[1:]) for pages in self._pages]
        self.row_bytes = sum(self._sizes)

    def gather(self, block_ids: Sequence[int], rows: Rows) -> None:
        """Copy blocks into rows."""
        start = 0
        for pages, size in zip(self._pages, self._sizes, strict=True):
            for row, block_id in zip(rows, block_ids, strict=True):
                np.copyto(row[start : start + size].reshape(pages.shape[1:]), pages[block_id])
            start += size

    def scatter(self, block_ids: Sequence[int], rows: Rows) -> None:
        """Copy rows into blocks."""
        start = 0
        for pages, size in zip(self._pages, self._sizes, strict=True):
            for row, block_id in zip(rows, block_ids, strict=True):
                np.copyto(pages[block_id], row[start : start + size].reshape(pages.shape[1:]))
            start += size


class DevicePages:
    """Pages of a cache on an accelerator, collected there and moved in one copy.

    Both calls wait for it.
    """

    def __init__(self, views: Sequence[Any]) -> None:
        self._views = views
        self._sizes = [prod(view.shape[1:]) for view in views]
        self.row_bytes = sum(self._sizes)

    def gather(self, block_ids: Sequence[int], rows: Rows) -> None:
        """Copy blocks into rows, after all earlier work on the current stream."""
        import torch  # noqa: PLC0415 - as above

        ids = torch.tensor(block_ids, device=self._views[0].device)
        pages = [view.index_select(0, ids).reshape(len(block_ids), -1) for view in self._views]
        torch.from_numpy(rows).copy_(torch.cat(pages, 1))

    def scatter(self, block_ids: Sequence[int], rows: Rows) -> None:
        """Copy rows into blocks; complete when this returns."""
        import torch  # noqa: PLC0415 - as above

        device = self._views[0].device
        ids, here = torch.tensor(block_ids, device=device), torch.from_numpy(rows).to(device)
        start = 0
        for view, size in zip(self._views, self._sizes, strict=True):
            view.index_copy_(0, ids, here[:, start : start + size].reshape(-1, *view.shape[1:]))
            start += size
        ids.cpu()  # a copy back waits for all earlier work
