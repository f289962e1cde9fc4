"""One side of a comparison: a server that is brought into the wanted states and asked."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvire.bench.load import Loop, Pass, Sample
from kvire.bench.settings import GridCell, Settings
from kvire.bench.states import TIERS, Around, Proof, SeenRequest, TierState, prove
from kvire.bench.work.ideal import Spell, ceiling, reusable
from kvire.bench.work.prompts import BenchPrompt, TokenScale
from kvire.bench.work.workloads import BenchWork

Say = Callable[[str], None]  # told before each step that takes a while


@dataclass(frozen=True, slots=True)
class MeasuredPass:
    """One pass and its proof.

    ideal: by sample, the share of its prompt that an endless cache could have reused.
    same_prompts: whether the pass sent the very texts of the work's probe (or fill, where it has
        none), so that answers and times can be compared.
    """

    cell: GridCell
    repeat: int
    state: TierState
    done: Pass
    proof: Proof
    ideal: tuple[float, ...]
    same_prompts: bool


class Arm(Protocol):
    """A server, or how to start one."""

    def describe(self) -> dict[str, Any]:
        """For the report: kind, model, options."""

    @property
    def scale(self) -> TokenScale:
        """How long texts are in its tokens; may ask the server."""

    @property
    def judge(self) -> "Judge":
        """Proves the state that it was in."""

    def steps(self) -> int:
        """How often `measure` says something in one repeat."""

    def measure(self, repeat: int, scale: TokenScale, say: Say) -> Iterator[MeasuredPass]:
        """All states of all cells, once.

        scale: the same for all arms, so that they get the same words.

        Raises ConfigError if the server cannot be started or used.
        """


@dataclass(frozen=True, slots=True)
class Judge:
    """Proves states from answers.

    spell: prompts as what KV depends on.
    slack_tokens: how far that may be off.
    by: what spell gives, in words.
    """

    spell: Spell
    slack_tokens: int
    by: str

    def measured(
        self,
        cell: GridCell,
        repeat: int,
        state: TierState,
        work: BenchWork,
        done: Pass,
        around: Around,
        *,
        marked: bool = False,
        kept: Sequence[BenchPrompt] = (),
    ) -> MeasuredPass:
        """What a pass proved.

        marked: a mark stood before every prompt.
        kept: earlier prompts, the fill aside, which the server may have kept.
        """
        before = prompts_of_scripts(work.fill) if state not in {TierState.E, TierState.Z} else []
        sent = [sample.prompt for sample in done.samples]
        earlier = reusable(sent, [], self.spell)
        later = reusable(sent[::-1], [], self.spell)[::-1]
        stored = [reusable([prompt], before, self.spell)[0] for prompt in sent]
        seen = [
            _seen(sample, stored[i], max(earlier[i], later[i]), earlier[i])
            for i, sample in enumerate(done.samples)
            if sample.answer.error is None
        ]
        # Whatever was there, also the beginning that the chat template gives prompts of other
        # workloads.
        waits = [(sample.sent_s, sample.sent_s + sample.answer.ttft_s) for sample in done.samples]
        ideal = ceiling(sent, waits, [*before, *kept], self.spell) if state is not TierState.Z else [0.0] * len(sent)
        # A mark stands behind the beginning of the chat template; a salt stands before everything.
        slack_tokens = 0 if state is TierState.Z and not marked else self.slack_tokens
        proof = prove(state, seen, around, slack_tokens)
        same_prompts = not marked and not (state is TierState.E and work.probe)
        return MeasuredPass(cell, repeat, state, done, proof, tuple(ideal), same_prompts)


def loop(settings: Settings, cell: GridCell, repeat: int) -> Loop:
    """Arrivals of an open loop are the same for every server and state of a repeat."""
    return Loop(cell.at_once, settings.rate_per_s, settings.seed + repeat)


def turned(cells: list[GridCell], repeat: int) -> list[GridCell]:
    """The order changes from repeat to repeat, so that none always comes first."""
    return cells if repeat % 2 else cells[::-1]


def prompts_of_scripts(scripts: tuple[Any, ...]) -> list[BenchPrompt]:
    """All of them."""
    return [prompt for script in scripts for prompt in script.prompts]


def by_tier(cache: Mapping[str, Any]) -> dict[str, int] | None:
    """Reused tokens by tier, as a Kvire answer reports them."""
    if not all(f"{tier}_tokens" in cache for tier in TIERS):
        return None
    return {tier: int(cache[f"{tier}_tokens"]) for tier in TIERS}


def _seen(sample: Sample, stored: float, inside: float, earlier: float) -> SeenRequest:
    """Shares become tokens by the server's own count of the prompt."""
    cache = sample.answer.kvire.get("cache") or {}
    prompt = sample.answer.prompt_tokens or 0
    return SeenRequest(
        prompt=prompt,
        reused=sample.answer.cached_tokens,
        by_tier=by_tier(cache),
        stored=stored * prompt,
        inside=inside * prompt,
        earlier=earlier * prompt,
        slower=cache.get("miss") == "slower_than_recomputing",
    )
