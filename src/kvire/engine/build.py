"""From a model's name and options to a running engine: what is measured on the way is a MemoryPlan."""

from dataclasses import dataclass
from typing import Self

from kvire.attention.cpu import best_attention
from kvire.attention.paged_cache import PagedCache, PagedModel
from kvire.cache.paged import PagedKV
from kvire.core.config import EngineConfig
from kvire.core.errors import ConfigError
from kvire.core.memory import available_bytes, format_size, parse_size
from kvire.core.spec import KVSpec
from kvire.engine.engine import Engine
from kvire.models.fingerprint import namespace
from kvire.models.loader import LoadedModel, load
from kvire.models.native_modules import use_native_modules
from kvire.models.progress import Progress
from kvire.models.resolve import resolve

# Of the memory that is free once the weights are loaded, `auto` takes at most this share.
AUTO_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How many blocks there are, and so how long one sequence may become."""

    num_blocks: int
    max_model_len: int
    pool_bytes: int

    @classmethod
    def measure(cls, config: EngineConfig, spec: KVSpec, max_positions: int, free_bytes: int) -> Self:
        """Raises ConfigError if what is asked for does not fit, saying what would."""
        wanted_len = config.max_model_len or max_positions
        if wanted_len > max_positions:
            raise ConfigError(
                f"max_model_len {wanted_len} is more than the {max_positions} tokens the model was made for"
            )
        block_bytes = spec.bytes_per_token * spec.block_size
        full_context = -(-wanted_len // spec.block_size) * block_bytes
        if config.kv_memory == "auto":
            pool_bytes = min(int(free_bytes * AUTO_SHARE), full_context * config.max_num_seqs)
        else:
            pool_bytes = parse_size(config.kv_memory)
            if pool_bytes > free_bytes:
                raise ConfigError(
                    f"kv_memory {format_size(pool_bytes)} is more than the {format_size(free_bytes)} that are free; "
                    "give less, or kv_memory='auto'"
                )
        num_blocks = pool_bytes // block_bytes
        capacity = num_blocks * spec.block_size
        if capacity < min(wanted_len, 2 * spec.block_size) or (config.max_model_len and capacity < wanted_len):
            raise ConfigError(
                f"kv_memory of {format_size(pool_bytes)} holds {capacity} tokens, but {wanted_len} need "
                f"{format_size(full_context)} ({format_size(spec.bytes_per_token)} a token in {spec.dtype}); give more "
                "kv_memory, a smaller max_model_len, or kv_dtype='float16'"
            )
        return cls(num_blocks, min(wanted_len, capacity), num_blocks * block_bytes)


def build_engine(name: str, config: EngineConfig, progress: Progress | None = None) -> tuple[Engine, LoadedModel]:
    """Find, load and wire up a model; computes in float32.

    Raises ModelNotFoundError, UnsupportedModelError or ConfigError.
    """
    loaded = load(resolve(name, progress=progress), name=name, progress=progress)
    spec = KVSpec(loaded.groups, config.kv_dtype, config.block_size)
    plan = MemoryPlan.measure(config, spec, loaded.max_positions, available_bytes())
    backend = best_attention(config.attention)
    if backend.name.startswith("native"):
        use_native_modules(loaded.model)
    paged = PagedKV(spec, plan.num_blocks)
    engine = Engine(
        PagedModel(loaded.model, PagedCache(paged, backend)),
        paged,
        config,
        namespace(
            weights=loaded.weights_digest,
            config=loaded.config_digest,
            groups=loaded.groups,
            numerics=f"float32/{backend.name}",
            kv_dtype=config.kv_dtype,
            block_size=config.block_size,
        ),
        max_model_len=plan.max_model_len,
        vocab_size=loaded.model.get_input_embeddings().num_embeddings,
        eos_token_ids=frozenset(loaded.eos_token_ids),
        tokenizer=loaded.tokenizer,
    )
    return engine, loaded
