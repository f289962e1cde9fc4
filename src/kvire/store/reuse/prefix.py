"""The one rule about prefixes: how far a prompt can go on from blocks that are stored."""

from collections.abc import Callable, Sequence

from kvire.core.spec import first_needed


def reach(
    windows: Sequence[int | None], block_size: int, first: int, stop: int, has: Callable[[int, int], bool]
) -> int:
    """The most leading blocks, at most `stop`, after which every part can go on; never less than `first`.

    windows: of each part of a block, in tokens; None looks at everything before it. first: leading blocks that the
    device has. has(index, part): whether that part of block `index` is at hand; only asked about what is needed.
    """
    stop, before = max(first, stop), None
    while stop != before:  # a shorter extent moves the windows
        before = stop
        for part, window in enumerate(windows):
            begin = max(first, first_needed(window, stop * block_size, block_size))
            stop = next((index for index in range(begin, stop) if not has(index, part)), stop)
    return stop
