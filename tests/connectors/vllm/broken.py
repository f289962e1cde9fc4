"""Deliberately broken builds of the vLLM connector; the claims of this folder must notice each.

As in harness/mutants.py, a mutant patches one function of Kvire for the length of a test.
"""

from dataclasses import replace
from math import inf

import pytest

from kvire.connectors.vllm.fetch import Fetcher
from kvire.connectors.vllm.scheduler import SchedulerSide
from kvire.connectors.vllm.worker import WorkerSide
from kvire.core.keys import BlockKey, Namespace
from kvire.store.loader import Loader
from kvire.store.reuse.chain import Names
from kvire.store.reuse.planner import Reuse
from kvire.store.reuse.probe import Probe


def salt_dropped(patch: pytest.MonkeyPatch) -> None:
    """A request's cache_salt is lost on the way to the store."""
    of = Names.of
    patch.setattr(Names, "of", lambda self, tenant="", cache_salt="": of(self, tenant))


def keys_from_the_builtin_hash(patch: pytest.MonkeyPatch) -> None:
    """Keys are hashes of Python's own, which differ from process to process."""
    digest = lambda parent, tokens: BlockKey(hash((parent, tuple(tokens))).to_bytes(8, "little", signed=True) * 4)
    patch.setattr("kvire.core.keys.block_key", digest)


def weights_are_known_by_name(patch: pytest.MonkeyPatch) -> None:
    """The digest of the weights is no part of the namespace."""
    patch.setattr("kvire.connectors.identity.weights_digest", lambda files: "")


def layouts_are_told_apart_by_size(patch: pytest.MonkeyPatch) -> None:
    """Dtype, order and version of the bytes are no part of the namespace."""

    def broken(self, salt):
        return replace(self, salt=salt, kv_dtype="", spec="", numerics="", layout_version=0)

    patch.setattr(Namespace, "with_salt", broken)


def foreign_blocks_are_not_told(patch: pytest.MonkeyPatch) -> None:
    """Nobody asks whether another engine has stored it."""
    patch.setattr(Reuse, "why", lambda self, chain, index, prompt_tokens: None)


def failed_loads_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    """What could not be loaded is looked for again as if nothing had been."""
    stepped = SchedulerSide.stepped

    def broken(self, outcome):
        if outcome is not None:
            outcome.failed.clear()
        stepped(self, outcome)

    patch.setattr(SchedulerSide, "stepped", broken)


def missing_blocks_count_as_loaded(patch: pytest.MonkeyPatch) -> None:
    """A load that ended counts as one that brought everything."""
    load_piece = WorkerSide._load_piece

    def broken(self, pages, moves, cancelled, deadline):
        load_piece(self, pages, moves, cancelled, deadline)
        return len(moves)

    patch.setattr(WorkerSide, "_load_piece", broken)


def remotes_are_waited_for(patch: pytest.MonkeyPatch) -> None:
    """A remote tier has a minute to say what it has."""
    patch.setattr(Probe, "__init__", _with_a_minute(Probe.__init__))


def _with_a_minute(init):
    return lambda self, reuse, timeout_s: init(self, reuse, 60.0)


def whole_prompts_are_loaded(patch: pytest.MonkeyPatch) -> None:
    """No token is left to compute."""
    match = SchedulerSide.match

    class Longer:
        def __init__(self, request) -> None:
            self._request = request
            self.num_tokens = request.num_tokens + 1

        def __getattr__(self, name):
            return getattr(self._request, name)

    def broken(self, request, num_computed_tokens):
        self._track(request)
        return match(self, Longer(request), num_computed_tokens)

    patch.setattr(SchedulerSide, "match", broken)


def drafts_count_as_computed(patch: pytest.MonkeyPatch) -> None:
    """A block that drafts fill is done with, whether or not they are accepted."""
    patch.setattr(SchedulerSide, "_full_blocks", lambda self, tracked, stop_tokens: stop_tokens // self._block_size)


def memory_is_reused_under_a_read(patch: pytest.MonkeyPatch) -> None:
    """The next load goes into memory to which a read that was given up may still write."""
    fetch = Fetcher.fetch

    def broken(self, records, given_up, deadline, **how):
        memory = self._rows(len(records), records[0].kv_bytes).reshape(-1)
        fetched = fetch(self, records, given_up, deadline, **how)
        self._memory.rows = memory
        return fetched

    patch.setattr(Fetcher, "fetch", broken)


def late_bytes_go_to_the_callers_memory(patch: pytest.MonkeyPatch) -> None:
    """A remote tier reads into the memory that was asked for, whoever has it by then."""

    def broken(self, inflight):
        [first] = self._begin([inflight], inflight.number)
        if first is None:
            return
        level = self._remote[inflight.number]
        if (failure := self._fetch(level, inflight.record, first.out, None)) is None:
            self._deliver([(inflight, bytearray(first.out))], inflight.number, level)
        else:
            self._ask_next(inflight, inflight.number, failure)

    patch.setattr(Loader, "_read_remote", broken)


def cancelled_loads_are_over_at_once(patch: pytest.MonkeyPatch) -> None:
    """vLLM is told that nobody writes to a request's blocks any more while a thread still may."""
    finished_loads = WorkerSide.finished_loads

    def broken(self, over):
        over = set(over)
        ended, failed = finished_loads(self, over)
        early = over & set(self._loading)
        for request_id in early:
            del self._loading[request_id]
        return ended | early, failed

    patch.setattr(WorkerSide, "finished_loads", broken)


def any_bytes_will_do(patch: pytest.MonkeyPatch) -> None:
    """What a tier gives is not verified: it counts as the block that was asked for."""
    fetch = Loader._fetch

    def broken(self, level, record, kv, timeout_s):
        failure = fetch(self, level, record, kv, timeout_s)
        return None if failure is not None and failure.reason == "damaged" else failure

    patch.setattr(Loader, "_fetch", broken)


def loads_are_waited_for_whatever_computing_takes(patch: pytest.MonkeyPatch) -> None:
    """A tier that was fast and hangs now holds a request up until the load is given up as dead."""
    fetch = Fetcher.fetch
    patch.setattr(
        Fetcher, "fetch", lambda self, records, given_up, _, **how: fetch(self, records, given_up, inf, **how)
    )
