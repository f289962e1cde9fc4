"""Deliberately broken builds: each is a fault that a rival system shipped, and a replay must notice
it.

A mutant patches one function of Kvire for the length of a test.
"""

import pytest
import torch

from kvire.cache.block_pool import Block, BlockPool, Lease
from kvire.cache.grouped import GroupedPool
from kvire.cache.paged import PagedKV
from kvire.core.report import MissReason
from kvire.engine import engine as engine_module
from kvire.engine import sampler
from kvire.engine.detokenizer import Detokenizer
from kvire.engine.engine import Engine
from kvire.engine.scheduler import Scheduler
from kvire.engine.sequence import Sequence
from kvire.store.reuse.load import Miss


def whole_prompt_counts_as_hit(patch: pytest.MonkeyPatch) -> None:
    """Reuse may cover every prompt token, leaving nothing to compute."""

    def reusable(self, seq):
        return seq.chain.extend() if self.prefix_cache else []

    patch.setattr(Scheduler, "_reusable_keys", reusable)


def last_block_never_reused(patch: pytest.MonkeyPatch) -> None:
    """A prompt at a block multiple loses one more block of reuse than it must."""

    def reusable(self, seq):
        return seq.chain.extend()[: max(0, (seq.num_tokens - 1) // self.pool.block_size - 1)]

    patch.setattr(Scheduler, "_reusable_keys", reusable)


def chain_broken_at_multiples(patch: pytest.MonkeyPatch) -> None:
    """The last full block of a prompt is published under no key when the prompt ends with it."""
    publish = GroupedPool.publish

    def broken(self, lease, index, key, parent, root, token_ids):
        ends = index + 1 == len(lease.leases[0])
        return ends or publish(self, lease, index, key, parent, root, token_ids)

    patch.setattr(GroupedPool, "publish", broken)


def published_when_allocated(patch: pytest.MonkeyPatch) -> None:
    """Blocks can be found as soon as they are allocated, before anybody computed them."""
    start = Scheduler._start

    def broken(self, seq, *rest, **options):
        if not start(self, seq, *rest, **options):
            return False
        for index in range(seq.num_published, seq.num_tokens // self.pool.block_size):
            key = seq.chain.extend()[index]
            self.pool.publish(seq.lease, index, key, seq.chain.parent(index), seq.chain.root, seq.chain.tokens(index))
            self._computing.pop(key, None)
        return True

    patch.setattr(Scheduler, "_start", broken)


def hit_over_a_hole(patch: pytest.MonkeyPatch) -> None:
    """The hit length counts blocks that are there, wherever they lie."""

    def broken(self, root, keys, token_ids):
        return max((i + 1 for i, key in enumerate(keys) if key in self._index), default=0)

    def match(self, root, keys, token_ids):
        blocks = [self._index[key] for key in keys if key in self._index]
        for block in blocks:
            self._ref(block)
        return Lease(self, blocks)

    def forget(self, key):
        self._unindex(key)
        return 1

    patch.setattr(BlockPool, "match_length", broken)
    patch.setattr(BlockPool, "match", match)
    patch.setattr(BlockPool, "forget", forget)
    patch.setattr(BlockPool, "check", lambda self: None)  # it would notice; the answer has to show it too


def block_in_use_freed(patch: pytest.MonkeyPatch) -> None:
    """A release frees the block although others hold it."""

    def broken(self, block: Block) -> None:
        block.ref_count = 0
        self._blank.append(block)

    patch.setattr(BlockPool, "_unref", broken)


def reference_not_taken(patch: pytest.MonkeyPatch) -> None:
    """A hit does not count its holder."""

    def broken(self, block: Block) -> None:
        if block.ref_count == 0:
            del self._remembered[block.id]
            block.ref_count = 1

    patch.setattr(BlockPool, "_ref", broken)


def preemption_drops_output(patch: pytest.MonkeyPatch) -> None:
    """A preempted sequence starts over from its prompt."""
    preempt = Scheduler.preempt

    def broken(self, seq):
        del seq.token_ids[seq.num_prompt :]
        preempt(self, seq)

    patch.setattr(Scheduler, "preempt", broken)


def preemption_forgets_penalties(patch: pytest.MonkeyPatch) -> None:
    """After preemption, generated tokens count as prompt."""
    preempt = Scheduler.preempt

    def broken(self, seq):
        seq.answer_counts.clear()
        preempt(self, seq)

    patch.setattr(Scheduler, "preempt", broken)


def randomness_by_step(patch: pytest.MonkeyPatch) -> None:
    """Random numbers come from one generator shared by everybody."""
    generator = torch.Generator().manual_seed(1)

    def broken(seed: int, index: int, position: int) -> float:
        return float(torch.rand((), generator=generator))

    patch.setattr(sampler, "uniform", broken)


def samples_share_randomness(patch: pytest.MonkeyPatch) -> None:
    """All n samples of a request draw the same numbers."""
    uniform = sampler.uniform
    patch.setattr(sampler, "uniform", lambda seed, index, position: uniform(seed, 0, position))


def abort_ignored(patch: pytest.MonkeyPatch) -> None:
    """The client is gone, the work goes on."""
    patch.setattr(Engine, "_abort", lambda self, request_id: None)


def abort_leaks_blocks(patch: pytest.MonkeyPatch) -> None:
    """Cancelling forgets the sequence but not its blocks."""
    remove = Scheduler.remove

    def broken(self, seq, **options):
        if seq.finish_reason is None and seq in self.running:
            self.running.remove(seq)
        else:
            remove(self, seq, **options)

    patch.setattr(Scheduler, "remove", broken)


def impossible_requests_wait(patch: pytest.MonkeyPatch) -> None:
    """Nobody asks whether a request can ever fit."""
    patch.setattr(Engine, "validate", lambda self, request: None)


def growth_without_limit(patch: pytest.MonkeyPatch) -> None:
    """An answer may grow past what the engine holds."""

    def broken(self, seq, token):
        return "length" if seq.num_answer >= seq.params.max_tokens else None

    patch.setattr(Engine, "_finish_reason", broken)


def prompt_logprobs_from_cache(patch: pytest.MonkeyPatch) -> None:
    """Prompt logprobs are asked for, and reuse goes on all the same."""

    def reusable(self, seq):
        return seq.chain.extend()[: (seq.num_tokens - 1) // self.pool.block_size]

    patch.setattr(Scheduler, "_reusable_keys", reusable)


def cached_tokens_per_sample(patch: pytest.MonkeyPatch) -> None:
    """Samples that share the prompt count it as a hit of their own."""
    fork = Scheduler.fork

    def broken(self, source, sample):
        fork(self, source, sample)
        source.reuse.device_tokens = sample.reuse.device_tokens = sample.num_prompt - 1

    patch.setattr(Scheduler, "fork", broken)


def fork_writes_in_place(patch: pytest.MonkeyPatch) -> None:
    """A forked sequence writes into the block that it shares."""
    patch.setattr(BlockPool, "make_writable", lambda self, lease, index: None)


def copy_on_write_forgets_to_copy(patch: pytest.MonkeyPatch) -> None:
    """A block of its own, but without what was in the shared one."""
    patch.setattr(PagedKV, "copy_block", lambda self, group, source, target: None)


def stop_checked_after_showing(patch: pytest.MonkeyPatch) -> None:
    """Text is shown first and searched for stop strings then."""
    show = Detokenizer._show

    def broken(self, *, final):
        piece, self._shown = self._text[self._shown :], len(self._text)
        held, self._shown = self._shown, 0
        show(self, final=final)
        self._shown = held
        return piece

    patch.setattr(Detokenizer, "_show", broken)


def every_token_decoded_alone(patch: pytest.MonkeyPatch) -> None:
    """Each token becomes text by itself, halves of characters included."""

    def broken(self, token_id):
        self._ids.append(token_id)
        self._text += self._decode([token_id])
        return self._show(final=False)

    patch.setattr(Detokenizer, "add", broken)


def tail_lost_at_the_end(patch: pytest.MonkeyPatch) -> None:
    """What was held back is never shown."""
    patch.setattr(Detokenizer, "finish", lambda self: "")


def long_prompts_answer_nothing(patch: pytest.MonkeyPatch) -> None:
    """Near the limit an answer ends before its first token."""
    finish_reason = Engine._finish_reason

    def broken(self, seq, token):
        if seq.num_prompt > self.max_model_len * 0.8:
            del seq.token_ids[seq.num_prompt :]
            return "length"
        return finish_reason(self, seq, token)

    patch.setattr(Engine, "_finish_reason", broken)


def misses_all_alike(patch: pytest.MonkeyPatch) -> None:
    """Shared prefixes too short for a block look like no shared prefix at all."""

    def broken(self, seq, reusable, hit, computed):
        seq.reuse.device_tokens = computed
        seq.reuse.miss = Miss(MissReason.NEVER_STORED)

    patch.setattr(Scheduler, "_explain", broken)


def position_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """After a hit, positions start one too low."""
    build = engine_module.build_batch

    def broken(chunks, block_size):
        batch = build(chunks, block_size)
        start = 0
        for chunk in chunks:
            if chunk.seq.reuse.device_tokens:
                batch.positions[start : start + chunk.count] -= 1
            start += chunk.count
        return batch

    patch.setattr(engine_module, "build_batch", broken)


def lease_not_released_on_finish(patch: pytest.MonkeyPatch) -> None:
    """A finished sequence keeps one block."""
    release = Lease.release

    def broken(self):
        kept = self.blocks[:1]
        del self.blocks[:1]
        release(self)
        self.blocks = kept

    patch.setattr(Lease, "release", broken)


def sequence_reports_nothing_reused(patch: pytest.MonkeyPatch) -> None:
    """Reuse happens, the report says zero."""
    report = Sequence.report.fget

    def broken(self):
        self.reuse.device_tokens = 0
        return report(self)

    patch.setattr(Sequence, "report", property(broken))
