"""What an endless cache could reuse of the very prompts that were sent."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from kvire.bench.prompts import Prompt

# A prompt as what KV depends on: its token ids where a tokenizer is at hand, else its characters.
Units = tuple[int, ...]
Spell = Callable[[Prompt], Units]


class Seen:
    """Prompts that came before. Finds the longest beginning that a new one shares with any of them.

    Of all prompts in sorted order, the one that shares most is a neighbour; so a look-up compares with two.
    """

    def __init__(self) -> None:
        self._sorted: list[Units] = []

    def add(self, units: Units) -> None:
        """Remember it."""
        self._sorted.insert(bisect_left(self._sorted, units), units)

    def shared(self, units: Units) -> int:
        """How many leading units some earlier prompt has as well."""
        at = bisect_left(self._sorted, units)
        return max((common(units, one) for one in self._sorted[max(0, at - 1) : at + 1]), default=0)


def common(one: Units, other: Units) -> int:
    """Length of the common beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def reusable(prompts: Sequence[Prompt], before: Iterable[Prompt], spell: Spell) -> list[float]:
    """For each prompt, the share of it that begins like one of `before` or one earlier in the list; never all of it,
    since the last token is always computed.
    """
    seen = Seen()
    for prompt in before:
        seen.add(spell(prompt))
    shares = []
    for units in map(spell, prompts):
        shares.append(min(seen.shared(units), len(units) - 1) / len(units) if units else 0.0)
        seen.add(units)
    return shares


def characters(prompt: Prompt) -> Units:
    """For servers whose tokenizer is not at hand: shares of characters stand for shares of tokens."""
    return tuple(map(ord, prompt.text))
