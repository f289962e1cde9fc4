"""Two prompts that are nearly the same: the pieces in which they differ, and what is the same after each."""

from collections.abc import Callable
from dataclasses import dataclass

from kvire.doctor import passages, structure
from kvire.doctor.causes import Cause
from kvire.doctor.prompt import TOKENS, Part, parts_of
from kvire.doctor.sides import Sides
from kvire.doctor.tree import common_prefix
from kvire.doctor.volatile import Spans, volatile_piece

MOST_PIECES = 12
# What says the same on both sides, in another order or form.
SAME_CONTENT = frozenset((Cause.TOOL_ORDER, Cause.MOVED_PASSAGES, Cause.JSON_FORM))


@dataclass(frozen=True, slots=True)
class Piece:
    """One difference. spans: where it lies. part: of the new prompt, in which it begins. same_bytes: how many bytes
    after it are the same in both.
    """

    spans: Spans
    part: Part
    same_bytes: int

    @property
    def same_start(self) -> int:
        """From where in the new prompt both are the same once this is mended: with it, if only order or form differ."""
        return self.spans.new_start if self.spans.cause in SAME_CONTENT else self.spans.new_end

    @property
    def same_end(self) -> int:
        """Up to where."""
        return self.spans.new_end + self.same_bytes


def pieces_between(new: bytes, old: bytes, *, is_foreign: bool = False) -> list[Piece]:
    """The differences in their order, up to the first that is simply other text.

    is_foreign: do not search for where the text is the same again.
    """
    at = old_at = common_prefix(new, 0, old, 0)
    if at == len(new) or at == len(old):
        return []
    new_parts, old_parts = parts_of(new), parts_of(old)
    if TOKENS in (new_parts[0].kind, old_parts[0].kind):
        return []
    pieces: list[Piece] = []
    new_index = old_index = 0
    while at < len(new) and old_at < len(old) and len(pieces) < MOST_PIECES:
        new_index, old_index = _index(new_parts, at, new_index), _index(old_parts, old_at, old_index)
        sides = Sides.at_byte(new_parts, old_parts, (new, at, new_index), (old, old_at, old_index))
        if (spans := _differing(sides, is_foreign=is_foreign)) is None:
            break
        same = common_prefix(new, spans.new_end, old, spans.old_end)
        pieces.append(Piece(spans, sides.new_part, same))
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
        volatile_piece,
        passages.json_form,
        passages.white_space,
        passages.moved,
    )
    for read in readings:
        if (spans := read(sides)) is not None:
            return spans
    return None if is_foreign else passages.other_text(sides)


def _index(parts: list[Part], at: int, start: int) -> int:
    while parts[start].end <= at:
        start += 1
    return start
