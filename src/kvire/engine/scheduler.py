"""Chooses the running sequences, their blocks, and the tokens that each computes in the next step.

Older requests come first, always: no request overtakes an older one because memory is short, and
when blocks run out the newest running sequence is preempted and computed again later. So the oldest
one always makes progress, and any pool that fits one request serves them all.
"""

from bisect import insort
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from time import monotonic

from kvire.cache.grouped import GroupedPool
from kvire.core.config import EngineConfig
from kvire.core.keys import BlockKey, block_key
from kvire.core.report import MissReason
from kvire.engine.prefetch import Prefetcher
from kvire.engine.sequence import Sequence, State
from kvire.plan.cost import Way
from kvire.store.reuse.load import Miss

# A prompt whose logprobs are asked for needs logits of every token; this bounds their number in one
# step, and so their memory (64 rows of a vocabulary of 262,144 in float32 are 67 MB).
MAX_PROMPT_LOGPROB_TOKENS = 64


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """`count` tokens of `seq`, from seq.num_computed on, to compute in this step."""

    seq: Sequence
    count: int

    @property
    def completes(self) -> bool:
        """Whether the sequence's next token can be sampled after this chunk."""
        return self.count == self.seq.num_remaining


class Scheduler:
    """Waiting and running sequences over one GroupedPool; belongs to the engine's thread.

    prefetcher: loads stored blocks.
    copy_block: copies a block's KV, by group, source and target.
    """

    def __init__(
        self,
        pool: GroupedPool,
        config: EngineConfig,
        max_model_len: int,
        prefetcher: Prefetcher,
        copy_block: Callable[[int, int, int], None],
    ) -> None:
        self.pool = pool
        self.prefetcher = prefetcher
        self.copy_block = copy_block
        self.max_batch_tokens = config.max_batch_tokens
        self.max_num_seqs = config.max_num_seqs
        self.kv_cache = config.kv_cache
        self.prefix_cache = config.prefix_cache and config.kv_cache == "paged"
        self.partial_hits = not config.deterministic
        self.max_model_len = max_model_len
        self.waiting: list[Sequence] = []  # both by order, oldest first
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._computing: dict[BlockKey, Sequence] = {}  # full blocks that a running sequence will publish

    @property
    def has_work(self) -> bool:
        """Whether there is anything to do, even if only to wait for loads."""
        return bool(self.running or self.waiting or self.prefetcher.draining)

    def poll(self) -> None:
        """Take back memory that is free by now."""
        self.prefetcher.poll()

    def nap(self) -> None:
        """No token can be computed: sleep briefly, unless something arrives."""
        self.prefetcher.nap(self.running)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence behind all older ones."""
        seq.state = State.WAITING
        insort(self.waiting, seq, key=_order)

    def remove(self, seq: Sequence, *, remember: bool = True) -> None:
        """A sequence is finished or cancelled: its blocks are free from now on.

        remember: its last block, too.
        """
        if seq.state is State.RUNNING:
            self.running.remove(seq)
            self._release(seq, remember=remember)
        elif seq.state is State.WAITING and seq in self.waiting:
            self.waiting.remove(seq)
        seq.state = State.FINISHED

    def admit(self) -> None:
        """Move waiting sequences to running, oldest first, while seats and blocks last.

        A sequence whose next block is being computed by another one waits for it instead of
        computing it again; later sequences may pass, since the awaited one is running.
        """
        for seq in list(self.waiting):
            seated = len(self.running) < self.max_num_seqs
            if len(self.running) >= self.max_num_seqs + self.prefetcher.most_ahead:
                return
            if seq.waits_for in self._computing:
                continue
            reusable = self._reusable_keys(seq)
            matched = self.pool.match_length(seq.chain.root, reusable, seq.token_ids)
            seq.waits_for = self._last_in_computation(reusable[matched:])
            if seq.waits_for is not None:
                continue
            if not self._start(seq, reusable, matched, seated=seated):
                return

    def _last_in_computation(self, keys: list[BlockKey]) -> BlockKey | None:
        """The last of the leading keys that running sequences are about to publish; None without
        any.
        """
        last = None
        for key in keys:
            if key not in self._computing:
                break
            last = key
        return last

    def _reuses(self, seq: Sequence) -> bool:
        """Whether the sequence may reuse remembered KV.

        Logprobs of prompt tokens need their logits, so not then.
        """
        return self.prefix_cache and seq.params.prompt_logprobs is None

    def _reusable_keys(self, seq: Sequence) -> list[BlockKey]:
        """Keys of the full blocks that may be reused: at least one token is left to compute."""
        if not self._reuses(seq):
            return []
        return seq.chain.extend()[: (seq.num_tokens - 1) // self.pool.block_size]

    def _start(self, seq: Sequence, reusable: list[BlockKey], matched: int, *, seated: bool) -> bool:
        """Lease remembered blocks and allocate the rest; False, and no change, if that does not
        fit.

        A sequence without a seat only loads stored blocks, to have them when it gets one.
        """
        plan = self.prefetcher.plan(seq, len(reusable), matched)
        if not seated and plan.choice.way is not Way.LOAD:
            return False
        windows = plan.loads and self.pool.has_windows
        alone = not plan.loads or (plan.found.known == matched and not windows)
        partial = self._reuses(seq) and self.partial_hits and alone
        more = seq.num_tokens - 1 - matched * self.pool.block_size if partial else 0
        hit = self.pool.match(seq.chain.root, reusable[:matched], seq.token_ids, partial_tokens=more)
        computed = hit.full_blocks * self.pool.block_size + hit.partial_tokens
        if hit.partial_tokens:
            plan = plan.without(hit.full_blocks)
        if self.kv_cache == "contiguous":
            fits = self.pool.try_extend(hit.lease, self.max_model_len, now=self.max_model_len)
        else:
            loaded = plan.found.stop * self.pool.block_size if windows else None
            fits = self.pool.try_extend(
                hit.lease, seq.num_tokens, now=loaded or computed, spare=self._promised(), loaded=loaded
            )
        if not fits:
            hit.lease.release()
            return False
        if hit.partial_tokens:
            targets = [part.blocks[hit.full_blocks] for part in hit.lease.leases]
            pairs = enumerate(zip(hit.sources, targets, strict=True))
            self._copy((group, source, target.id) for group, (source, target) in pairs if target is not None)
        if seq.admitted_s is None:
            seq.admitted_s = monotonic()
            seq.reuse.device_tokens = computed
            full = plan.found.known if plan.loads else hit.full_blocks
            self._explain(seq, reusable, full, max(computed, full * self.pool.block_size))
        else:  # preempted, and another sequence has computed more of its prompt since
            seq.reuse.device_tokens += max(0, computed - seq.most_computed)
        seq.lease, seq.state = hit.lease, State.RUNNING
        seq.num_computed, seq.num_published, seq.detached = computed, hit.full_blocks, False
        seq.most_computed = max(seq.most_computed, computed)  # lost before use, a hit is computed again
        self.waiting.remove(seq)
        insort(self.running, seq, key=_order)
        if self._reuses(seq):  # who scores a prompt is too slow to be waited for
            for key in seq.chain.extend()[hit.full_blocks :]:
                self._computing.setdefault(key, seq)
        self.prefetcher.start(seq, plan)
        return True

    def _copy(self, copies: Iterable[tuple[int, int, int]]) -> None:
        """Copy blocks at once: a load or the next step may write into the source blocks."""
        for group, source, target in copies:
            self.copy_block(group, source, target)

    def _promised(self) -> list[int]:
        """Blocks of each group that running sequences will take soon.

        Without them, the next tokens would preempt the newest.
        """
        needs = [
            self.pool.still_to_come(seq.lease, seq.num_computed, seq.num_tokens) for seq in self.running if seq.lease
        ]
        return [sum(counts) for counts in zip(*needs, strict=True)] if needs else [0] * len(self.pool.pools)

    def _explain(self, seq: Sequence, reusable: list[BlockKey], full: int, computed: int) -> None:
        """Note why no more than `full` blocks, or `computed` tokens, are reused (CacheReport)."""
        seq.reuse.miss = self._miss(seq, reusable, full, computed)

    def _miss(self, seq: Sequence, reusable: list[BlockKey], full: int, computed: int) -> Miss:
        """The reason of the miss, and its first token."""
        if not self.prefix_cache:
            return Miss(MissReason.OFF)
        if seq.params.prompt_logprobs is not None:
            return Miss(MissReason.PROMPT_LOGPROBS)
        if not reusable and (not self.partial_hits or seq.num_tokens == 1):
            return Miss(MissReason.SHORTER_THAN_BLOCK)
        if computed == seq.num_tokens - 1 or (full == len(reusable) and not self.partial_hits):
            return Miss(MissReason.COMPLETE)
        if self._was_evicted(seq, reusable, full):
            return Miss(MissReason.EVICTED, computed)
        return self._left(seq, full, computed)

    def _left(self, seq: Sequence, full: int, computed: int) -> Miss:
        """Position at which a prompt leaves the closest one that the device remembers."""
        shared = self.pool.closest(seq.chain.parent(full), seq.chain.tokens(full))
        token = full * self.pool.block_size + shared
        if computed:
            return Miss(MissReason.DIVERGED, token)
        return Miss(MissReason.SHORTER_THAN_BLOCK if token else MissReason.NEVER_STORED, token)

    def _was_evicted(self, seq: Sequence, reusable: list[BlockKey], full: int) -> bool:
        """Whether an eviction shortened the hit to `full` blocks."""
        if full < len(reusable):
            return (
                self.pool.was_evicted(reusable[full]) or self.pool.reach(seq.chain.root, reusable, seq.token_ids) > full
            )
        parent, rest = seq.chain.parent(full), seq.chain.tokens(full)
        return any(self.pool.was_evicted(block_key(parent, rest[:count])) for count in range(len(rest), 0, -1))

    def schedule(self) -> list[Chunk]:
        """The next step's chunks: every decode, then prompts in chunks, under the token budget.

        Chunks of one token come first (Batch). If blocks are missing, preempts the newest first.
        """
        chunks = []
        limits = self._limits()
        for seq in [seq for seq in limits if seq.num_remaining == 1]:
            if seq.state is not State.RUNNING:
                continue  # preempted for an older one in this loop
            if self._make_room(seq, 1):
                chunks.append(Chunk(seq, 1))
            else:
                self.preempt(seq)
        budget, scored = self.max_batch_tokens - len(chunks), MAX_PROMPT_LOGPROB_TOKENS
        for seq in [seq for seq in limits if seq.num_remaining > 1]:
            count = min(seq.num_remaining, budget, limits[seq], scored if seq.scores_prompt else budget)
            if count > 0 and seq.state is State.RUNNING:
                count = self.prefetcher.claim(seq, count)
            if count > 0 and seq.state is State.RUNNING and self._make_room(seq, count):
                chunks.append(Chunk(seq, count))
                budget -= count
                scored -= count if seq.scores_prompt else 0
        chunks = [chunk for chunk in chunks if chunk.seq.state is State.RUNNING]
        return sorted(chunks, key=lambda chunk: chunk.count != 1)

    def _limits(self) -> dict[Sequence, int]:
        """The running sequences with a seat, oldest first, and each one's token limit in this step.

        Takes over loaded blocks; sequences that wait for more are left out.
        """
        limits: dict[Sequence, int] = {}
        for seq in list(self.running):
            load = seq.reuse.load
            if self.prefetcher.take_over(seq):
                self._publish_full(seq)
                certain = load.known if load is not None else 0
                if seq.num_published > max(seq.reuse.asked_token // self.pool.block_size, certain):
                    self._explain(seq, self._reusable_keys(seq), seq.num_published, seq.num_computed)
                    seq.reuse.answer = None
            limit = self.prefetcher.limit(seq, self.max_batch_tokens)
            if load is not None and load.lost:
                self.preempt(seq)
            elif limit > 0 and len(limits) < self.max_num_seqs:
                limits[seq] = limit
        return limits

    def _make_room(self, seq: Sequence, count: int) -> bool:
        """Allocate blocks for the sequence's next `count` tokens, preempting newer sequences.

        False if none are left.
        """
        while not self._has_room(seq, count):
            if self.running[-1] is seq:
                return False
            self.preempt(self.running[-1])
        return True

    def _has_room(self, seq: Sequence, count: int) -> bool:
        assert seq.lease is not None
        end = seq.num_computed + count
        if not self.pool.try_extend(seq.lease, end, now=end):
            return False
        copies = self.pool.make_writable(seq.lease, seq.num_computed // self.pool.block_size)
        if copies is None:
            return False
        self._copy(copies)
        return True

    def preempt(self, seq: Sequence) -> None:
        """Take a running sequence's blocks; it is computed again later."""
        self.running.remove(seq)
        self._release(seq, remember=True)
        seq.num_computed = seq.num_published = 0
        seq.preemptions += 1
        self.preemptions += 1
        self.add(seq)

    def fork(self, source: Sequence, sample: Sequence) -> None:
        """Let `sample` share all blocks of `source`, whose prompt is computed, and run beside
        it.
        """
        assert source.lease is not None
        sample.lease = self.pool.fork(source.lease)
        sample.share_prompt(source)
        sample.state, sample.admitted_s = State.RUNNING, source.admitted_s
        insort(self.running, sample, key=_order)

    def drop(self, seq: Sequence) -> None:
        """Drop a running sequence's KV: it is computed again for its next token."""
        assert seq.lease is not None
        seq.lease.release()
        seq.lease = self.pool.empty_lease()
        seq.num_computed = 0

    def advance(self, chunk: Chunk) -> None:
        """A chunk is computed: publish its full blocks, release those behind every window."""
        chunk.seq.advance(chunk.count)
        self._publish_full(chunk.seq, save=True)

    def _publish_full(self, seq: Sequence, *, save: bool = False) -> None:
        """Put the blocks that are full by now into the index.

        save: they were computed, so the store gets them.
        """
        assert seq.lease is not None
        if self.prefix_cache:
            keys, first = seq.chain.extend(), seq.num_published
            for index in range(first, seq.num_computed // self.pool.block_size):
                self._publish(seq, index, keys[index], seq.chain.tokens(index))
                self._computing.pop(keys[index], None)
                seq.num_published = index + 1
            if save:
                self.prefetcher.save(seq, range(first, seq.num_published))
        if self.kv_cache == "paged":
            self.pool.give_back(seq.lease, seq.num_computed)

    def _publish(self, seq: Sequence, index: int, key: BlockKey, token_ids: SequenceOf[int]) -> None:
        """Put a block into the index, unless an earlier one is missing there under the sequence's
        tokens.
        """
        if not seq.detached:
            assert seq.lease is not None
            chain = seq.chain
            found = self.pool.publish(seq.lease, index, key, chain.parent(index), chain.root, token_ids)
            seq.detached = not found

    def _release(self, seq: Sequence, *, remember: bool) -> None:
        """Release a running sequence's blocks.

        remember: publish the last one first, if it is not full.
        """
        assert seq.lease is not None
        index = seq.num_computed // self.pool.block_size
        tail = seq.token_ids[index * self.pool.block_size : seq.num_computed]
        if remember and tail and self.prefix_cache and self.partial_hits:
            assert seq.num_published == index
            self._publish(seq, index, block_key(seq.chain.parent(index), tail), tail)
        self.prefetcher.release(seq, seq.lease)
        seq.lease = None
        self.pool.touch(seq.chain.keys[: seq.num_published])
        for key in seq.chain.keys[seq.num_published :]:
            if self._computing.get(key) is seq:
                del self._computing[key]


def _order(seq: Sequence) -> tuple[int, int]:
    return seq.order
