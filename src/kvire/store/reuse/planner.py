"""One planner of reuse for every engine: name, look, judge, load, save, and say why not.

    identity = reuse.name(tenant, cache_salt)            the blocks' owner
    chain = Chain(identity, token_ids, block_size)       their names
    found = reuse.look(chain, device_blocks)             stored beyond the device; changes nothing
    choice = reuse.worth(found)                          LOAD, BOTH or COMPUTE; changes nothing
    reuse.decided(choice)                                the choice was carried out
    load = reuse.load(chain, found, memory, choice.way)  a ticket, and its progress
    reuse.save(chain, indices, memory)                   hand over computed blocks
    reuse.finished(chain, stop, keep=True)               the blocks were used
    reuse.why(chain, index, prompt_tokens)               why the rest is not stored

Nothing here waits for a tier, except `ask`. An engine without a store has a NoReuse (no_reuse.py),
which has the same methods and finds nothing.

**Never slower.** A load is made if it is expected to be faster than computing by LEAST_GAIN at
least (plan/cost.choose). Blocks that are not loaded give no new measurement of their tier, so after
TRY_AFTER refusals a load is made all the same. Refusals are counted in requests and not in seconds:
so at most one request in TRY_AFTER can lose by it however many arrive; with half a minute instead,
each request of a quiet engine would be such a try. And none loses more than the time of computing
once more, for no load is waited for longer than computing would take (Load.chunk_tokens,
Choice.compute_s). See docs/adr/0018-one-planner.md.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf

from kvire.core.keys import BlockKey, Namespace
from kvire.core.record import BlockId
from kvire.plan.cost import Choice, PrefillSpeed, Speed, Way, choose
from kvire.store.explain import MissAnswer
from kvire.store.reuse.chain import Blocks, Chain, Identity, Names
from kvire.store.reuse.load import Load
from kvire.store.reuse.look import Found, Part, Row, Word, needed, reach, together
from kvire.store.ticket import Wanted
from kvire.store.tier import Buffer
from kvire.store.tiered import StoreStats, TieredStore

COMPUTE_NOTHING = Choice(Way.COMPUTE, 0.0, 0.0, 0.0)  # where nothing was found
TRY_AFTER = 16  # loads that were not worth it, before one is made to see whether that is still so

Memory = Callable[[int, int], Buffer]  # of block `index`, part `part`


class Reuse:
    """One engine's use of an open store. Belongs to one thread.

    namespace: of the engine's KV, without a salt.
    parts: of each block, by number.
    block_size: tokens.
    prefill: measured speed of the engine's prefill; unknown before the first measurement.
    keeps: whether blocks are kept, so that misses can be explained.
    """

    keeps = True

    def __init__(
        self, store: TieredStore, namespace: Namespace, parts: Sequence[Part], block_size: int,
        *, prefill: PrefillSpeed | None = None,
    ) -> None:  # fmt: skip
        self.store = store
        self.names = Names(namespace, lambda tenant: store.tenant(tenant).salt, store.note_namespace)
        self.parts = tuple(parts)
        self.block_size = block_size
        self.prefill = prefill or PrefillSpeed()
        self._windows = [part.window for part in self.parts]
        self._told: dict[str, Speed] = {}
        self._refused = 0  # since the last try

    @property
    def has_windows(self) -> bool:
        """Whether a part of a load can be of no use without the rest."""
        return any(window is not None for window in self._windows)

    def name(self, tenant: str = "", cache_salt: str = "") -> Identity:
        """Identity of such requests' blocks; see Identity.kept for a tenant without keys."""
        return self.names.of(tenant, cache_salt)

    # Looking

    def look(self, blocks: Blocks, first: int, limit: int | None = None, *, start: int | None = None) -> Found:
        """Blocks of a prompt that local tiers certainly hold after the device's `first` ones, up to
        `limit`.

        limit: how many of its named blocks are of use; None: all.
        start: look up blocks from there on, and all named ones; else those from `first` to `limit`
            only.
        """
        limit = len(blocks.keys) if limit is None else limit
        begin, end = (first, max(first, limit)) if start is None else (start, len(blocks.keys))
        ids = [BlockId(key, part) for key in blocks.keys[begin:end] for part in range(len(self.parts))]
        names = self.store.held(ids)
        width = len(self.parts)
        rows = [names[at : at + width] for at in range(0, len(names), width)]
        may_be_remote = first < limit and any(None in row for row in rows[: limit - begin])
        word = Word.OPEN if may_be_remote and self.store.remote_speed() is not None else Word.SURE
        return self._found(begin, rows, first, limit, word)

    def hope(self, found: Found) -> Found:
        """Expect blocks that no local tier has from a remote one; the load itself will ask it.

        A load that is all or nothing does not risk its certain blocks on that.
        """
        if found.word is not Word.OPEN or (self.has_windows and found.known > found.first):
            return found
        return self._with_stop(found, found.limit)

    def unknown(self, blocks: Blocks, found: Found) -> list[BlockId]:
        """Ids that only a remote tier may have, from the first block with a missing part on."""
        span = range(found.start, found.limit)
        hole = next((index for index in span if not found.whole(index)), found.limit)
        return [
            BlockId(blocks.keys[index], part)
            for index in range(hole, found.limit)
            for part in range(len(self.parts))
            if found.tier(index, part) is None
        ]

    def heard(self, blocks: Blocks, found: Found, names: Mapping[BlockId, str]) -> Found:
        """`found` extended by the answers of remote tiers, by the tier's name."""
        rows: list[Row] = [
            [name or names.get(BlockId(blocks.keys[index], part)) for part, name in enumerate(row)]
            for index, row in enumerate(found.rows, found.start)
        ]
        return self._found(found.start, rows, found.first, found.limit, Word.SURE)

    def ask(self, blocks: Blocks, found: Found, timeout_s: float) -> Found:
        """Ask remote tiers now, and wait up to timeout_s for each.

        See Probe for engines that cannot wait.
        """
        if found.word is Word.SURE:
            return found
        ids = self.unknown(blocks, found)
        names = zip(ids, self.store.held_remotely(ids, timeout_s), strict=True)
        return self.heard(blocks, found, {block_id: name for block_id, name in names if name is not None})

    # Judging

    def worth(self, found: Found, *, can_meet: bool = True) -> Choice:
        """Whether to load the found blocks, to compute them, or both at once.

        Changes nothing: see `decided`. Until the prefill speed is known, every stored block is
        loaded.

        can_meet: the engine computes from the front while blocks come from the back.
        """
        if found.is_empty:
            return COMPUTE_NOTHING
        can_meet = can_meet and not self.has_windows
        load_s = found.speed.seconds(found.size_bytes)
        if not self.prefill.known:
            return Choice(Way.LOAD, load_s, load_s, inf)
        start, stop = found.first * self.block_size, found.stop * self.block_size
        choice = choose(found.speed, self.prefill, start, stop, found.size_bytes, can_meet=can_meet)
        if choice.way is Way.COMPUTE and self._refused >= TRY_AFTER - 1:
            return replace(choice, way=Way.BOTH if can_meet else Way.LOAD, is_try=True)
        return choice

    def decided(self, choice: Choice) -> None:
        """Record that a choice was carried out: found blocks were loaded, or computed although
        stored.
        """
        if choice.is_try:
            self._refused = 0
        elif choice.way is Way.COMPUTE and choice != COMPUTE_NOTHING:
            self._refused += 1

    def measured(self, speeds: Mapping[str, Speed]) -> None:
        """Speeds of tiers, by name, if another process of this engine reads them."""
        self._told.update(speeds)

    # Moving

    def load(self, blocks: Blocks, found: Found, memory: Memory, way: Way) -> Load:
        """Begin to load.

        memory: target of each part; the ticket says when it is the engine's again.
        """
        wanted = [
            Wanted(blocks.record(index, part, self.parts[part].size_bytes), memory(index, part))
            for index, part in found.needed
        ]
        ticket = self.store.load(wanted, from_the_back=way is Way.BOTH)
        return Load(ticket, found, all_or_nothing=self.has_windows)

    def save(self, blocks: Blocks, indices: Iterable[int], memory: Memory) -> bool:
        """Hand over computed blocks; copied before this returns. Returns whether all were taken."""
        taken = [
            self.store.save(blocks.record(index, part, each.size_bytes), memory(index, part))
            for index in indices
            for part, each in enumerate(self.parts)
        ]
        return all(taken)

    def finished(self, blocks: Blocks, stop: int, *, keep: bool) -> None:
        """A prompt's first `stop` blocks were used, and its answer is complete.

        keep: they are worth storing.
        """
        if not stop:
            return
        ids = self._ids(blocks.keys[:stop])
        self.store.touch(ids)
        if keep:
            self.store.end_of_turn(ids)

    def discard(self, keys: Iterable[BlockKey]) -> None:
        """Remove blocks that must not be found again, from every tier and queue."""
        self.store.discard(self._ids(keys))

    def why(self, chain: Chain, index: int, prompt_tokens: int) -> MissAnswer | None:
        """Ask why block `index` of a prompt is stored nowhere, and how far the closest stored
        prompt agrees.
        """
        return self.store.explain(chain.query(index, prompt_tokens))

    # The store itself

    def stats(self) -> StoreStats:
        """Counters of the store at this moment."""
        return self.store.stats()

    def flush(self, timeout_s: float) -> bool:
        """Wait until every saved block is written or given up; False if that takes longer."""
        return self.store.flush(timeout_s)

    def close(self) -> None:
        """Close the store."""
        self.store.close()

    def _ids(self, keys: Iterable[BlockKey]) -> list[BlockId]:
        return [BlockId(key, part) for key in keys for part in range(len(self.parts))]

    def _found(self, start: int, rows: Sequence[Row], first: int, limit: int, word: Word) -> Found:
        def has(index: int, part: int) -> bool:
            return rows[index - start][part] is not None

        known = reach(self._windows, self.block_size, first, limit, has)
        bare = Found(first, known, known, limit, word, start, rows, (), Speed(0.0, inf), 0)
        return self._with_stop(bare, known)

    def _with_stop(self, found: Found, stop: int) -> Found:
        """A load up to `stop`: its blocks, tiers and speed."""
        places = needed(self.parts, self.block_size, found.first, stop)
        sizes: dict[str | None, int] = {}
        for index, part in places:
            name = found.tier(index, part)
            sizes[name] = sizes.get(name, 0) + self.parts[part].size_bytes
        speed = together([(self._speed(name), size) for name, size in sizes.items()])
        return replace(found, stop=stop, needed=places, speed=speed, size_bytes=sum(sizes.values()))

    def _speed(self, name: str | None) -> Speed:
        """Speed of a tier; None: of the remote one that will be asked."""
        if name is not None:
            return self._told.get(name) or self.store.speed(name)
        speed = self.store.remote_speed()
        assert speed is not None, "what no local tier has is counted on only where there is a remote one"
        return speed
