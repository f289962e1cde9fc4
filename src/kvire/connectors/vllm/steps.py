"""The speed of vLLM's prompts, measured from its steps, also with asynchronous scheduling."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic

from kvire.plan.cost import LEAST_STEP_TOKENS, PrefillSpeed

MOST_UNDER_WAY = 64  # planned steps without an end; vLLM plans about two ahead


@dataclass(frozen=True, slots=True)
class StepUnderWay:
    """A step under way.

    start, count: first token, and tokens, of the step's longest prompt.
    step_tokens: of all requests.
    planned_s: when it was.
    """

    start: int
    count: int
    step_tokens: int
    planned_s: float


class Steps:
    """For vLLM's scheduler thread only.

    prefill: receives the measurements.
    """

    def __init__(self, prefill: PrefillSpeed, clock: Callable[[], float] = monotonic) -> None:
        self._prefill = prefill
        self._clock = clock
        self._under_way: OrderedDict[int, StepUnderWay] = OrderedDict()
        self._number = 0
        self._last_ended_s = clock()

    def planned(self, starts: Mapping[str, int], counts: Mapping[str, int]) -> int | None:
        """A step will compute `counts` tokens of each request, from position `starts` on.

        Returns its number for `ended`; None if it measures no prompt.
        """
        largest = max(counts, key=counts.__getitem__, default=None)
        if largest is None or counts[largest] < LEAST_STEP_TOKENS:
            return None
        self._number += 1
        self._under_way[self._number] = StepUnderWay(
            starts.get(largest, 0), counts[largest], sum(counts.values()), self._clock()
        )
        if len(self._under_way) > MOST_UNDER_WAY:
            self._under_way.popitem(last=False)
        return self._number

    def ended(self, number: int | None) -> None:
        """A step has ended; its time began when it was planned, or when the one before ended.

        number: as `planned` returned it.
        """
        now = self._clock()
        step = None if number is None else self._under_way.pop(number, None)
        if step is not None:
            self._prefill.step(step.start, step.count, step.step_tokens, now - max(step.planned_s, self._last_ended_s))
        self._last_ended_s = now
