"""Parameters of one layer's attention, besides its queries and KV."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionParams:
    """softmax(softcap(scale * Q K^T) + mask) V, the mask causal and cut to the window.

    scale: factor of the scores.
    window: attend to the last `window` positions, the query's own included; None: to all. softcap
        c: scores become c * tanh(score / c).
    sinks: float [query_heads]; each adds exp(sink) to the sum that the softmax of its head divides
        by.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.window is None or self.window > 0
        assert self.softcap is None or self.softcap > 0
