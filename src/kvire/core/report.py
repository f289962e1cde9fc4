"""Sources of a prompt's KV, and why the rest had to be computed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvire.core.tier_kind import LoadedTokens, every_kind


class MissReason(StrEnum):
    """Why reuse ended.

    COMPLETE: every reusable token was reused (in deterministic mode, full blocks).
    """

    COMPLETE = "complete"
    OFF = "off"  # the prefix cache is switched off
    PROMPT_LOGPROBS = "prompt_logprobs"  # logprobs of prompt tokens need their logits: recomputed
    SHORTER_THAN_BLOCK = "shorter_than_block"  # a single token, or, where only full blocks are reused, less than one
    DIVERGED = "diverged"  # the closest remembered prompt differs, or ends, at token `miss_token`
    EVICTED = "evicted"  # was remembered, had to make room
    NEVER_STORED = "never_stored"  # no remembered prompt starts like this
    OTHER_NAMESPACE = "other_namespace"  # stored under another model, dtype, block size, ...: `miss_detail` names them
    DAMAGED = "damaged"  # was stored, but its bytes were damaged since
    UNAVAILABLE = "unavailable"  # the tier that may have it did not answer in time
    SLOWER = "slower_than_recomputing"  # is stored, but computing it was the faster way


@dataclass(frozen=True, slots=True)
class CacheReport(LoadedTokens):
    """Tokens of one prompt by source; they sum to the prompt, always.

    device_tokens: reused from the pool.
    loaded_tokens: from tiers of the store, by the name of the tier's kind.
    computed_tokens: run through the model.
    recomputed_tokens: prompt and generated tokens computed again after preemptions, on top of the
        prompt.
    miss_token: position of the first token that no remembered prompt shares, where that is known.
    miss_detail: for OTHER_NAMESPACE, the fields that differ.
    saved_s: seconds that computing the reused tokens would have taken, by this engine's own
        measure, less the seconds spent waiting for them; None before it has measured.
    """

    device_tokens: int
    computed_tokens: int
    miss: MissReason
    miss_token: int | None = None
    loaded_tokens: Mapping[str, int] = field(default_factory=dict)
    miss_detail: str | None = None
    saved_s: float | None = None
    recomputed_tokens: int = 0
    preemptions: int = 0

    def __post_init__(self) -> None:
        assert min(self.device_tokens, *self.loaded_tokens.values(), 0) >= 0
        assert min(self.recomputed_tokens, self.preemptions) >= 0
        assert self.computed_tokens >= 1, "at least the last prompt token is always computed"

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return self.reused_tokens + self.computed_tokens

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return self.device_tokens + sum(self.loaded_tokens.values())

    def counts(self) -> dict[str, int]:
        """Counts that add up over prompts, by their name in JSON."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "device_tokens": self.device_tokens,
            **{f"{kind}_tokens": tokens for kind, tokens in every_kind(self.loaded_tokens).items()},
            "computed_tokens": self.computed_tokens,
            "recomputed_tokens": self.recomputed_tokens,
            "preemptions": self.preemptions,
        }

    def as_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {
            **self.counts(),
            "miss": str(self.miss),
            "miss_token": self.miss_token,
            "miss_detail": self.miss_detail,
            "saved_s": None if self.saved_s is None else round(self.saved_s, 6),
        }
