"""When an answer equals the oracle's.

Deterministic engines must give the oracle's tokens and logprobs, bit for bit. Fast ones may round
differently:

- logprobs of tokens after the same history differ by at most MEAN_NATS on average over an answer,
  MAX_NATS at most;
- a first other token is harmless only if the oracle's two likeliest tokens there are closer than
  TIE_NATS. (Where penalties or a temperature stand between logits and choice, that rule says
  nothing; the logprobs still do.)
- after it, the oracle scores the tokens of the given answer, so that none is left unjudged.
"""

import math
from dataclasses import dataclass

from harness.engines import Answer, ask, drive
from kvire.engine.engine import Engine
from kvire.engine.request import Request
from kvire.engine.sampler import needs_penalties

MEAN_NATS, MAX_NATS, TIE_NATS = 0.05, 0.5, 0.15


@dataclass(frozen=True)
class Verdict:
    """The judgement of one answer.

    fault: the answer's error, or None.
    """

    fault: str = ""
    diverged: bool = False
    worst_nats: float = 0.0


class Oracle:
    """The same engine with nothing reused: each request alone, each sample computed from its first
    token.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._known: dict[tuple[tuple[int, ...], str], dict[int, Answer]] = {}

    def answers(self, asked: Request) -> dict[int, Answer]:
        """By sample."""
        key = (asked.token_ids, repr(asked.params))
        if key not in self._known:
            alone = Request(f"{asked.request_id}-alone", asked.token_ids, asked.params)
            found = drive(self.engine, [alone], check=False)
            self._known[key] = {index: answer for (_, index), answer in found.items()}
        return self._known[key]

    def score(self, prompt: tuple[int, ...], answer: list[int]) -> list[float]:
        """Logprobs of the answer's tokens, in one pass over prompt and answer."""
        ids = [*prompt, *answer]
        scored = ask(self.engine, ids, max_tokens=0, prompt_logprobs=0).prompt_logprobs
        assert scored is not None
        return [entry.logprob for entry in scored[len(prompt) :]]


def exactly(cold: Answer, warm: Answer) -> Verdict:
    """The same tokens, the same bits."""
    if warm.token_ids != cold.token_ids:
        return Verdict(f"tokens {warm.token_ids}, the oracle's {cold.token_ids}")
    if warm.finish_reason != cold.finish_reason:
        return Verdict(f"ended by {warm.finish_reason}, the oracle's by {cold.finish_reason}")
    if warm.logprobs != cold.logprobs:
        return Verdict("logprobs differ", worst_nats=max(_deltas(cold, warm)))
    return Verdict()


def nearly(oracle: Oracle, asked: Request, cold: Answer, warm: Answer) -> Verdict:
    """The rule for fast mode, at the head of this page."""
    shared = _shared(cold.token_ids, warm.token_ids)
    deltas = _deltas(cold, warm)
    diverged = shared < min(len(cold.token_ids), len(warm.token_ids))
    if diverged:
        before, after = cold.logprobs[shared], warm.logprobs[shared]
        best, second = sorted(before.top.values(), reverse=True)[:2]
        chosen_by_logit = asked.params.temperature == 0 and not needs_penalties(asked.params)
        if chosen_by_logit and best - second >= TIE_NATS:
            return Verdict(f"token {shared} differs over a gap of {best - second:.3f} nat", True, math.inf)
        deltas.append(abs(before.logprob - after.top.get(before.token_id, -math.inf)) if chosen_by_logit else 0.0)
        scored = oracle.score(asked.token_ids, warm.token_ids)[shared:]
        deltas += [abs(entry.logprob - alone) for entry, alone in zip(warm.logprobs[shared:], scored, strict=True)]
    elif len(cold.token_ids) != len(warm.token_ids) or cold.finish_reason != warm.finish_reason:
        return Verdict(f"{len(warm.token_ids)} tokens, the oracle says {len(cold.token_ids)}", worst_nats=math.inf)
    worst, mean = max(deltas, default=0.0), sum(deltas) / max(1, len(deltas))
    if not (worst <= MAX_NATS and mean <= MEAN_NATS):  # also if one is NaN
        return Verdict(f"logprobs differ by {mean:.3f} nat on average, {worst:.3f} at most", diverged, worst)
    return Verdict("", diverged, worst)


def as_far_as(warm: Answer, cold: Answer) -> Answer:
    """What the oracle had said when the client left.

    The end that the client caused is none of the oracle's.
    """
    count = len(warm.token_ids)
    finish = cold.finish_reason if warm.finish_reason != "abort" else "abort"
    return Answer(token_ids=cold.token_ids[:count], logprobs=cold.logprobs[:count], finish_reason=finish)


def _shared(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _deltas(cold: Answer, warm: Answer) -> list[float]:
    """Differences of the logprobs of tokens that both chose after the same history."""
    shared = _shared(cold.token_ids, warm.token_ids)
    return [abs(c.logprob - w.logprob) for c, w in zip(cold.logprobs[:shared], warm.logprobs[:shared], strict=True)]
