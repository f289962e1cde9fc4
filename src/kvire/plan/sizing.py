"""How many users at which context, where KV outgrows the weights, and what each way of using a
model adds.
"""

from dataclasses import dataclass

from kvire.core.errors import ConfigError
from kvire.plan.shape import Shape, Storage

SOME_USERS = 10  # what growth by users is shown with where only one is planned for
CONTEXTS = (2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 1048576)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Where weights and KV lie.

    reserve: the share that neither gets (activations, buffers, fragments).
    """

    total_bytes: int
    weights_bytes: int
    reserve: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.reserve < 1:
            raise ConfigError(f"--reserve is a share of the memory, from 0 to below 1, got {self.reserve}")

    @property
    def kv_bytes(self) -> int:
        """What is left for KV; 0 if the weights alone do not fit."""
        return max(0, int(self.total_bytes * (1 - self.reserve)) - self.weights_bytes)


def users(shape: Shape, storage: Storage, memory: MemoryUse, context: int) -> int:
    """How many sequences of that length have room together, sharing nothing."""
    return memory.kv_bytes // shape.sequence_bytes(context, storage)


def longest_context(shape: Shape, storage: Storage, memory: MemoryUse, count: int = 1) -> int:
    """The longest context that so many sequences can have together; 0 if none, at most what the
    model was made for.
    """
    high = shape.context_tokens or CONTEXTS[-1]
    low, each = 0, memory.kv_bytes // count
    while low < high:
        middle = (low + high + 1) // 2
        if shape.sequence_bytes(middle, storage) <= each:
            low = middle
        else:
            high = middle - 1
    return low


def parity_tokens(shape: Shape, storage: Storage, weights_bytes: int) -> int | None:
    """The length from which one sequence's KV takes at least as much as the weights; None if it
    stops growing.
    """
    growing = shape.growing_bytes(storage)
    if growing == 0:
        return None
    low, high = 0, weights_bytes // growing + storage.block_tokens + 1
    while low < high:
        middle = (low + high) // 2
        if shape.sequence_bytes(middle, storage) >= weights_bytes:
            high = middle
        else:
            low = middle + 1
    return low


def parity_users(shape: Shape, storage: Storage, weights_bytes: int, context: int) -> int:
    """How many users at that context it takes until their KV is at least as large as
    the weights.
    """
    return -(-weights_bytes // shape.sequence_bytes(context, storage))


@dataclass(frozen=True, slots=True)
class ServingUse:
    """How a model is used.

    context: tokens of one conversation.
    users: at once.
    reasoning_tokens: thought before an answer and kept.
    hours, tokens_per_hour: how long a session goes on, and what it adds.
    sessions: kept though nobody is typing.
    agents, agent_tokens: that share one context, and what each adds to it.
    """

    context: int = 8192
    users: int = 1
    reasoning_tokens: int = 8192
    hours: int = 8
    tokens_per_hour: int = 16384
    sessions: int = 1000
    agents: int = 16
    agent_tokens: int = 2048

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} is at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Growth:
    """One direction: what grows, from which to which bytes of KV.

    shared_bytes: the same with a common prefix kept only once.
    """

    direction: str
    what: str
    from_bytes: int
    to_bytes: int
    shared_bytes: int | None = None

    @property
    def factor(self) -> float:
        """How many times as much."""
        return self.to_bytes / self.from_bytes


def growth(shape: Shape, storage: Storage, use: ServingUse) -> list[Growth]:
    """The six directions in which KV grows, each alone, from one user at the context."""

    def one(tokens: int) -> int:
        return shape.sequence_bytes(tokens, storage)

    base = one(use.context)
    longer = use.context + use.hours * use.tokens_per_hour
    fork = use.context + use.agent_tokens
    branch = one(use.agent_tokens)  # with a state of its own, and a window as far as it is not the shared one
    together = use.users if use.users > 1 else SOME_USERS
    long, thought = 4 * use.context, use.context + use.reasoning_tokens
    return [
        Growth("length", f"a context of {long:,} tokens instead of {use.context:,}", base, one(long)),
        Growth("reasoning", f"{use.reasoning_tokens:,} tokens of thought kept", base, one(thought)),
        Growth("users", f"{together:,} at once instead of one", base, together * base),
        Growth("hours", f"{use.hours:,} hours that add {use.tokens_per_hour:,} tokens each", base, one(longer)),
        Growth("kept sessions", f"{use.sessions:,} kept for their return", base, use.sessions * base),
        Growth(
            "agents", f"{use.agents:,} on one context, {use.agent_tokens:,} tokens each", base, use.agents * one(fork),
            base + use.agents * branch,
        ),
    ]  # fmt: skip
