"""Deliberately broken builds of what joins engine and store; tests of the engine over stores must
notice each.

As in mutants.py, a mutant patches one function of Kvire for the length of a test.
"""

from dataclasses import replace

import pytest
import torch
import transformers

from kvire.core import keys
from kvire.core.keys import Namespace
from kvire.core.report import MissReason
from kvire.core.tier_kind import TierKind
from kvire.engine import build as build_module
from kvire.engine import prefetch as prefetch_module
from kvire.engine import scheduler as scheduler_module
from kvire.engine.engine import Engine
from kvire.engine.prefetch import Prefetcher
from kvire.engine.scheduler import Scheduler
from kvire.models import fingerprint, loader
from kvire.plan.cost import Way
from kvire.store.handle import TierHandle
from kvire.store.reuse import look as look_module
from kvire.store.reuse import planner as planner_module
from kvire.store.reuse.chain import Names
from kvire.store.reuse.load import Load
from kvire.store.reuse.planner import Reuse
from kvire.store.reuse.reused import Reused
from kvire.store.ticket import LoadState
from kvire.store.tiered import TieredStore


def taken_over_before_the_read_ends(patch: pytest.MonkeyPatch) -> None:
    """A block counts as loaded while it is being read."""

    def broken(self, indices):
        done = (LoadState.READY, LoadState.READING)
        places = [self._at.get(index) for index in indices]
        return all(found and all(self.ticket.state(place) in done for place in found) for found in places)

    patch.setattr(Load, "_is_ready", broken)
    patch.setattr(Load, "source", lambda self, index: TierKind.DISK)


def front_jumps_over_a_hole(patch: pytest.MonkeyPatch) -> None:
    """What is loaded further back counts although something before it is missing."""

    def broken(self, index):
        ready = [at for at in self._at if at >= index and self._is_ready((at,))]
        return max(ready) + 1 if ready else index

    source = Load.source

    def any_source(self, index):
        return source(self, index) if self._is_ready((index,)) else source(self, self.frontier(index) - 1)

    patch.setattr(Load, "frontier", broken)
    patch.setattr(Load, "source", any_source)


def computed_blocks_are_still_read(patch: pytest.MonkeyPatch) -> None:
    """Nobody tells the load which blocks are computed instead."""
    patch.setattr(Load, "claim", lambda self, index, stop: stop)


def memory_given_back_under_a_read(patch: pytest.MonkeyPatch) -> None:
    """Who leaves during a load gives its blocks back at once."""
    patch.setattr(Load, "is_quiet", lambda self, within_s: True)


def memory_given_back_before_a_copy(patch: pytest.MonkeyPatch) -> None:
    """Memory is free when nothing is read into it just now, though something will be
    copied there.
    """

    def broken(self):
        for lease, ticket in self.draining:
            if not ticket.active:
                lease.release()
        self.draining = [(lease, ticket) for lease, ticket in self.draining if not lease.released]

    patch.setattr(Prefetcher, "poll", broken)


def copies_wait_for_the_next_step(patch: pytest.MonkeyPatch) -> None:
    """Loads begin while blocks are still to be copied."""
    run, copies = Engine.run, []

    def broken(self, chunks):
        for copy in copies:
            self.paged.copy_block(*copy)
        copies.clear()
        return run(self, chunks)

    patch.setattr(Scheduler, "_copy", lambda self, more: copies.extend(more))
    patch.setattr(Engine, "run", broken)


def memory_is_given_back_at_the_next_request(patch: pytest.MonkeyPatch) -> None:
    """An engine without requests does not look whether reads have ended."""
    patch.setattr(Scheduler, "has_work", property(lambda self: bool(self.running or self.waiting)))
    patch.setattr(prefetch_module, "QUIET_S", 0.0)


