"""The built-in engine as one side of a comparison: which model, with which options, on
which disk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvire.bench.arm import Judge
from kvire.bench.arms.server import PROGRAM
from kvire.bench.client import Endpoint
from kvire.bench.settings import Settings
from kvire.bench.states import TierState
from kvire.bench.work.ideal import Spell
from kvire.bench.work.prompts import BenchPrompt, TokenScale
from kvire.core.dtypes import KV_DTYPES
from kvire.core.errors import ConfigError
from kvire.core.spec import KVSpec
from kvire.models.catalog import ModelFacts, describe
from kvire.store.remote.open import url_without_secrets

OURS = ("--port", "--host", "--api-key", "--served-name", "--store", "--remote", "--ram", "--key-file", "--disk-size")
DEFAULT_BLOCK_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class KvireSetup:
    """Servers of Kvire that are started for the measurement.

    model: as `kvire serve` takes it.
    options: more for it.
    place: a folder on the disk to measure, in which a store is made and removed.
    remote: where state N finds its KV.
    encode: token ids of a prompt.
    program: the command.

    Raises ConfigError where these do not fit each other, the settings or the model.
    """

    model: str
    settings: Settings
    encode: Spell
    place: Path
    options: tuple[str, ...] = ()
    remote: str | None = None
    timeout_s: float = 600.0
    program: tuple[str, ...] = PROGRAM

    def __post_init__(self) -> None:
        _check(self.settings, self.options, self.remote)
        _check_model(self.facts, self.settings)
        _check_kv(self.kv_dtype, option_of(self.options, "--block-size"))

    @cached_property
    def facts(self) -> ModelFacts:
        """What is known of the model without loading it."""
        return describe(self.model)

    @cached_property
    def scale(self) -> TokenScale:
        """See Arm."""
        return TokenScale.measure(lambda messages: len(self.encode(BenchPrompt(tuple(messages), 1))))

    @property
    def kv_dtype(self) -> str:
        """Of the pool."""
        return option_of(self.options, "--kv-dtype") or "float32"

    @property
    def kv_bytes_per_token(self) -> int:
        """In the pool."""
        return self.facts.kv_bytes_per_token[self.kv_dtype]

    @property
    def kv_groups(self) -> list[dict[str, int | float | None]]:
        """Layers that keep equally much: their bytes per token, and of how many tokens."""
        spec = KVSpec(self.facts.groups, self.kv_dtype, self._block_tokens)
        return [
            {"bytes_per_token": spec.block_bytes(i) / spec.block_size, "window": group.window}
            for i, group in enumerate(spec.groups)
        ]

    @property
    def has_store(self) -> bool:
        """Whether anything is kept below the pool."""
        return "--no-store" not in self.options

    @property
    def endpoint(self) -> Endpoint:
        """How to ask a server, once it has an address."""
        return Endpoint("", self.model, timeout_s=self.timeout_s)

    @property
    def judge(self) -> Judge:
        """Tokens are known to the block."""
        return Judge(self.encode, self._block_tokens, "token ids")

    def describe(self) -> dict[str, Any]:
        """See Arm."""
        return {
            "kind": "kvire",
            "model": {
                "name": self.facts.name,
                "model_type": self.facts.model_type,
                "layers": self.facts.layers,
                "weights_bytes": self.facts.weights_bytes,
                "kv_dtype": self.kv_dtype,
                "kv_bytes_per_token": self.kv_bytes_per_token,
                "kv_groups": self.kv_groups,
                "block_tokens": self._block_tokens,
            },
            "options": list(self.options),
            "store": str(self.place) if self.has_store else None,
            "remote": None if self.remote is None else url_without_secrets(urlsplit(self.remote)),
        }

    def steps(self) -> int:
        """See Arm: passes, flushes of the pool, and starts."""
        states = set(self.settings.states)
        cells = len(list(self.settings.cells()))
        return (len(states) + (TierState.R in states)) * cells + 1 + len(states & {TierState.D, TierState.N})

    @property
    def _block_tokens(self) -> int:
        return int(option_of(self.options, "--block-size") or DEFAULT_BLOCK_TOKENS)


def option_of(options: Sequence[str], name: str) -> str | None:
    """The value of `--name value` or `--name=value`, the last one."""
    found = None
    for at, word in enumerate(options):
        if word == name and at + 1 < len(options):
            found = options[at + 1]
        elif word.startswith(f"{name}="):
            found = word.partition("=")[2]
    return found


def _check(settings: Settings, options: Sequence[str], remote: str | None) -> None:
    for word in options:
        if word.partition("=")[0] in OURS:
            raise ConfigError(f"{word} is for `kvire bench` to set: --store and --remote are options of its own")
    for state in settings.states:
        if state in {TierState.R, TierState.D, TierState.N} and "--no-store" in options:
            raise ConfigError(f"state {state} needs a store: leave out --no-store, or the state")
    if {TierState.G, TierState.W} <= set(settings.states):  # W would find in the pool what G computed
        raise ConfigError("states G and W find the same here: ask for one of them (W is for servers behind --url)")
    if TierState.N in settings.states and remote is None:
        raise ConfigError("state N needs a store that a new machine would find: name one with --remote URL")


def _check_model(facts: ModelFacts, settings: Settings) -> None:
    if not facts.supported:
        raise ConfigError(f"{facts.name} cannot be served: {facts.reason}")
    longest = max(settings.contexts)
    if longest + settings.output_tokens > facts.context_tokens:
        raise ConfigError(
            f"--context {longest} and an answer are more than the {facts.context_tokens} tokens of {facts.name}"
        )


def _check_kv(dtype: str, block_tokens: str | None) -> None:
    if dtype not in KV_DTYPES:
        raise ConfigError(f"--kv-dtype is one of {', '.join(KV_DTYPES)}; got {dtype!r}")
    if block_tokens is not None and not (block_tokens.isdecimal() and int(block_tokens) > 0):
        raise ConfigError(f"--block-size is a whole number above 0; got {block_tokens!r}")
