"""How long until the first token, by where the prompt's beginning is kept."""

from dataclasses import dataclass

from kvire.core.errors import ConfigError
from kvire.plan.cost import Speed, choose
from kvire.plan.hardware import Machine
from kvire.plan.shape import Shape, Storage
from kvire.plan.tiers import PlannedTier

STATES = {"G": "device", "R": "memory", "D": "disk", "N": "another node", "E": "nothing kept"}


@dataclass(frozen=True, slots=True)
class PromptShape:
    """A prompt, whose beginning may be known.

    tokens: of the prompt.
    new_tokens: at its end, computed by nobody before; at least one is always computed.
    """

    tokens: int
    new_tokens: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.new_tokens <= self.tokens:
            raise ConfigError(
                f"a prompt of {self.tokens} tokens has 1 to {self.tokens} new ones, got {self.new_tokens}"
            )

    def reused(self, block_tokens: int) -> int:
        """Tokens that a tier can give back: whole blocks only."""
        known = self.tokens - self.new_tokens
        return known - known % block_tokens


@dataclass(frozen=True, slots=True)
class Ttft:
    """Predicted seconds to the first token, alone on the machine.

    way: of the reused part: "device", "load", "both" (computing meets loading) or "compute".
    low_s, high_s: as far off as machine and tier may be.
    """

    state: str
    tier: str
    seconds: float
    low_s: float
    high_s: float
    load_s: float
    way: str


def computed(shape: Shape, who: Machine, prompt: PromptShape) -> Ttft:
    """State E: nothing is kept, everything is computed."""
    seconds = who.prefill_s(shape, 0, prompt.tokens)
    slow, fast = who.span
    return Ttft("E", "none", seconds, seconds / fast, seconds / slow, 0.0, "compute")


def from_device(shape: Shape, who: Machine, prompt: PromptShape) -> Ttft:
    """State G: the beginning lies where it is computed with.

    A hit may end inside a block, which is copied.
    """
    seconds = who.prefill_s(shape, prompt.tokens - prompt.new_tokens, prompt.tokens)
    slow, fast = who.span
    return Ttft("G", "device", seconds, seconds / fast, seconds / slow, 0.0, "device")


def from_tier(shape: Shape, who: Machine, prompt: PromptShape, storage: Storage, tier: PlannedTier) -> Ttft:
    """The beginning is loaded from a tier, or computed where that is faster, or both until they
    meet.
    """
    low_rate = 0.7 if tier.measured else 0.5  # nominal rates are seldom reached; a measured one varies less
    seconds, load_s, way = _loaded(shape, who, prompt, storage, tier, 1.0)
    slow, fast = who.span
    best, *_ = _loaded(shape, who.scaled(fast), prompt, storage, tier, 1.0)
    worst, *_ = _loaded(shape, who.scaled(slow), prompt, storage, tier, low_rate)
    return Ttft(tier.state, tier.name, seconds, best, worst, load_s, way)


def _loaded(
    shape: Shape, who: Machine, prompt: PromptShape, storage: Storage, tier: PlannedTier, rate: float
) -> tuple[float, float, str]:
    """(seconds to the first token, of them waiting for the tier alone if it were the only way, the
    way taken).
    """
    reused = prompt.reused(storage.block_tokens)
    rest_s = who.prefill_s(shape, reused, prompt.tokens)
    if reused == 0:
        return rest_s, 0.0, "compute"
    size = shape.sequence_bytes(reused, storage)
    speed = Speed(tier.latency_s, tier.bytes_per_s * rate)
    load_s = speed.seconds(size)
    if shape.states:  # a state cannot be computed from the front and loaded from the back at once
        spent = who.prefill_s(shape, 0, prompt.tokens)
        return (load_s + rest_s, load_s, "load") if load_s + rest_s < spent else (spent, load_s, "compute")
    choice = choose(speed, who.prefill_speed(shape, reused), 0, reused, size)
    return choice.seconds + rest_s, load_s, str(choice.way)
