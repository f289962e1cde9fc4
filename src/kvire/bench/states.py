"""Tier states: where the KV of a prompt lies when it is sent, and how that is proved afterwards.

    E  empty          nothing anywhere
    G  device-warm    in the pool of the running engine
    R  memory-warm    the pool flushed, in the memory tier
    D  disk-warm      the process restarted, the page cache dropped: on disk only
    N  remote-warm    a new process without a local store: in the remote tier only
    W  warm           somewhere, in a server that does not say where
    Z  no reuse       every request under a salt of its own

A state is named only if what the answers and counters say cannot be otherwise. Everything here is
arithmetic over what was seen (`Seen`); `run.py` collects it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

TIERS = ("device", "memory", "disk", "remote")
ENOUGH = 0.9  # of the tokens that must have been reused, or read
MOST = 0.5  # of the tokens in a slow tier alone: an engine may compute a part meanwhile
# What prompts may share beyond what characters show: the beginning that the chat template writes,
# and one block.
SLACK_TOKENS = 64


class TierState(StrEnum):
    """The letters; UNPROVED stands for whatever could not be proved."""

    E = "E"
    G = "G"
    R = "R"
    D = "D"
    N = "N"
    W = "W"
    Z = "Z"
    UNPROVED = "unproved"


NAMES = {
    TierState.E: "empty",
    TierState.G: "device-warm",
    TierState.R: "memory-warm",
    TierState.D: "disk-warm",
    TierState.N: "remote-warm",
    TierState.W: "warm",
    TierState.Z: "no reuse",
    TierState.UNPROVED: "unproved",
}
TIER_OF = {TierState.G: "device", TierState.R: "memory", TierState.D: "disk", TierState.N: "remote"}


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """Tokens of one prompt.

    reused: not computed, or None where the server does not say;
    by_tier: the same by where they came from, or None.
    stored: shared with the fill.
    inside: shared with any other request of the pass.
    earlier: with those before it in the pass.
    slower: whether the engine says that it computed what is stored, since that was faster.
    """

    prompt: int
    reused: int | None
    by_tier: dict[str, int] | None
    stored: float = 0.0
    inside: float = 0.0
    earlier: float = 0.0
    slower: bool = False


@dataclass(frozen=True, slots=True)
class Around:
    """What was seen around a pass; None: not looked at, or not told.

    own_process: all that the process was asked until the end of the pass came from this run.
    stored_blocks: in all tiers of its store when it started.
    loaded_bytes: that the store's counters say were read from the state's tier.
    resident_bytes: of the store's segments in the page cache before the pass.
    read_bytes: from storage during the pass, by the kernel's count.
    unwritten: whether blocks of a fill still waited to be written.
    """

    own_process: bool | None = None
    stored_blocks: float | None = None
    loaded_bytes: float | None = None
    resident_bytes: int | None = None
    read_bytes: int | None = None
    unwritten: bool = False


@dataclass(frozen=True, slots=True)
class Proof:
    """Whether a pass was in its state, and why.

    evidence: reasons for the state.
    doubts: reasons against it; without any, it is proved.
    """

    evidence: tuple[str, ...]
    doubts: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether the state may be named."""
        return not self.doubts


def prove(state: TierState, requests: Sequence[SeenRequest], around: Around, slack_tokens: int = SLACK_TOKENS) -> Proof:
    """Whether a pass was in a state.

    requests: the answered ones.
    slack_tokens: how far `stored` and the others may be off: a block where they come from token
        ids; for Z, what may be reused all the same.
    """
    if doubt := _untold(state, requests):
        return _joined(Proof((), (doubt,)), _alone(around))
    if state is TierState.Z:
        return _joined(_nothing(requests, slack_tokens), _alone(around))
    if state is TierState.E:
        return _joined(_only_inside(requests, slack_tokens), _empty(around), _alone(around))
    warm = _warm(requests, slack_tokens) if state is TierState.W else _in_tier(state, requests, around, slack_tokens)
    return _joined(warm, _no_more_than_the_fill(requests, slack_tokens), _alone(around))


def _untold(state: TierState, requests: Sequence[SeenRequest]) -> str | None:
    """What the server would have to say and does not."""
    if not requests:
        return "no request was answered"
    if any(request.reused is None for request in requests):
        return "the server does not say how many prompt tokens it reused"
    if state in TIER_OF and any(request.by_tier is None for request in requests):
        return "the server does not say where reused tokens came from"
    return None


def _in_tier(state: TierState, requests: Sequence[SeenRequest], around: Around, slack_tokens: int) -> Proof:
    if state is TierState.G:
        return _from_device(requests, slack_tokens)
    tier = TIER_OF[state]
    if all(request.slower and not _given(tier, [request]) for request in requests):
        return Proof((), (f"the engine computed what the {tier} tier may hold, since that was faster",))
    proofs = [_from_tier(tier, requests, slack_tokens), _read(around, tier)]
    if state is TierState.D:
        proofs.append(_not_in_page_cache(around))
    return _joined(*proofs)


def _joined(*proofs: Proof) -> Proof:
    return Proof(
        tuple(line for proof in proofs for line in proof.evidence),
        tuple(line for proof in proofs for line in proof.doubts),
    )


def _nothing(requests: Sequence[SeenRequest], slack_tokens: int) -> Proof:
    most = max(request.reused or 0 for request in requests)
    said = f"at most {most} tokens of a prompt were reused"
    return Proof((said,), ()) if most <= slack_tokens else Proof((), (said,))


