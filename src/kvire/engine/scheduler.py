"""Who runs, with which blocks, and how many tokens each computes in the next step.

Older requests come first, always: nobody overtakes for want of memory, and when blocks run out the
newest running sequence gives its own back and is computed again later. So the oldest one always
moves, and any pool that fits one request serves them all.
"""

from bisect import insort
from dataclasses import dataclass

from kvire.cache.grouped import GroupedLease, GroupedPool
from kvire.core.keys import BlockKey
from kvire.core.report import MissReason
from kvire.engine.sequence import Sequence, State

# A prompt whose logprobs are asked for needs logits of every token; this bounds their number in one step, and so
# their memory (64 rows of a vocabulary of 262,144 in float32 are 67 MB).
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
    """Waiting and running sequences over one GroupedPool; belongs to the engine's thread."""

    def __init__(self, pool: GroupedPool, *, max_batch_tokens: int, max_num_seqs: int, prefix_cache: bool) -> None:
        self.pool = pool
        self.max_batch_tokens = max_batch_tokens
        self.max_num_seqs = max_num_seqs
        self.prefix_cache = prefix_cache
        self.waiting: list[Sequence] = []  # both by order, oldest first
        self.running: list[Sequence] = []
        self.copies: list[tuple[int, int, int]] = []  # (group, source, target) to copy before the next step
        self.preemptions = 0
        self._computing: dict[BlockKey, Sequence] = {}  # full blocks that a running sequence will publish

    def add(self, seq: Sequence) -> None:
        """Queue a sequence behind all that are older."""
        seq.state = State.WAITING
        insort(self.waiting, seq, key=_order)

    def remove(self, seq: Sequence) -> None:
        """A sequence is finished or cancelled: its blocks are free from now on."""
        if seq.state is State.RUNNING:
            self.running.remove(seq)
            self._give_back(seq)
        elif seq.state is State.WAITING and seq in self.waiting:
            self.waiting.remove(seq)
        seq.state = State.FINISHED

    def admit(self) -> None:
        """Move waiting sequences to running, oldest first, while seats and blocks last.

        One whose next block is just being computed by another waits for it instead of computing it
        again; those behind it may pass, since what it waits for is running.
        """
        for seq in list(self.waiting):
            if len(self.running) >= self.max_num_seqs:
                return
            reusable = self._reusable_keys(seq)
            matched = self.pool.match_length(seq.root, reusable, seq.token_ids)
            if matched < len(reusable) and reusable[matched] in self._computing:
                continue
            if not self._start(seq, reusable):
                return

    def _reusable_keys(self, seq: Sequence) -> list[BlockKey]:
        """Keys of the full blocks that may be reused: at least one token is left to compute."""
        if not self.prefix_cache or seq.params.prompt_logprobs is not None:
            return []
        return seq.full_block_keys()[: (seq.num_tokens - 1) // self.pool.block_size]

    def _start(self, seq: Sequence, reusable: list[BlockKey]) -> bool:
        """Lease what is remembered and allocate the rest; False, and no change, if that does not fit."""
        lease = self.pool.match(seq.root, reusable, seq.token_ids)
        needed = self._blocks_for(seq.num_tokens) - len(lease)
        # One block to spare per running sequence, or the next few tokens would preempt this one.
        reserve = len(self.running)
        more = self.pool.try_allocate(needed) if needed + reserve <= self.pool.num_free else None
        if more is None:
            lease.release()
            return False
        matched = len(lease)
        if not seq.admitted:
            self._explain(seq, reusable, matched)
        lease.extend(more)
        seq.lease, seq.state, seq.admitted = lease, State.RUNNING, True
        seq.num_computed, seq.num_published = matched * self.pool.block_size, matched
        seq.most_computed = max(seq.most_computed, seq.num_computed)  # lost before use, a hit is computed again
        self.waiting.remove(seq)
        insort(self.running, seq, key=_order)
        if self.prefix_cache:
            for key in seq.full_block_keys()[matched:]:
                self._computing.setdefault(key, seq)
        return True

    def _explain(self, seq: Sequence, reusable: list[BlockKey], matched: int) -> None:
        """Note what was reused and why the rest was not (CacheReport)."""
        block_size = self.pool.block_size
        seq.device_tokens = matched * block_size
        if not self.prefix_cache:
            seq.miss = MissReason.OFF
        elif seq.params.prompt_logprobs is not None:
            seq.miss = MissReason.PROMPT_LOGPROBS
        elif matched < len(reusable) and self.pool.was_evicted(reusable[matched]):
            seq.miss, seq.miss_token = MissReason.EVICTED, matched * block_size
        elif not reusable:
            seq.miss = MissReason.SHORTER_THAN_BLOCK
        elif matched == len(reusable):
            seq.miss = MissReason.COMPLETE
        else:
            parent = seq.keys[matched - 1] if matched else seq.root
            shared = self.pool.closest(parent, seq.token_ids[matched * block_size : (matched + 1) * block_size])
            seq.miss_token = matched * block_size + shared
            if matched:
                seq.miss = MissReason.DIVERGED
            else:
                seq.miss = MissReason.SHORTER_THAN_BLOCK if shared else MissReason.NEVER_STORED

    def schedule(self) -> list[Chunk]:
        """The next step's chunks: every decode, then prompts in chunks, under the token budget.

        Chunks of one token come first (Batch). Preempts, newest first, for decodes that need a block.
        """
        decoding = [seq for seq in self.running if seq.num_remaining == 1]
        for seq in decoding:
            if seq.state is State.RUNNING:  # not preempted for an older one in this loop
                self._make_room(seq)
        chunks = [Chunk(seq, 1) for seq in decoding if seq.state is State.RUNNING]
        budget, scored = self.max_batch_tokens - len(chunks), MAX_PROMPT_LOGPROB_TOKENS
        for seq in self.running:
            scores_prompt = seq.params.prompt_logprobs is not None
            count = min(seq.num_remaining, budget, scored if scores_prompt else budget)
            if seq.num_remaining > 1 and count > 0:
                chunks.append(Chunk(seq, count))
                budget -= count
                scored -= count if scores_prompt else 0
        return sorted(chunks, key=lambda chunk: chunk.count != 1)

    def _make_room(self, seq: Sequence) -> None:
        """Find a block of its own for the sequence's next token; the newest pay, at worst itself."""
        while seq.lease is not None and not self._has_room(seq, seq.lease):
            self.preempt(self.running[-1])

    def _has_room(self, seq: Sequence, lease: GroupedLease) -> bool:
        index = seq.num_computed // self.pool.block_size
        if index == len(lease):
            more = self.pool.try_allocate(1)
            if more is not None:
                lease.extend(more)
            return more is not None
        copies = self.pool.make_writable(lease, index)
        if copies is None:
            return False
        self.copies += copies
        return True

    def preempt(self, seq: Sequence) -> None:
        """Take a running sequence's blocks; it is computed again once it is its turn."""
        self.running.remove(seq)
        self._give_back(seq)
        seq.num_computed = seq.num_published = 0
        seq.preemptions += 1
        self.preemptions += 1
        self.add(seq)

    def fork(self, source: Sequence, sample: Sequence) -> None:
        """Let `sample` share all blocks of `source`, whose prompt is computed, and run beside it."""
        assert source.lease is not None
        sample.lease = self.pool.fork(source.lease)
        sample.keys = list(source.keys)
        sample.num_computed, sample.num_published = source.num_computed, source.num_published
        sample.most_computed = source.most_computed
        sample.device_tokens, sample.miss, sample.miss_token = source.device_tokens, source.miss, source.miss_token
        sample.state, sample.admitted = State.RUNNING, True
        insort(self.running, sample, key=_order)

    def advance(self, chunk: Chunk) -> None:
        """A chunk is computed: publish the blocks that it filled."""
        seq = chunk.seq
        assert seq.lease is not None
        seq.advance(chunk.count)
        if not self.prefix_cache:
            return
        keys = seq.full_block_keys()
        for index in range(seq.num_published, seq.num_computed // self.pool.block_size):
            parent = seq.parent_of(index)
            self.pool.publish(seq.lease, index, keys[index], parent, seq.root, seq.block_tokens(index))
            self._computing.pop(keys[index], None)
            seq.num_published = index + 1

    def _give_back(self, seq: Sequence) -> None:
        assert seq.lease is not None
        seq.lease.release()
        seq.lease = None
        for key in seq.keys[seq.num_published :]:
            if self._computing.get(key) is seq:
                del self._computing[key]

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.block_size)


def _order(seq: Sequence) -> tuple[int, int]:
    return seq.order
