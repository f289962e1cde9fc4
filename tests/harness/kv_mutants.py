"""Deliberately broken builds whose KV is wrong, or read by the wrong sequence; tests/proof must
notice each.

As in mutants.py, a mutant patches one function of Kvire for the length of a test.
"""

import os
import threading
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from kvire.attention import paged_cache
from kvire.attention.paged_cache import PagedCache
from kvire.cache.block_pool import BlockPool
from kvire.cache.grouped import GroupedPool
from kvire.cache.paged import PagedKV
from kvire.cache.window_pool import WindowPool
from kvire.core.keys import block_key
from kvire.engine import engine as engine_module
from kvire.engine.client import EngineClient
from kvire.engine.engine import Engine
from kvire.engine.scheduler import Scheduler


def _alter_batch(patch: pytest.MonkeyPatch, alter) -> None:
    """alter(chunks, batch) -> the batch that the model gets."""
    build = engine_module.build_batch
    patch.setattr(engine_module, "build_batch", lambda chunks, *rest: alter(chunks, build(chunks, *rest)))


def block_tables_of_the_neighbour(patch: pytest.MonkeyPatch) -> None:
    """In company, every sequence reads the blocks of the next one."""
    _alter_batch(
        patch, lambda _, batch: replace(batch, block_tables=tuple(t.roll(1, dims=0) for t in batch.block_tables))
    )


def wrong_slot_after_a_hit(patch: pytest.MonkeyPatch) -> None:
    """The first token computed after a hit is written one slot too far."""

    def alter(chunks, batch):
        for chunk, start in zip(chunks, batch.cu_seqlens, strict=False):
            if chunk.seq.num_computed == chunk.seq.reuse.device_tokens > 0:
                for slots in batch.slots:
                    slots[start] += 1
        return batch

    _alter_batch(patch, alter)


def one_token_too_much_counts_as_hit(patch: pytest.MonkeyPatch) -> None:
    """The token after a hit is not computed."""
    start = Scheduler._start

    def broken(self, seq, *rest, **options):
        started = start(self, seq, *rest, **options)
        if started and 0 < seq.num_computed < seq.num_tokens - 1:
            seq.num_computed += 1
        return started

    patch.setattr(Scheduler, "_start", broken)


def published_one_token_early(patch: pytest.MonkeyPatch) -> None:
    """A block can be found although its last token is not computed yet."""
    advance = Scheduler.advance

    def broken(self, chunk):
        advance(self, chunk)
        seq, size = chunk.seq, self.pool.block_size
        index = seq.num_computed // size
        if self.prefix_cache and seq.num_computed % size == size - 1 and len(seq.chain.extend()) > index:
            self._publish(seq, index, seq.chain.keys[index], seq.chain.tokens(index))
            seq.num_published = index + 1

    patch.setattr(Scheduler, "advance", broken)


