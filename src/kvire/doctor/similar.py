"""Which earlier prompt a text comes from though it does not begin alike: an index of sampled passages.

A passage is the bytes after a place that is chosen by the four bytes before it, so that the same text is sampled alike
wherever it stands. The index remembers which prompt had a passage last.
"""

from collections import Counter

import numpy as np
import xxhash

from kvire.doctor.tree import Node

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
    """Sampled passages of the latest prompts: two generations, of which the older is dropped when the newer is full."""

    def __init__(self) -> None:
        self._newer: dict[int, Node] = {}
        self._older: dict[int, Node] = {}

    def closest(self, scope: str, text: bytes, node: Node) -> Node | None:
        """The prompt that had most of a text's passages last. Notes that now the one that ends at `node` has them.

        scope: only prompts of the same one are looked at.
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
