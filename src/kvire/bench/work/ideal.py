"""What an endless cache could reuse of the very prompts that were sent."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from kvire.bench.work.prompts import BenchPrompt

# A prompt as what KV depends on: its token ids where a tokenizer is at hand, else its characters.
Units = tuple[int, ...]
Spell = Callable[[BenchPrompt], Units]


class Seen:
    """Prompts that came before. Finds the longest beginning that a new one shares with any of them.

    Of all prompts in sorted order, the one that shares most is a neighbour; so a look-up compares
    with two.
    """

    def __init__(self) -> None:
        self._sorted: list[Units] = []

    def add(self, units: Units) -> None:
        """Remember it."""
        self._sorted.insert(bisect_left(self._sorted, units), units)

    def shared(self, units: Units, *, itself: bool = False) -> int:
        """How many leading units some earlier prompt has as well.

        itself: it has been added, and does not count.
        """
        at = bisect_left(self._sorted, units)
        after = at + itself
        neighbours = self._sorted[max(0, at - 1) : at] + self._sorted[after : after + 1]
        return max((common(units, one) for one in neighbours), default=0)


def common(one: Units, other: Units) -> int:
    """Length of the common beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def reusable(prompts: Sequence[BenchPrompt], before: Iterable[BenchPrompt], spell: Spell) -> list[float]:
    """For each prompt, the share of it that begins like one of `before` or one earlier in the list;
    never all of it, since the last token is always computed.
    """
    seen = Seen()
    for prompt in before:
        seen.add(spell(prompt))
    shares = []
    for units in map(spell, prompts):
        shares.append(min(seen.shared(units), len(units) - 1) / len(units) if units else 0.0)
        seen.add(units)
    return shares


def ceiling(
    prompts: Sequence[BenchPrompt], waits: Sequence[tuple[float, float]], before: Iterable[BenchPrompt], spell: Spell
) -> list[float]:
    """As `reusable`, of prompts that may be under way together.

    waits: when each was sent, and when its first token came: it may have met whatever else was sent
        until then.
    """
    seen = Seen()
    for prompt in before:
        seen.add(spell(prompt))
    units = [spell(prompt) for prompt in prompts]
    shares = [0.0] * len(units)
    for _, came, i in sorted((at, came, i) for i, wait in enumerate(waits) for came, at in enumerate(wait)):
        if not came:
            seen.add(units[i])
        elif units[i]:
            shares[i] = min(seen.shared(units[i], itself=True), len(units[i]) - 1) / len(units[i])
    return shares


def characters(prompt: BenchPrompt) -> Units:
    """For servers whose tokenizer is not at hand: shares of characters stand for shares
    of tokens.
    """
    return tuple(map(ord, prompt.text))
