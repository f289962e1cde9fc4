"""How alike a prompt and an earlier one are beyond their common beginning, and what stands between."""

from dataclasses import dataclass

from kvire.doctor.causes import Cause
from kvire.doctor.compare import Piece, pieces_between
from kvire.doctor.tree import Node

# What must be the same again after a difference for the difference to be worth a word.
LEAST_GAIN_BYTES = 64
# Text that merely differs counts as a cause only if this share of what follows is the same again: else it is simply
# another prompt.
LEAST_OVERLAP = 0.5
MERELY_TEXT = frozenset((Cause.CONTEXT, Cause.SYSTEM, Cause.HISTORY, Cause.TOOL_SET))


@dataclass(frozen=True, slots=True)
class Difference:
    """Pieces that stand close together, so that mending one alone gains nothing. gain_bytes: what is the same behind
    them (and in them, see Piece), beyond what the prompt shares with any earlier one already.
    """

    pieces: tuple[Piece, ...]
    gain_bytes: int

    @property
    def causes(self) -> tuple[Cause, ...]:
        """Each once, in their order."""
        return tuple(dict.fromkeys(piece.spans.cause for piece in self.pieces))


@dataclass(frozen=True, slots=True)
class Likeness:
    """A prompt beside an earlier one. node: the end of the earlier. shared_bytes: before the first difference."""

    node: Node
    shared_bytes: int
    differences: tuple[Difference, ...]

    @property
    def gain_bytes(self) -> int:
        """Of all differences."""
        return sum(difference.gain_bytes for difference in self.differences)


def likeness(text: bytes, depth: int, node: Node, *, is_foreign: bool) -> Likeness:
    """text: the prompt. depth: bytes of it that some earlier prompt begins with. node: the end of one of these.
    is_foreign: it is known already that what follows is another text; only small pieces and parts are compared.
    """
    pieces = pieces_between(text, node.text(), is_foreign=is_foreign)
    shared_bytes = pieces[0].spans.new_start if pieces else 0
    differences = _joined(pieces, shared_bytes, depth)
    if sum(one.gain_bytes for one in differences) < LEAST_OVERLAP * (len(text) - depth):
        differences = differences[: _first_mere_text(differences)]
    return Likeness(node, shared_bytes, tuple(differences))


def _joined(pieces: list[Piece], shared: int, depth: int) -> list[Difference]:
    """Differences that each gain something; what comes after the last of these is left out."""
    differences = []
    together: list[Piece] = []
    for piece in pieces:
        together.append(piece)
        shared += piece.same_end - piece.same_start
        if shared - depth >= LEAST_GAIN_BYTES:
            differences.append(Difference(tuple(together), shared - depth))
            together = []
            depth = shared
    return differences


def _first_mere_text(differences: list[Difference]) -> int:
    for i, difference in enumerate(differences):
        if MERELY_TEXT.intersection(difference.causes):
            return i
    return len(differences)