def stale_blocks_after_abort(patch: pytest.MonkeyPatch) -> None:
    """The blocks of a cancelled prompt can be found although nobody computed the rest of it."""
    abort = Engine._abort

    def broken(self, request_id):
        for seq in self._sequences.get(request_id, ()):
            if seq.lease is not None and self.config.prefix_cache:
                for index in range(seq.num_published, seq.num_prompt // self.pool.block_size):
                    self.scheduler._publish(seq, index, seq.chain.extend()[index], seq.chain.tokens(index))
                    seq.num_published = index + 1
        abort(self, request_id)

    patch.setattr(Engine, "_abort", broken)


def remembered_kv_is_rounded(patch: pytest.MonkeyPatch) -> None:
    """Blocks that nobody holds are kept as 8-bit integers."""
    step = Engine.step

    def broken(self):
        outputs = step(self)
        for slab, pool in zip(self.paged.slabs, self.pool.pools, strict=True):
            for block in pool._remembered:
                scale = slab[block].nan_to_num().abs().max() / 127
                slab[block] = (slab[block] / scale).round() * scale
        return outputs

    patch.setattr(Engine, "step", broken)


def copy_swaps_k_and_v(patch: pytest.MonkeyPatch) -> None:
    """A copied block has V where K belongs."""

    def broken(self, group, source, target):
        for layer in self.spec.groups[group].layers:
            k, v = self.k(layer), self.v(layer)
            k[target], v[target] = v[source].clone(), k[source].clone()

    patch.setattr(PagedKV, "copy_block", broken)


def copy_leaves_a_layer_stale(patch: pytest.MonkeyPatch) -> None:
    """All layers of a block are copied but the last one."""

    def broken(self, group, source, target):
        for layer in self.spec.groups[group].layers[:-1]:
            for part in (self.k(layer), self.v(layer)):
                part[target] = part[source]

    patch.setattr(PagedKV, "copy_block", broken)


def copies_after_the_step(patch: pytest.MonkeyPatch) -> None:
    """Blocks are copied once the step has written into the copy."""
    run, copies = Engine.run, []

    def broken(self, chunks):
        logits = run(self, chunks)
        for copy in copies:
            self.paged.copy_block(*copy)
        copies.clear()
        return logits

    patch.setattr(Scheduler, "_copy", lambda self, more: copies.extend(more))
    patch.setattr(Engine, "run", broken)


def partial_copy_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A hit ends inside a block, and the block that goes on is not filled."""
    start = Scheduler._start

    def broken(self, seq, *rest, **options):
        with pytest.MonkeyPatch.context() as meanwhile:
            meanwhile.setattr(self, "_copy", lambda copies: None)
            return start(self, seq, *rest, **options)

    patch.setattr(Scheduler, "_start", broken)


def partial_hit_one_token_too_long(patch: pytest.MonkeyPatch) -> None:
    """A hit that ends inside a block takes the first token that differs as well."""
    match = GroupedPool.match

    def broken(self, root, keys, token_ids, *, partial_tokens=0):
        hit = match(self, root, keys, token_ids, partial_tokens=partial_tokens)
        longest = min(partial_tokens, self.block_size - 1)
        return replace(hit, partial_tokens=hit.partial_tokens + (0 < hit.partial_tokens < longest))

    patch.setattr(GroupedPool, "match", broken)


def partial_hit_of_any_relative(patch: pytest.MonkeyPatch) -> None:
    """A hit that ends inside a block copies it from the wrong child of its parent."""
    relatives = BlockPool.relatives

    def broken(self, parent, token_ids):
        found = relatives(self, parent, token_ids)
        others = [self._index[key] for key in self._children.get(parent, {})]
        return [(shared, others[0]) for shared, _ in found]

    patch.setattr(BlockPool, "relatives", broken)


def tail_holds_a_token_too_many(patch: pytest.MonkeyPatch) -> None:
    """An unfinished last block is remembered with a token that was sampled but never run."""
    release = Scheduler._release

    def broken(self, seq, *, remember):
        index = seq.num_computed // self.pool.block_size
        tail = seq.token_ids[index * self.pool.block_size : seq.num_computed + 1]
        if remember and self.prefix_cache and self.partial_hits and 1 < len(tail) < self.pool.block_size:
            self._publish(seq, index, block_key(seq.chain.parent(index), tail), tail)
        release(self, seq, remember=False)

    patch.setattr(Scheduler, "_release", broken)


def block_of_somebody_else(patch: pytest.MonkeyPatch) -> None:
    """A hit's last block is the last published block, of any prefix."""
    match = GroupedPool.match

    def broken(self, *args, **options):
        hit = match(self, *args, **options)
        for pool, part in zip(self.pools, hit.lease.leases, strict=True):
            if part.blocks and part.blocks[-1] is not None:
                full = [block for block in pool._index.values() if len(block.token_ids) == self.block_size]
                pool._ref(full[-1])
                pool._unref(part.blocks[-1])
                part.blocks[-1] = full[-1]
        return hit

    patch.setattr(GroupedPool, "match", broken)


def blocks_published_under_the_last_key(patch: pytest.MonkeyPatch) -> None:
    """Of two blocks computed in one step, each is found under the other's key."""
    publish = BlockPool.publish
    held: dict[int, tuple] = {}

    def broken(self, block, key, parent, root, token_ids):
        previous = held.pop(id(self), None)
        if previous is None or previous[0].ref_count == 0 or previous[0] is block or previous[1] == key:
            held[id(self)] = (block, key)
            return publish(self, block, key, parent, root, token_ids)
        found = publish(self, block, key, parent, root, token_ids)
        a, b = self._index.get(previous[1]), self._index.get(key)
        if a is previous[0] and b is block:
            self._index[a.key], self._index[b.key] = b, a
            a.key, b.key = b.key, a.key
            a.parent, b.parent = b.parent, a.parent
            a.token_ids, b.token_ids = b.token_ids, a.token_ids
        return found

    patch.setattr(BlockPool, "publish", broken)


def logits_of_the_neighbour(patch: pytest.MonkeyPatch) -> None:
    """In company, everybody samples from the next one's logits."""
    commit = Engine.commit
    patch.setattr(Engine, "commit", lambda self, chunks, logits: commit(self, chunks, logits.roll(1, dims=0)))


def tokens_not_compared(patch: pytest.MonkeyPatch) -> None:
    """A key is believed: nobody looks at the tokens that it stands for."""
    patch.setattr(BlockPool, "_holds", lambda self, root, keys, token_ids, index: keys[index] in self._index)
    patch.setattr(BlockPool, "check", lambda self: None)


def collisions_not_counted(patch: pytest.MonkeyPatch) -> None:
    """Two prompts with one key are a miss that nobody hears of."""
    patch.setattr(GroupedPool, "stats", property(lambda self: replace(self.pools[0].stats, collisions=0)))


def window_one_too_wide(patch: pytest.MonkeyPatch) -> None:
    """Sliding layers see one token more than they should."""
    window = PagedCache.window
    patch.setattr(PagedCache, "window", lambda self, layer: (w := window(self, layer)) and w + 1)


def window_one_too_narrow(patch: pytest.MonkeyPatch) -> None:
    """Sliding layers see one token less than they should."""
    window = PagedCache.window
    patch.setattr(PagedCache, "window", lambda self, layer: (w := window(self, layer)) and w - 1)


def sinks_lost(patch: pytest.MonkeyPatch) -> None:
    """Attention sinks are left out."""
    params = paged_cache.AttentionParams
    patch.setattr(paged_cache, "AttentionParams", lambda scale, window, softcap, _: params(scale, window, softcap))


def window_gives_back_too_early(patch: pytest.MonkeyPatch) -> None:
    """Blocks behind the window go one block before nobody looks at them."""
    give_back = GroupedPool.give_back
    patch.setattr(
        GroupedPool,
        "give_back",
        lambda self, lease, num_computed: give_back(self, lease, num_computed + self.block_size),
    )


def window_hit_needs_too_little(patch: pytest.MonkeyPatch) -> None:
    """A hit on sliding layers asks for the last block only, not for the whole window."""

    def match_length(self, root, keys, token_ids):
        return next((n for n in range(len(keys), 0, -1) if self._holds(root, keys, token_ids, n - 1)), 0)

    def match(self, root, keys, token_ids):
        keys = keys[: self.match_length(root, keys, token_ids)]
        return self._lease(keys, max(0, len(keys) - 1))

    patch.setattr(WindowPool, "match_length", match_length)
    patch.setattr(WindowPool, "match", match)


def window_hit_needs_the_whole_prefix(patch: pytest.MonkeyPatch) -> None:
    """A hit on sliding layers asks for every block from the first on, and so for those that went
    long ago.
    """
    patch.setattr(WindowPool, "match_length", BlockPool.match_length)


def logits_are_kept(patch: pytest.MonkeyPatch) -> None:
    """Every token leaves its logits behind, sixteen times: more than what earlier tests freed could
    take in.
    """
    kept = []  # until the build is whole again
    next_token = Engine._next_token

    def broken(self, seq, logits):
        kept.append(logits.repeat(16))
        next_token(self, seq, logits)

    patch.setattr(Engine, "_next_token", broken)


def requests_are_kept(patch: pytest.MonkeyPatch) -> None:
    """Who asked for what is never forgotten."""
    numbers = count()
    pop = Engine._remove

    def broken(self, request_id, **options):
        self._seeds[f"kept-{next(numbers)}"] = 0
        return pop(self, request_id, **options)

    patch.setattr(Engine, "_remove", broken)


def a_thread_per_cancellation(patch: pytest.MonkeyPatch) -> None:
    """Cancelling starts a thread that waits for something that never comes."""
    abort = EngineClient.abort

    def broken(self, request_id):
        threading.Thread(target=threading.Event().wait, args=(30,), daemon=True).start()
        abort(self, request_id)

    patch.setattr(EngineClient, "abort", broken)


def a_file_per_request(patch: pytest.MonkeyPatch) -> None:
    """Every request leaves a file open."""
    kept = []  # until the build is whole again
    submit = EngineClient.submit

    def broken(self, request, route):
        kept.append(Path(os.devnull).open("rb"))  # noqa: SIM115
        submit(self, request, route)

    patch.setattr(EngineClient, "submit", broken)
