"""Whether what a request missed is stored all the same, by an engine that this one must not read; and what differs.

Why it was missed otherwise is not told: in a process of its own the scheduler's side does not know what was evicted.
"""

from collections import deque
from itertools import islice

from kvire.connectors.vllm.requests import Tracked
from kvire.core.record import BlockId
from kvire.store.explain import COMPARED_CONTENTS, Answer, MissQuery, StoreMiss
from kvire.store.tiered import TieredStore

MOST_ASKED = 256  # answers that are waited for; older ones are not counted


class ForeignBlocks:
    """Asks the store about the first block that each request missed. The answers come from a thread of the store's."""

    def __init__(self, store: TieredStore) -> None:
        self._store = store
        self._asked: deque[Answer] = deque(maxlen=MOST_ASKED)

    def ask(self, tracked: Tracked, limit: int) -> None:
        """The request was looked up, and could have had its first `limit` blocks."""
        found = 0 if tracked.match is None else tracked.match[1]
        index = next((i for i, held in enumerate(tracked.stored[:limit]) if i >= found and not held), None)
        if index is None:
            return
        block = tracked.blocks[index]
        later = tuple(one.content for one in islice(tracked.blocks, index + 1, index + 1 + COMPARED_CONTENTS))
        query = MissQuery(
            block.parent, block.root, block.token_ids, id=BlockId(block.key, 0), content=block.content, later=later
        )
        self._asked.append(self._store.explain(query))

    def told(self) -> list[str]:
        """Of each request that was answered since the last call, and concerns blocks of another engine: the fields of
        the namespace that differ, joined by commas; "unknown" if nobody noted them.
        """
        found = []
        for _ in range(len(self._asked)):
            answer = self._asked.popleft()
            if (explanation := answer.poll()) is None:
                self._asked.append(answer)
            elif explanation.reason is StoreMiss.OTHER_NAMESPACE:
                found.append(",".join(explanation.fields) or "unknown")
        return found
