"""The place where two prompts part, and differences of whole parts: tools, settings, images,
reasoning, added and removed messages.
"""

import json
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from kvire.doctor.findings import Cause
from kvire.doctor.prompt import FORMAT, MEDIA, REASONING, SETTINGS, TOOL, PromptPart


class Spans(NamedTuple):
    """A differing piece: its beginning and end in the new prompt and in the old one."""

    cause: Cause
    new_start: int
    new_end: int
    old_start: int
    old_end: int


@dataclass(frozen=True, slots=True)
class Sides:
    """Two prompts, the same (or alike, see likeness.py) up to new[at] and old[old_at], where they
    differ.

    new_index, old_index: of the parts with these bytes.

    Where one prompt is at the end of a part and the other still inside of it, both count as inside.
    """

    new: bytes
    old: bytes
    new_parts: list[PromptPart]
    old_parts: list[PromptPart]
    at: int
    old_at: int
    new_index: int
    old_index: int

    @classmethod
    def at_byte(
        cls,
        new_parts: list[PromptPart],
        old_parts: list[PromptPart],
        new: tuple[bytes, int, int],
        old: tuple[bytes, int, int],
    ) -> Self:
        """Two prompts at their first differing byte.

        new, old: text, the first byte that differs, index of the part that has this byte.
        """
        (new_text, at, new_index), (old_text, old_at, old_index) = new, old
        new_starts, old_starts = at == new_parts[new_index].start, old_at == old_parts[old_index].start
        if old_starts and not new_starts and old_index:
            old_index -= 1
        elif new_starts and not old_starts and new_index:
            new_index -= 1
        return cls(new_text, old_text, new_parts, old_parts, at, old_at, new_index, old_index)

    @property
    def new_part(self) -> PromptPart:
        """Part of the new prompt with the first differing byte."""
        return self.new_parts[self.new_index]

    @property
    def old_part(self) -> PromptPart:
        """Part of the old prompt with the first differing byte."""
        return self.old_parts[self.old_index]

    @property
    def same_kind(self) -> bool:
        """Whether the two parts are comparable as text."""
        return self.new_part.kind == self.old_part.kind


# A message that is found elsewhere in the other prompt must be this long, or the next one must fit
# as well: "yes" and "go on" stand everywhere.
TELLING_BYTES = 32
MOST_REPLACED = 2  # messages (a summary, a note) that may stand in the place of history that was cut
MOST_PERMUTED = 256


def tools(sides: Sides) -> Spans | None:
    """Other tools, or the same in another order. None if only a tool's text differs."""
    if TOOL not in (sides.new_part.kind, sides.old_part.kind):
        return None
    new = [part for part in sides.new_parts if part.kind == TOOL]
    old = [part for part in sides.old_parts if part.kind == TOOL]
    cause = _tools_cause([part.text for part in new], [part.text for part in old])
    if cause is None:
        return None
    new_start, old_start = sides.new_part.start, sides.old_part.start
    return Spans(
        cause,
        new_start,
        max(new[-1].end, new_start) if new else new_start,
        old_start,
        max(old[-1].end, old_start) if old else old_start,
    )


def _tools_cause(new: list[bytes], old: list[bytes]) -> Cause | None:
    if sorted(new) == sorted(old):
        return Cause.TOOL_ORDER
    new_values, old_values = [_json(text) for text in new], [_json(text) for text in old]
    if None in new_values or None in old_values:
        return None
    if sorted(map(_canonical, new_values)) == sorted(map(_canonical, old_values)):
        return Cause.JSON_FORM
    if sorted(map(_tool_name, new_values)) == sorted(map(_tool_name, old_values)):
        return None
    return Cause.TOOL_SET


def settings(sides: Sides) -> Spans | None:
    """tool_choice, thinking, response format."""
    return _whole(sides, (SETTINGS, FORMAT), Cause.SETTINGS)


def media(sides: Sides) -> Spans | None:
    """Another image or file, where both have one."""
    return _whole(sides, (MEDIA,), Cause.MEDIA) if sides.same_kind else None


def reasoning(sides: Sides) -> Spans | None:
    """Differing reasoning of an earlier turn, or reasoning in only one of the prompts."""
    return _whole(sides, (REASONING,), Cause.REASONING)


def _whole(sides: Sides, kinds: tuple[str, ...], cause: Cause) -> Spans | None:
    """The part on each side if it is of these kinds; nothing on a side with another kind."""
    new, old = sides.new_part, sides.old_part
    if new.kind not in kinds and old.kind not in kinds:
        return None
    return Spans(
        cause,
        new.start,
        new.end if new.kind in kinds else new.start,
        old.start,
        old.end if old.kind in kinds else old.start,
    )


def shifted(sides: Sides) -> Spans | None:
    """Messages removed from the front of the history, put before it, or in other places."""
    new, old, i, j = sides.new_parts, sides.old_parts, sides.new_index, sides.old_index
    start, old_start = sides.new_part.start, sides.old_part.start
    if moved := permuted([_identity(part) for part in new[i:]], [_identity(part) for part in old[j:]]):
        return Spans(Cause.MOVED_PASSAGES, start, new[i + moved - 1].end, old_start, old[j + moved - 1].end)
    for replaced in range(min(MOST_REPLACED + 1, len(new) - i)):
        found = _find(new, i + replaced, old, j)
        if found is not None and found > j + replaced:
            return Spans(Cause.TRUNCATED, start, new[i + replaced].start, old_start, old[found].start)
    if (found := _find(old, j, new, i)) is not None:
        return Spans(Cause.INSERTED, start, new[found].start, old_start, old_start)
    return None


def _find(wanted: list[PromptPart], index: int, parts: list[PromptPart], start: int) -> int | None:
    """Index of the part wanted[index] in `parts`, after `start`.

    None if it is not there, or too short to be told from others.
    """
    part = wanted[index]
    for k in range(start + 1, len(parts)):
        if parts[k].text == part.text and parts[k].kind == part.kind:
            followed = k + 1 < len(parts) and index + 1 < len(wanted)
            if len(part.text) >= TELLING_BYTES or (
                followed and _identity(parts[k + 1]) == _identity(wanted[index + 1])
            ):
                return k
    return None


def _identity(part: PromptPart) -> tuple[str, bytes]:
    return part.kind, part.text


def permuted(new: Sequence[Hashable], old: Sequence[Hashable]) -> int:
    """Number of first elements that are the same on both sides in another order; 0 if there is
    none.
    """
    if not new or new[0] not in old:
        return 0
    missing: Counter[Hashable] = Counter()
    for count in range(min(len(new), len(old), MOST_PERMUTED)):
        for element, step in ((new[count], 1), (old[count], -1)):
            missing[element] += step
            if not missing[element]:
                del missing[element]
        if not missing:
            return count + 1
    return 0


def _json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _tool_name(tool: Any) -> str:
    function = tool.get("function") if isinstance(tool, dict) else None
    named = function if isinstance(function, dict) else tool
    return str(named.get("name")) if isinstance(named, dict) else ""
