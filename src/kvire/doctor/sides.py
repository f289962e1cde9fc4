"""Where two prompts part: the bytes, and the parts that these lie in."""

from dataclasses import dataclass
from typing import Self

from kvire.doctor.prompt import Part


@dataclass(frozen=True, slots=True)
class Sides:
    """Two prompts that are the same (or alike, see compare.py) up to new[at] and old[old_at], which differ.

    new_index, old_index: of the parts that these bytes lie in. Where one prompt is at the end of a part and the other
    still inside of it, both count as inside.
    """

    new: bytes
    old: bytes
    new_parts: list[Part]
    old_parts: list[Part]
    at: int
    old_at: int
    new_index: int
    old_index: int

    @classmethod
    def at_byte(
        cls, new_parts: list[Part], old_parts: list[Part], new: tuple[bytes, int, int], old: tuple[bytes, int, int]
    ) -> Self:
        """new, old: text, the first byte that differs, index of the part that has this byte."""
        (new_text, at, new_index), (old_text, old_at, old_index) = new, old
        new_starts, old_starts = at == new_parts[new_index].start, old_at == old_parts[old_index].start
        if old_starts and not new_starts and old_index:
            old_index -= 1
        elif new_starts and not old_starts and new_index:
            new_index -= 1
        return cls(new_text, old_text, new_parts, old_parts, at, old_at, new_index, old_index)

    @property
    def new_part(self) -> Part:
        """Where the new prompt starts to differ."""
        return self.new_parts[self.new_index]

    @property
    def old_part(self) -> Part:
        """Where the old prompt starts to differ."""
        return self.old_parts[self.old_index]

    @property
    def same_kind(self) -> bool:
        """Whether the two parts are comparable as text."""
        return self.new_part.kind == self.old_part.kind
