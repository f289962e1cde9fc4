"""Options of an engine: frozen and strict. Measured values (how many blocks fit) are elsewhere."""

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from kvire.core.dtypes import KV_DTYPES
from kvire.core.errors import ConfigError
from kvire.core.memory import parse_size

ATTENTION_KINDS = ("auto", "native", "portable")
KV_CACHE_KINDS = ("paged", "contiguous", "off")
DEVICES = ("auto", "cpu", "cuda")
WEIGHTS = ("auto", "float32", "file", "int8")
ADMISSIONS = ("all", "turn")
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How the engine runs a model.

    kv_dtype: dtype of the pool: float32, float16, bfloat16 or int8.
    kv_memory: size of the pool, such as "2GiB", or "auto": half of free memory, but no more than
        max_num_seqs full contexts need.
    block_size: tokens per block, the granularity of reuse.
    prefix_cache: remember blocks of finished requests.
    max_model_len: longest prompt + answer, at most the model's own limit; by default that, or the
        capacity of the pool if it is less.
    max_batch_tokens: tokens computed in one step.
    max_num_seqs: sequences running at once.
    max_queue: requests waiting at most.
    attention: auto, native or portable.
    deterministic: the same bits however a token's KV came about; slower.
    kv_cache: paged; contiguous reserves max_model_len per sequence and shares nothing; off
        recomputes every step. Both of these are there to be measured against.
    device: auto, cpu or cuda.
    weights: form of the weights in memory: float32; file keeps a GGUF's blocks and 16-bit numbers
        as they are; int8 keeps a scale for every 32 numbers of 16 or 32 bits. auto is float32
        today.
    """

    kv_dtype: str = "float32"
    kv_memory: str | int = "auto"
    block_size: int = 16
    prefix_cache: bool = True
    max_model_len: int | None = None
    max_batch_tokens: int = 512
    max_num_seqs: int = 32
    max_queue: int = 256
    attention: str = "auto"
    deterministic: bool = False
    kv_cache: str = "paged"
    device: str = "auto"
    weights: str = "auto"

    def __post_init__(self) -> None:
        _one_of("kv_dtype", self.kv_dtype, tuple(KV_DTYPES))
        _one_of("attention", self.attention, ATTENTION_KINDS)
        _one_of("kv_cache", self.kv_cache, KV_CACHE_KINDS)
        _one_of("device", self.device, DEVICES)
        _one_of("weights", self.weights, WEIGHTS)
        if self.keeps_packed and self.device == "cuda":
            raise ConfigError(f"weights {self.weights!r} run on the CPU only; use weights='float32', or device='cpu'")
        if self.deterministic and self.kv_dtype != "float32":
            raise ConfigError(
                f"deterministic mode promises the bits of a float32 computation, so its pool keeps float32, not "
                f"kv_dtype {self.kv_dtype!r}; leave out one of the two options"
            )
        if self.kv_memory != "auto":
            parse_size(self.kv_memory, "kv_memory")
        for name in ("prefix_cache", "deterministic"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"{name} is either True or False, got {value!r}")
        for name in ("block_size", "max_batch_tokens", "max_num_seqs", "max_queue"):
            _positive(name, getattr(self, name))
        if self.max_model_len is not None:
            _positive("max_model_len", self.max_model_len)
        if self.block_size > 1024:
            raise ConfigError(f"block_size is in tokens and at most 1024, got {self.block_size}")
        if self.max_batch_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_batch_tokens ({self.max_batch_tokens}) must be at least max_num_seqs ({self.max_num_seqs}): "
                "every running sequence computes one token a step"
            )

    @property
    def keeps_packed(self) -> bool:
        """Whether weights stay in another form than float32."""
        return self.weights in {"file", "int8"}

    @property
    def weights_form(self) -> str:
        """float32, file or int8."""
        return self.weights if self.keeps_packed else "float32"

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> Self:
        """The config of keyword options; an unknown one is an error that lists the known ones."""
        known = [f.name for f in fields(cls)]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ConfigError(f"unknown option {', '.join(unknown)}; the options are {', '.join(known)}")
        return cls(**options)


def _one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name} must be one of {', '.join(known)}, got {value!r}")


def _positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ConfigError(f"{name} must be a positive whole number, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Where blocks are kept below the pool, and how many bytes of them.

    path: folder of the disk tier; None for no disk tier.
    disk_bytes: size limit of that folder, by `du`; None leaves an existing folder its limit, and
        gives a new one the size that kvire.store.place chooses.
    ram_bytes: size of the memory tier; 0 for none.
    remote: URLs of remote tiers, nearest first.
    encrypt: seal every block that leaves the process.
    key_file: path of the tenants' keys; None for the user's own.
    ttl_s: how long a block is kept unused; None for as long as there is room.
    writes_per_day_bytes: write limit of the disk tier per day (wear); None for no limit.
    admission: "all" keeps every block, "turn" those of finished requests and those used twice.
    load_timeout_s: how long one load may wait for a remote tier.
    required: whether a store that cannot be opened is an error; else it is a warning, and the
        engine works without one.
    """

    path: Path | None = None
    disk_bytes: int | None = None
    ram_bytes: int = 0
    remote: tuple[str, ...] = ()
    encrypt: bool = True
    key_file: Path | None = None
    ttl_s: float | None = None
    writes_per_day_bytes: int | None = None
    admission: str = "all"
    load_timeout_s: float = 0.5
    required: bool = True

    def __post_init__(self) -> None:
        _one_of("admission", self.admission, ADMISSIONS)
        for name in ("disk_bytes", "ram_bytes"):
            if name == "disk_bytes" and self.disk_bytes is None:
                continue
            if not isinstance(value := getattr(self, name), int) or isinstance(value, bool) or value < 0:
                raise ConfigError(f"{name} must be a number of bytes, got {value!r}")
        if self.writes_per_day_bytes is not None:
            _positive("writes_per_day_bytes", self.writes_per_day_bytes)
        for name in ("ttl_s", "load_timeout_s"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} must be a positive number of seconds, got {value!r}")

    @property
    def is_empty(self) -> bool:
        """Whether there is no tier at all."""
        return self.path is None and not self.ram_bytes and not self.remote
