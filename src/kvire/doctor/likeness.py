"""Finds the earlier prompt that resembles a text with another beginning, and the differing pieces.

An index of sampled passages finds the prompt. A passage is a run of bytes; the four bytes before it
decide whether it is sampled, so that the same text is sampled alike in every place. The index has
the latest prompt with each passage.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import xxhash

from kvire.doctor import passages, structure
from kvire.doctor.findings import Cause
from kvire.doctor.prompt import TOKENS, PromptPart, parts_of_prompt
from kvire.doctor.structure import Sides, Spans
from kvire.doctor.tree import Node, common_prefix

ONE_IN = 256  # bytes per sampled passage, on average
PASSAGE_BYTES = 24
MOST_SAMPLES = 512
# Passages in each of the two generations; together about 50 MB.
GENERATION = 150_000
_PLACE = np.array((40503, 30011, 25117, 14009), np.uint16)
_WORDS = np.array((0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9), np.uint64)


def sampled_passages(text: bytes) -> list[int]:
    """One number per passage of the sample: the same passage has the same number in every text."""
    if len(text) < PASSAGE_BYTES + 4:
        return []
    a = np.frombuffer(text, np.uint8)
    wide = a[: len(a) - PASSAGE_BYTES].astype(np.uint16)
    mixed = wide[3:] * _PLACE[0] + wide[2:-1] * _PLACE[1] + wide[1:-2] * _PLACE[2] + wide[:-3] * _PLACE[3]
    places = np.flatnonzero(mixed < 65536 // ONE_IN)[:MOST_SAMPLES] + 4
    words = a[places[:, None] + np.arange(PASSAGE_BYTES)].view(np.uint64)
    words = (words ^ (words >> np.uint64(29))) * _WORDS
    numbers: list[int] = np.bitwise_xor.reduce(words ^ (words >> np.uint64(32)), axis=1).tolist()
    return numbers


class PassageIndex:
    """Sampled passages of the latest prompts; a full newer generation replaces the older one."""

    def __init__(self) -> None:
        self._newer: dict[int, Node] = {}
        self._older: dict[int, Node] = {}

    def closest(self, scope: str, text: bytes, node: Node) -> Node | None:
        """The latest prompt with most of a text's passages.

        Notes that the prompt ending at `node` has them now.

        scope: only prompts of the same scope are compared.
        """
        salt = xxhash.xxh3_64_intdigest(scope.encode("utf-8", "surrogatepass"))
        sample = [one ^ salt for one in sampled_passages(text)]
        votes: Counter[Node] = Counter()
        for one in sample:
            known = self._newer.get(one) or self._older.get(one)
            if known is not None and known.parent is not None:
                votes[known] += 1
        self._newer.update(dict.fromkeys(sample, node))
        if len(self._newer) >= GENERATION:
            self._older, self._newer = self._newer, {}
        return max(votes, key=votes.__getitem__) if votes else None


MOST_PIECES = 12
# Causes with the same content on both sides, in another order or form.
SAME_CONTENT = frozenset((Cause.TOOL_ORDER, Cause.MOVED_PASSAGES, Cause.JSON_FORM))


@dataclass(frozen=True, slots=True)
class TextPiece:
    """One difference of two prompts.

    spans: its place.
    part: of the new prompt, in which it begins.
    same_bytes: number of equal bytes after it.
    """

    spans: Spans
    part: PromptPart
    same_bytes: int

    @property
    def same_start(self) -> int:
        """Place in the new prompt from which both are the same once this is mended: the piece's own
        beginning if only order or form differ.
        """
        return self.spans.new_start if self.spans.cause in SAME_CONTENT else self.spans.new_end

    @property
    def same_end(self) -> int:
        """End of the equal text in the new prompt."""
        return self.spans.new_end + self.same_bytes


def pieces_between(new: bytes, old: bytes, *, is_foreign: bool = False) -> list[TextPiece]:
    """Differences in order, up to the first one without a reading (`_differing`).

    is_foreign: do not search for a place where the text is the same again.
    """
    at = old_at = common_prefix(new, 0, old, 0)
    if at == len(new) or at == len(old):
        return []
    new_parts, old_parts = parts_of_prompt(new), parts_of_prompt(old)
    if TOKENS in (new_parts[0].kind, old_parts[0].kind):
        return []
    pieces: list[TextPiece] = []
    new_index = old_index = 0
    while at < len(new) and old_at < len(old) and len(pieces) < MOST_PIECES:
        new_index, old_index = _index(new_parts, at, new_index), _index(old_parts, old_at, old_index)
        sides = Sides.at_byte(new_parts, old_parts, (new, at, new_index), (old, old_at, old_index))
        if (spans := _differing(sides, is_foreign=is_foreign)) is None:
            break
        same = common_prefix(new, spans.new_end, old, spans.old_end)
        pieces.append(TextPiece(spans, sides.new_part, same))
        at, old_at = spans.new_end + same, spans.old_end + same
    return pieces


def _differing(sides: Sides, *, is_foreign: bool) -> Spans | None:
    """The most telling reading of a difference: exact ones first, other text last."""
    readings: tuple[Callable[[Sides], Spans | None], ...] = (
        structure.tools,
        structure.settings,
        structure.media,
        structure.reasoning,
        structure.shifted,
        passages.thinking,
        passages.volatile_piece,
        passages.json_form,
        passages.white_space,
        passages.moved,
    )
    for read in readings:
        if (spans := read(sides)) is not None:
            return spans
    return None if is_foreign else passages.other_text(sides)


def _index(parts: list[PromptPart], at: int, start: int) -> int:
    while parts[start].end <= at:
        start += 1
    return start


# Equal bytes that must follow a difference for it to be reported.
LEAST_GAIN_BYTES = 64
# Text that merely differs counts as a cause only if this share of what follows is the same again:
# else it is simply another prompt.
LEAST_OVERLAP = 0.5
MERELY_TEXT = frozenset((Cause.CONTEXT, Cause.SYSTEM, Cause.HISTORY, Cause.TOOL_SET))


@dataclass(frozen=True, slots=True)
class Difference:
    """Neighbouring pieces; mending only one of them gains nothing.

    gain_bytes: equal bytes behind them (and in them, see TextPiece), beyond the prefix that the
        prompt shares with any earlier one already.
    """

    pieces: tuple[TextPiece, ...]
    gain_bytes: int

    @property
    def causes(self) -> tuple[Cause, ...]:
        """Each cause once, in order."""
        return tuple(dict.fromkeys(piece.spans.cause for piece in self.pieces))


@dataclass(frozen=True, slots=True)
class Likeness:
    """A prompt beside an earlier one.

    node: the end of the earlier.
    shared_bytes: before the first difference.
    """

    node: Node
    shared_bytes: int
    differences: tuple[Difference, ...]

    @property
    def gain_bytes(self) -> int:
        """Of all differences."""
        return sum(difference.gain_bytes for difference in self.differences)


def likeness(text: bytes, depth: int, node: Node, *, is_foreign: bool) -> Likeness:
    """Compare a prompt with an earlier one.

    text: the prompt.
    depth: length of its longest prefix shared with any earlier prompt, in bytes.
    node: the earlier prompt's end in the tree.
    is_foreign: the rest is already known to be another text; only small pieces and parts are
        compared.
    """
    pieces = pieces_between(text, node.text(), is_foreign=is_foreign)
    shared_bytes = pieces[0].spans.new_start if pieces else 0
    differences = _joined(pieces, shared_bytes, depth)
    if sum(one.gain_bytes for one in differences) < LEAST_OVERLAP * (len(text) - depth):
        differences = differences[: _first_mere_text(differences)]
    return Likeness(node, shared_bytes, tuple(differences))


def _joined(pieces: list[TextPiece], shared: int, depth: int) -> list[Difference]:
    """Differences with a gain each; pieces after the last of them are left out."""
    differences = []
    together: list[TextPiece] = []
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
