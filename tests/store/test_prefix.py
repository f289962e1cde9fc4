"""How far a prompt can go on from stored blocks: one function, against trying every length."""

import random

from kvire.core.spec import first_needed
from kvire.store.reuse.look import reach

CASES = 20_000
WINDOWS = (None, None, 1, 2, 3, 5, 8, 16, 17, 33, 100)


class Case:
    """Random groups over a prompt of which some blocks are stored, and some on the device."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.block_size = rng.choice([1, 2, 3, 4, 16])
        self.blocks = rng.randrange(13)
        self.windows: list[int | None] = [rng.choice(WINDOWS) for _ in range(rng.randrange(1, 4))]
        self.first = rng.randrange(self.blocks + 1) if rng.random() < 0.5 else 0
        share = rng.choice([0.0, 0.1, 0.3, 0.6, 1.0])
        self.stored = [[rng.random() >= share for _ in self.windows] for _ in range(self.blocks)]

    def has(self, index: int, part: int) -> bool:
        return self.stored[index][part]

    def first_needed(self, part: int, stop: int) -> int:
        return first_needed(self.windows[part], stop * self.block_size, self.block_size)

    def can_go_on(self, stop: int) -> bool:
        """By the meaning of it: every part finds all that the next token looks at."""
        return all(
            self.has(index, part)
            for part in range(len(self.windows))
            for index in range(max(self.first, self.first_needed(part, stop)), stop)
        )


def tried(case: Case) -> int:
    return max(stop for stop in range(case.first, case.blocks + 1) if stop == case.first or case.can_go_on(stop))


def found(case: Case) -> int:
    return reach(case.windows, case.block_size, case.first, case.blocks, case.has)


def test_a_prefix_ends_where_trying_every_length_says() -> None:
    holes = 0
    for seed in range(CASES):
        case = Case(seed)
        assert found(case) == tried(case), seed
        holes += case.first < found(case) < case.blocks
    assert holes > CASES // 20, "something was left out, and something found"
