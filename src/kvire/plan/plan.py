"""Everything that a plan is made from, and the times that follow from it."""

from collections.abc import Callable
from dataclasses import dataclass

from kvire.core.errors import ConfigError
from kvire.plan.hardware import Machine
from kvire.plan.hits import HitCurve
from kvire.plan.prices import Price
from kvire.plan.serve import PromptShape, Ttft, computed, from_device, from_tier
from kvire.plan.shape import Shape, Storage
from kvire.plan.sizing import MemoryUse, ServingUse
from kvire.plan.tiers import PlannedTier
from kvire.plan.verdict import kept_bytes_per_token


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """The model that is planned for.

    name: as it was given.
    title, source: for people.
    verified: the config is known to be the model's.
    """

    name: str
    title: str
    source: str
    verified: bool
    shape: Shape


@dataclass(frozen=True, slots=True)
class Money:
    """What things cost; None where it is not known.

    usd_per_hour: of the machine.
    requests_per_hour: that it answers.
    output_tokens: per answer.
    endurance_bytes: that the disk may be written in its life (TBW).
    prices: of hosted models to set beside.
    """

    usd_per_hour: float | None = None
    requests_per_hour: float | None = None
    output_tokens: int = 256
    endurance_bytes: int | None = None
    prices: tuple[Price, ...] = ()

    def __post_init__(self) -> None:
        for name in ("usd_per_hour", "requests_per_hour"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"--{name.replace('_', '-')} is a number above 0, got {value}")


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a plan is made from; plan/make.py makes it from what users say.

    title, source, verified: of the model.
    who: None where no machine was named.
    memory_bytes: None for the machine's.
    weights_dtype: None for the checkpoint's.
    curve: None if reuse is not known.
    """

    title: str
    source: str
    verified: bool
    shape: Shape
    storage: Storage
    use: ServingUse
    prompt: PromptShape
    tiers: tuple[PlannedTier, ...]
    money: Money
    who: Machine | None = None
    memory_bytes: int | None = None
    reserve: float = 0.1
    weights_dtype: str | None = None
    curve: HitCurve | None = None

    @property
    def weights_bytes(self) -> int:
        """Of all weights, as they are kept."""
        return self.shape.weights.size_bytes(self.weights_dtype)

    @property
    def memory(self) -> MemoryUse | None:
        """None where neither the user nor the machine says how much there is."""
        total = self.memory_bytes or (self.who.memory_bytes if self.who else None)
        return None if total is None else MemoryUse(total, self.weights_bytes, self.reserve)


def ttfts(plan: Plan) -> list[Ttft]:
    """Predicted time to the first token: nothing kept, on the device, and from every tier."""
    if plan.who is None:
        return []
    args = (plan.shape, plan.who, plan.prompt)
    tiers = [from_tier(*args, plan.storage, tier) for tier in plan.tiers]
    return [computed(*args), from_device(*args), *tiers]


def device_tokens(plan: Plan) -> int:
    """Tokens that the device has room to keep beside those of the users at work; 0 where its memory
    is not known.
    """
    if (memory := plan.memory) is None:
        return 0
    free = memory.kv_bytes - plan.use.users * plan.shape.sequence_bytes(plan.use.context, plan.storage)
    return max(0, int(free / kept_bytes_per_token(plan.shape, plan.storage, plan.use.context)))


def predictor(plan: Plan) -> Callable[[str, int, int], float | None]:
    """(state, prompt tokens, new tokens) to seconds until the first token; None for a state whose
    tier is not known.
    """
    assert plan.who is not None
    who, tiers = plan.who, {tier.state: tier for tier in reversed(plan.tiers)}

    def predict(state: str, tokens: int, new_tokens: int) -> float | None:
        prompt = PromptShape(tokens, new_tokens)
        if state in ("E", "Z"):
            return computed(plan.shape, who, prompt).seconds
        if state == "G":
            return from_device(plan.shape, who, prompt).seconds
        if state not in tiers:
            return None
        return from_tier(plan.shape, who, prompt, plan.storage, tiers[state]).seconds

    return predict
