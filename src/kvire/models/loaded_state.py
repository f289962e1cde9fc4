"""State of a loaded model besides its weights' exact values: plain numbers, buffers, weight layout.

Loading code makes it from the same files, and may make it differently in another release.
"""

from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn

from kvire.core.keys import field

WHOLE_BYTES = 1 << 16  # a tensor up to this size counts whole, a larger one by SAMPLE_BYTES at three places
SAMPLE_BYTES = 4096
NOT_OF_KV = frozenset({"name_or_path", "warnings_issued"})  # origin of a model; warnings issued
PLAIN = (bool, int, float, str, type(None))


def loaded_state(model: nn.Module) -> str:
    """Digest of a loaded checkpoint: 64 hexadecimal digits.

    It covers plain attributes, buffers and samples of every weight. Two releases that read the same
    files alike have the same digest; one that turns, joins or scales weights differently has
    another. Takes milliseconds, and is no guard against edits of single weights.
    """
    digest = sha256(field("kvire", b"loaded state") + field("attributes", plain_attributes(model)))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(field("tensor", f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()))
        digest.update(field("bytes", b"".join(_some_bytes(tensor.detach()))))
    return digest.hexdigest()


def plain_attributes(model: nn.Module) -> bytes:
    """The modules' numbers, strings and collections of them, by module and name.

    For example scales, widths, epsilons. Names with an underscore are excluded: they are internal
    to torch and transformers.
    """
    found = [
        (place, name, ordered(value))
        for place, module in model.named_modules()
        for name, value in vars(module).items()
        if name[0] != "_" and name not in NOT_OF_KV and is_plain(value)
    ]
    return repr(sorted(found, key=lambda each: each[:2])).encode("utf-8", "surrogatepass")


def is_plain(value: object) -> bool:
    """Whether a value is a number, a string, None, or a collection of such."""
    if isinstance(value, PLAIN):
        return True
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return isinstance(value, dict) and all(map(is_plain, (*value, *value.values())))


def ordered(value: Any) -> Any:
    """A dict as its sorted items, since its meaning does not depend on order; anything else
    unchanged.
    """
    return sorted(value.items(), key=repr) if isinstance(value, dict) else value


def _some_bytes(tensor: Tensor) -> Iterator[bytes]:
    flat = tensor.contiguous().reshape(-1)
    size, count = flat.element_size(), flat.numel()
    some = SAMPLE_BYTES // size
    starts = (0,) if count * size <= WHOLE_BYTES else (0, count // 2, count - some)
    for start in starts:
        piece = flat if len(starts) == 1 else flat[start : start + some]
        yield piece.view(torch.uint8).cpu().numpy().tobytes()
