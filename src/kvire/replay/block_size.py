"""The tokens per hash_id of a trace, inferred from lengths and numbers of ids."""

from collections import Counter
from collections.abc import Iterable

from kvire.core.errors import ConfigError

# Sizes that traces have: Bailian's and vLLM's 16, Dynamo's and kv-cache-tester's 64, Mooncake's
# 512; and the others that engines offer.
SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)

Prompts = Counter[tuple[int, int]]  # (tokens, ids): how many prompts


def block_tokens_of(prompts: Iterable[tuple[int, int]], given: int | None = None) -> int:
    """The size of blocks of prompts that are (tokens, ids) each.

    given: by the user or the file.

    Raises ConfigError, which names the option, if nothing tells the size or the given one is wrong.
    """
    counted = Counter(prompts)
    likely = _likely(counted)
    if given is None:
        if len(likely) == 1:
            return likely[0]
        fitting = f"prompts fit blocks of {', '.join(map(str, likely))} tokens" if likely else "no usual size fits them"
        raise ConfigError(
            f"how many tokens one of the hash_ids stands for is not told: {fitting}. Say it with --block-tokens, 16 "
            "for Bailian and vLLM, 64 for Dynamo, 512 for Mooncake, or with a field block_size in the file"
        )
    better = _fits(counted, likely[0]) if likely else 0
    too_many = sum(count for (tokens, ids), count in counted.items() if ids > _blocks(tokens, given))
    if (likely and given not in likely and better > _fits(counted, given)) or 2 * too_many > counted.total():
        right = f"blocks of {' or '.join(map(str, likely))} do" if likely else "nor do the usual sizes"
        raise ConfigError(
            f"blocks of {given} tokens do not fit {counted.total() - _fits(counted, given):,} of the "
            f"{counted.total():,} prompts, whose hash_ids are more or fewer; {right}. See --block-tokens"
        )
    return given


def _likely(prompts: Prompts) -> list[int]:
    """The sizes that fit most prompts, and more than half of them."""
    fits = {size: _fits(prompts, size) for size in SIZES}
    most = max(fits.values())
    return [size for size, count in fits.items() if count == most and 2 * count > prompts.total()]


def _fits(prompts: Prompts, size: int) -> int:
    """Prompts that have as many ids as they have blocks, the last partly filled or left out."""
    ceil = sum(count for (tokens, ids), count in prompts.items() if ids == _blocks(tokens, size))
    floor = sum(count for (tokens, ids), count in prompts.items() if ids == tokens // size)
    return max(ceil, floor)


def _blocks(tokens: int, size: int) -> int:
    return -(-tokens // size)
