"""Number of blocks of each group for the available memory, and the longest possible sequence."""

from dataclasses import dataclass
from typing import Self

from kvire.core.config import EngineConfig
from kvire.core.dtypes import smaller_than
from kvire.core.errors import ConfigError
from kvire.core.memory import format_size, parse_size
from kvire.core.spec import KVSpec

# Of the memory that is free once the weights are loaded, `auto` takes at most this share.
AUTO_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Division of the pool's memory.

    num_blocks: of each group.
    max_model_len: longest prompt + answer.
    pool_bytes: of all blocks.
    """

    num_blocks: tuple[int, ...]
    max_model_len: int
    pool_bytes: int

    @classmethod
    def measure(cls, config: EngineConfig, spec: KVSpec, max_positions: int, free_bytes: int) -> Self:
        """Raises ConfigError if the requested sizes do not fit, with sizes that would."""
        wanted_len = config.max_model_len or max_positions
        if wanted_len > max_positions:
            raise ConfigError(
                f"max_model_len {wanted_len} is more than the {max_positions} tokens the model was made for"
            )
        context_blocks = -(-wanted_len // spec.block_size)
        if config.kv_memory == "auto":
            pool_bytes = int(free_bytes * AUTO_SHARE)
            longest = context_blocks * config.max_num_seqs
        else:
            pool_bytes = parse_size(config.kv_memory)
            longest = pool_bytes  # more blocks than there can be
            if pool_bytes > free_bytes:
                raise ConfigError(
                    f"kv_memory {format_size(pool_bytes)} is more than the {format_size(free_bytes)} that are free; "
                    "give less, or kv_memory='auto'"
                )
        blocks = _most_blocks(config, spec, pool_bytes, longest)
        capacity = blocks * spec.block_size
        if _only_windows(config, spec) and blocks >= max(
            _window_blocks(config, spec, group.window) for group in spec.groups if group.window is not None
        ):
            capacity = max(capacity, wanted_len)  # the blocks of a sequence do not grow with its length
        if capacity < min(wanted_len, 2 * spec.block_size) or (config.max_model_len and capacity < wanted_len):
            needed_bytes = _pool_bytes(spec, _per_group(config, spec, context_blocks))
            raise ConfigError(
                f"kv_memory of {format_size(pool_bytes)} holds {capacity} tokens, but {wanted_len} need "
                f"{format_size(needed_bytes)}; give more kv_memory, or a smaller max_model_len{_smaller_dtypes(config)}"
            )
        num_blocks = _per_group(config, spec, blocks)
        return cls(num_blocks, min(wanted_len, capacity), _pool_bytes(spec, num_blocks))


def _most_blocks(config: EngineConfig, spec: KVSpec, pool_bytes: int, limit: int) -> int:
    """The most blocks of the group with the longest reach that fit beside the other groups'
    blocks.
    """
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if _pool_bytes(spec, _per_group(config, spec, middle)) <= pool_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def _per_group(config: EngineConfig, spec: KVSpec, blocks: int) -> tuple[int, ...]:
    """Blocks of each group if the one with the longest reach has `blocks`.

    A window group beside a full one gets twice the blocks that every running sequence can hold:
    once more for windows that are remembered at the ends of prefixes. Memory beyond that goes to
    the full group instead.
    """
    if config.kv_cache != "paged" or _only_windows(config, spec):
        return (blocks,) * len(spec.groups)
    return tuple(
        blocks if group.window is None else min(blocks, _window_blocks(config, spec, group.window))
        for group in spec.groups
    )


def _only_windows(config: EngineConfig, spec: KVSpec) -> bool:
    return config.kv_cache == "paged" and all(group.window is not None for group in spec.groups)


def _smaller_dtypes(config: EngineConfig) -> str:
    """Advice, if there is any."""
    smaller = " or ".join(repr(name) for name in smaller_than(config.kv_dtype) if name != "bfloat16")
    return f", or kv_dtype={smaller}" if smaller and not config.deterministic else ""


def _window_blocks(config: EngineConfig, spec: KVSpec, window: int) -> int:
    span = window // spec.block_size + 2
    return 2 * config.max_num_seqs * span + config.max_batch_tokens // spec.block_size + 2


def _pool_bytes(spec: KVSpec, num_blocks: tuple[int, ...]) -> int:
    return sum(spec.block_bytes(g) * count for g, count in enumerate(num_blocks))