def dead_reads_are_waited_for(patch: pytest.MonkeyPatch) -> None:
    """As long as something may come, nothing is computed."""

    def broken(self, front_tokens, block_size, prefill, most_tokens):
        return 0 if self._missing(self.ticket.states(), front_tokens // block_size) else most_tokens

    patch.setattr(Load, "chunk_tokens", broken)


def salt_dropped(patch: pytest.MonkeyPatch) -> None:
    """The tenant is no part of the keys."""
    patch.setattr(Namespace, "with_salt", lambda self, salt: self)


def cache_salt_dropped(patch: pytest.MonkeyPatch) -> None:
    """What separates requests within a tenant is lost on the way to the store."""
    of = Names.of
    patch.setattr(Names, "of", lambda self, tenant="", cache_salt="": of(self, tenant))


def weights_are_known_by_name(patch: pytest.MonkeyPatch) -> None:
    """Neither the digest of the weights nor what is looked at of them in memory is part of the
    namespace.
    """
    namespace = build_module.namespace
    patch.setattr(build_module, "namespace", lambda **parts: namespace(**(parts | {"weights": ""})))
    patch.setattr(loader, "loaded_state", lambda model: "")


def software_is_not_named(patch: pytest.MonkeyPatch) -> None:
    """A namespace does not say what computed."""
    patch.setattr(build_module, "computed_by", lambda *_: "")


def software_is_known_by_its_versions(patch: pytest.MonkeyPatch) -> None:
    """Whatever calls itself by the same number counts as the same."""
    versions = f"torch {torch.__version__} transformers {transformers.__version__}"
    patch.setattr(build_module, "computed_by", lambda *_: versions)


def loading_is_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    """Only code counts, not the numbers that it computes with."""
    patch.setattr(loader, "loaded_state", lambda model: "")


def precision_is_not_named(patch: pytest.MonkeyPatch) -> None:
    """How many bits float32 products have is nobody's business."""
    patch.setattr(build_module, "matmul_precision", lambda device_type: "")


def rotary_is_inert(patch: pytest.MonkeyPatch) -> None:
    """The settings of the rotary embedding are left out of the config's digest."""
    patch.setattr(fingerprint, "INERT_FIELDS", fingerprint.INERT_FIELDS | {"rope_parameters", "rope_theta"})


def forgotten_salts_are_remembered(patch: pytest.MonkeyPatch) -> None:
    """A tenant's identity is looked up once."""
    of = Names.of

    def broken(self, tenant="", cache_salt=""):
        return self._known.get((tenant, cache_salt)) or of(self, tenant, cache_salt)

    patch.setattr(Names, "of", broken)


def saved_before_it_is_computed(patch: pytest.MonkeyPatch) -> None:
    """Blocks go to the store as soon as they are allocated."""
    start = Scheduler._start

    def broken(self, seq, *rest, **options):
        started = start(self, seq, *rest, **options)
        if started:
            keys = seq.chain.extend()
            held = min(len(lease) for lease in seq.lease.leases)
            self.prefetcher.save(seq, range(seq.num_published, min(len(keys), held)))
        return started

    patch.setattr(Scheduler, "_start", broken)


def _with_memory(patch: pytest.MonkeyPatch, name: str, moved) -> None:
    """In the prefetcher's method `name`, the memory of a block is that of moved(lease, index,
    group).
    """
    method, memory_of = getattr(Prefetcher, name), Prefetcher._memory_of

    def broken(self, seq, *arguments):
        memory = memory_of(self, seq)
        self._memory_of = lambda seq: lambda index, group: memory(*moved(seq.lease, index, group))
        try:
            return method(self, seq, *arguments)
        finally:
            del self._memory_of

    patch.setattr(Prefetcher, name, broken)


def neighbour_saved(patch: pytest.MonkeyPatch) -> None:
    """Under a block's key goes what is in the block before it."""
    _with_memory(patch, "save", lambda lease, index, group: (max(0, index - 1), group))


def block_saved_before_saved_again(patch: pytest.MonkeyPatch) -> None:
    """A copy comes one block late, whoever was saved before."""
    save = TieredStore.save

    def broken(self, record, kv):
        late, self.__dict__["late"] = self.__dict__.get("late", bytes(kv)), bytes(kv)
        return save(self, record, memoryview(late))

    patch.setattr(TieredStore, "save", broken)


def stored_blocks_grow(patch: pytest.MonkeyPatch) -> None:
    """The block that an answer goes on in is written over the stored one before it."""
    advance = Scheduler.advance

    def broken(self, chunk):
        advance(self, chunk)
        seq, reuse = chunk.seq, self.prefetcher.reuse
        if seq.num_published and len(seq.lease.leases[0]) > seq.num_published:
            index = seq.num_published - 1
            memory = self.prefetcher._memory_of(seq)
            reuse.save(seq.chain, [index], lambda index, group: memory(index + 1, group))

    patch.setattr(Scheduler, "advance", broken)
    patch.setattr(TierHandle, "needs", lambda self, ids: [True] * len(ids))


def keys_from_the_builtin_hash(patch: pytest.MonkeyPatch) -> None:
    """Keys are hashes of Python's own, which differ from process to process."""
    digest = lambda parent, token_ids: hash((parent, tuple(token_ids))).to_bytes(8, "little", signed=True) * 4
    patch.setattr(keys, "block_key", digest)
    patch.setattr(scheduler_module, "block_key", digest)


def loaded_into_the_neighbour(patch: pytest.MonkeyPatch) -> None:
    """Blocks are loaded in order into memory that is not."""

    def moved(lease, index, group):
        blocks = lease.leases[group].blocks
        return (index ^ 1 if (index ^ 1) < len(blocks) and blocks[index ^ 1] is not None else index), group

    _with_memory(patch, "start", moved)


def groups_mixed_up(patch: pytest.MonkeyPatch) -> None:
    """One group's blocks are saved as the other's."""

    def moved(lease, index, group):
        other = len(lease.leases) - 1 - group
        return index, other if lease.leases[other].blocks[index] is not None else group

    _with_memory(patch, "save", moved)


def window_loaded_one_block_short(patch: pytest.MonkeyPatch) -> None:
    """The first block that a window touches is not loaded."""
    first_needed = look_module.first_needed

    def broken(window, position, block_size):
        return first_needed(window, position, block_size) + (window is not None)

    patch.setattr(look_module, "first_needed", broken)


def parts_of_windows_are_taken(patch: pytest.MonkeyPatch) -> None:
    """With windows, too, the front jumps once the last block has come."""

    def broken(self, index):
        return self.stop if self._is_ready((self.stop - 1,)) else index

    patch.setattr(Load, "frontier", broken)
    patch.setattr(Load, "source", lambda self, index: TierKind.DISK)


def failed_requests_stay_stored(patch: pytest.MonkeyPatch) -> None:
    """What a request with numbers that are not finite computed is kept."""
    patch.setattr(Reuse, "discard", lambda self, keys: None)


def everything_is_kept(patch: pytest.MonkeyPatch) -> None:
    """A request says that nothing of it may be kept, and nobody listens."""
    save = Prefetcher.save

    def broken(self, seq, indices):
        seq.request = replace(seq.request, store=True)
        save(self, seq, indices)

    patch.setattr(Prefetcher, "save", broken)


def loaded_tokens_counted_twice(patch: pytest.MonkeyPatch) -> None:
    """Each block from the store is reported twice."""
    take_over = Prefetcher.take_over

    def broken(self, seq):
        before = seq.reuse.loaded_tokens.copy()
        jumped = take_over(self, seq)
        seq.reuse.loaded_tokens += seq.reuse.loaded_tokens - before
        return jumped

    patch.setattr(Prefetcher, "take_over", broken)


def loaded_tokens_counted_again_after_preemption(patch: pytest.MonkeyPatch) -> None:
    """What a preempted sequence had computed itself counts as reused when it comes back from the
    store.
    """
    take_over = Prefetcher.take_over

    def broken(self, seq):
        most, seq.most_computed = seq.most_computed, 0
        jumped = take_over(self, seq)
        seq.most_computed = max(most, seq.most_computed)
        return jumped

    patch.setattr(Prefetcher, "take_over", broken)


def one_end_only(patch: pytest.MonkeyPatch) -> None:
    """Where both at once would be fastest, everything is computed."""
    choose = planner_module.choose

    def broken(*arguments, **options):
        choice = choose(*arguments, **options)
        return replace(choice, way=Way.COMPUTE) if choice.way is Way.BOTH else choice

    patch.setattr(planner_module, "choose", broken)


def preempted_sequences_never_load(patch: pytest.MonkeyPatch) -> None:
    """Whoever lost its blocks computes them again."""
    preempt = Scheduler.preempt

    def broken(self, seq):
        seq.reuse.may_load = False
        preempt(self, seq)

    patch.setattr(Scheduler, "preempt", broken)


def loads_wait_for_a_seat(patch: pytest.MonkeyPatch) -> None:
    """Nothing is loaded for a request that is queued."""
    patch.setattr(prefetch_module, "MAX_PREPARED", 0)


def everybody_loads_alone(patch: pytest.MonkeyPatch) -> None:
    """Requests with one prefix do not wait for each other."""
    patch.setattr(Scheduler, "_last_in_computation", lambda self, keys: None)


def misses_are_not_explained(patch: pytest.MonkeyPatch) -> None:
    """The store is never asked why."""
    patch.setattr(Reused, "why", lambda self: self.miss)


def failures_of_loads_are_not_told(patch: pytest.MonkeyPatch) -> None:
    """A damaged block and a dead tier look like a prompt that nobody had."""
    patch.setattr(Prefetcher, "_missed", lambda self, seq, index, reason: None)


def every_failure_is_slowness(patch: pytest.MonkeyPatch) -> None:
    """Whatever was wrong with a tier, it is called slow."""
    missed = Prefetcher._missed
    patch.setattr(Prefetcher, "_missed", lambda self, seq, index, _: missed(self, seq, index, MissReason.SLOWER))


def waiting_is_not_taken_off(patch: pytest.MonkeyPatch) -> None:
    """Time saved is told without the time that the load took."""
    patch.setattr(Load, "note_waiting", lambda self, *, waits: setattr(self, "waited_s", -1e4))