def _only_inside(requests: Sequence[SeenRequest], slack_tokens: int) -> Proof:
    """Nothing was reused but what requests of the pass gave each other."""
    over = [r for r in requests if (r.reused or 0) > r.inside + slack_tokens]
    if not over:
        return Proof(("no request reused more than others of the pass had brought",), ())
    return Proof((), (f"{over[0].reused} of {over[0].prompt} prompt tokens were there before",))


def _empty(around: Around) -> Proof:
    """A Kvire server's own word; a foreign one has none beyond its answers."""
    if around.stored_blocks is None:
        return Proof((), ())
    if around.stored_blocks:
        return Proof((), (f"{around.stored_blocks:.0f} blocks lay in its store when it started",))
    return Proof(("the process and its store began empty",), ())


def _alone(around: Around) -> Proof:
    """Others would take time and room, and may leave what this run then finds."""
    doubts = ("others asked the process as well",) if around.own_process is False else ()
    return Proof((), doubts)


def _no_more_than_the_fill(requests: Sequence[SeenRequest], slack_tokens: int) -> Proof:
    """Else the very prompts had been sent before.

    Where `stored` is an estimate, it may be off by half of the rest.
    """
    for request in requests:
        had = max(request.stored, request.inside)
        if (request.reused or 0) > had + max(slack_tokens, MOST * (request.prompt - had)):
            return Proof((), (f"{request.reused} prompt tokens reused, more than the {had:.0f} that the fill had",))
    return Proof((), ())


def _warm(requests: Sequence[SeenRequest], slack_tokens: int) -> Proof:
    """Beyond what the chat template begins every prompt with, which proves nothing."""
    expected = sum(max(0.0, r.stored - slack_tokens) for r in requests)
    reused = sum(max(0, (r.reused or 0) - slack_tokens) for r in requests)
    said = f"{reused} prompt tokens reused of {expected:.0f} that the fill had, {slack_tokens} of each prompt left out"
    doubts = [] if expected and reused >= ENOUGH * expected else [said]
    return Proof((said,), (*doubts, *_missed(requests, slack_tokens)))


def _missed(requests: Sequence[SeenRequest], slack_tokens: int) -> Iterator[str]:
    """A request that met little of the fill: others of the pass may have met what it brought, and
    not the fill's.
    """
    for request in requests:
        stored = request.stored - slack_tokens
        if stored > 0 and (request.reused or 0) - slack_tokens < MOST * stored:
            yield f"of {request.stored:.0f} prompt tokens that the fill had, one request reused {request.reused}"
            return


def _from_device(requests: Sequence[SeenRequest], slack_tokens: int) -> Proof:
    """The pool gave the blocks of the fill, and no other tier anything."""
    given = _given("device", requests)
    expected = sum(max(0.0, r.stored - slack_tokens) for r in requests)
    said = f"{given} prompt tokens from the pool, of {expected:.0f} that the fill had left there"
    elsewhere = sum(r.reused or 0 for r in requests) - given
    doubts = [f"{elsewhere} prompt tokens came from other tiers"] if elsewhere else []
    if not expected or given < ENOUGH * expected:
        doubts.append(said)
    return Proof((said,), (*doubts, *_missed(requests, slack_tokens)))


def _from_tier(tier: str, requests: Sequence[SeenRequest], slack_tokens: int) -> Proof:
    """The tier gave most of its own tokens; others gave no more than requests of the pass had
    brought there.
    """
    given, expected = _given(tier, requests), sum(max(0.0, r.stored - r.earlier - slack_tokens) for r in requests)
    said = f"{given} prompt tokens from the {tier} tier, of {expected:.0f} that only it had"
    doubts = [said] if not expected or given < MOST * expected else []
    for request in requests:
        elsewhere = (request.reused or 0) - _given(tier, [request])
        if elsewhere > request.inside + slack_tokens:
            doubts.append(f"{elsewhere} of {request.prompt} prompt tokens came from elsewhere than the {tier} tier")
            break
    for request in requests:
        if request.slower:  # counted above, as nothing given
            continue
        alone = request.stored - request.inside - slack_tokens  # nobody else in the pass could have brought these
        if _given(tier, [request]) < MOST * alone:
            doubts.append(f"of {alone:.0f} prompt tokens, the {tier} tier gave {_given(tier, [request])}")
            break
    return Proof((said,), tuple(doubts))


def _given(tier: str, requests: Sequence[SeenRequest]) -> int:
    return sum((request.by_tier or {}).get(tier, 0) for request in requests)


def _read(around: Around, tier: str) -> Proof:
    """The store's counters agree, and it had had time to write."""
    if around.unwritten:
        return Proof((), ("blocks of the fill still waited to be written",))
    if not around.loaded_bytes:
        return Proof((), (f"the store's counters know of no byte read from the {tier} tier",))
    return Proof((f"{around.loaded_bytes / 1e6:.1f} MB read by the store's counters",), ())


def _not_in_page_cache(around: Around) -> Proof:
    """Both: no page was there before, and the bytes were read from storage, each where the system
    tells it.
    """
    if around.resident_bytes is None and around.read_bytes is None:
        return Proof((), ("the system does not say whether the page cache was dropped",))
    doubts, evidence = [], []
    if around.resident_bytes:
        doubts.append(f"{around.resident_bytes / 1e6:.1f} MB of the store lay in the page cache before")
    elif around.resident_bytes == 0:
        evidence.append("nothing of the store in the page cache before (mincore)")
    if around.read_bytes is not None and around.loaded_bytes:
        said = f"{around.read_bytes / 1e6:.1f} MB read from storage (/proc/PID/io)"
        (evidence if around.read_bytes >= ENOUGH * around.loaded_bytes else doubts).append(said)
    return Proof(tuple(evidence), tuple(doubts))
