"""Why a prompt's blocks were not loaded: the one place where what the store says becomes a report's MissReason."""

from typing import NamedTuple

from kvire.core.report import MissReason
from kvire.store.explain import Explanation, StoreMiss
from kvire.store.ticket import FailureReason

_FAILURES = {FailureReason.DAMAGED: MissReason.DAMAGED, FailureReason.UNAVAILABLE: MissReason.UNAVAILABLE}
_KNOWN_NOTHING = (MissReason.NEVER_STORED, MissReason.SHORTER_THAN_BLOCK)


class Miss(NamedTuple):
    """Why reuse ended where it did.

    token: position of the first one that was not reused for this reason; None if that is not known.
    detail: which fields of the namespace differ, if that is why.
    """

    reason: MissReason
    token: int | None = None
    detail: str | None = None


def reason_of(failure: FailureReason, *, was_there: bool) -> MissReason | None:
    """Why a load did not bring a block; None if, as far as is known, no tier ever had it.

    was_there: a tier had it when the store was looked at.
    """
    return _FAILURES.get(failure, MissReason.EVICTED if was_there else None)


def explained(miss: Miss, found: Explanation | None, begin_token: int) -> Miss:
    """What the engine knows of a miss itself, bettered by what the store says.

    found: None if it has not said anything. begin_token: first token of the block it was asked about.
    """
    if found is None or miss.token is None:
        return miss
    knows_nothing = miss.reason in _KNOWN_NOTHING
    shared_until = begin_token + (found.shared_tokens or 0)
    if found.shared_tokens and shared_until > miss.token:
        return Miss(MissReason.DIVERGED if knows_nothing else miss.reason, shared_until)
    if knows_nothing and found.reason not in {None, StoreMiss.NEVER_STORED}:
        return Miss(MissReason(str(found.reason)), miss.token, ", ".join(found.fields) or None)
    return miss
