"""What vLLM does to a connector, in small: its scheduler's rules over real pages, without a model.

The rules are those of vLLM 0.32 (v1/core/sched/scheduler.py): lookups only for requests without computed tokens, blocks
allocated before a load and given to nobody while it runs, failed loads looked up anew, preemption that forgets all,
drafts whose KV is overwritten, blocks that are given back keep their content until somebody else needs them. KV of a
token is a function of all tokens up to it, so that `forward` can check everything that attention would read.
"""

import random
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from harness import waiting

from kvire.connectors.vllm.groups import Group
from kvire.connectors.vllm.messages import Facts
from kvire.connectors.vllm.pages import open_pages
from kvire.connectors.vllm.scheduler import NULL_BLOCK, SchedulerSide
from kvire.connectors.vllm.worker import WorkerSide
from kvire.core.keys import Namespace
from kvire.core.spec import first_needed
from kvire.store.tiered import TieredStore

TOKENS = 4  # of a block
HEADS, WIDTH = 2, 3
BLOCK_BYTES = 2 * HEADS * TOKENS * WIDTH * 8  # of two layers in float64
FULL = (Group(("layer.0", "layer.1"), "full", None),)
MIXED = (*FULL, Group(("layer.2",), "sliding", 7))
NAMESPACE = Namespace("weights", "config", "test", "float64", "test", TOKENS)


@dataclass(eq=False)
class Request:
    """As much of vLLM's Request as the connector reads, and where the small engine keeps it."""

    request_id: str
    all_token_ids: list[int]
    cache_salt: str | None = None
    num_computed_tokens: int = 0
    state: str = "waiting"
    tables: list[list[int]] = field(default_factory=list)
    cached_tokens: int | None = None
    stored_tokens: int = 0
    mm_features: tuple[Any, ...] = ()
    prompt_embeds: None = None
    lora_request: None = None

    def __post_init__(self) -> None:
        self.num_prompt = len(self.all_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


class SmallEngine:
    """One scheduler and one worker over `store`."""

    def __init__(
        self,
        store: TieredStore,
        groups: tuple[Group, ...] = FULL,
        *,
        blocks: int = 64,
        seed: int = 0,
        namespace: Namespace = NAMESPACE,
        probe_s: float = waiting.PATIENCE_S,
    ) -> None:
        self.random = random.Random(seed)
        self.groups = groups
        self.tensors = [
            [torch.zeros(blocks, HEADS, TOKENS, WIDTH, dtype=torch.float64) for _ in group.layers] for group in groups
        ]
        pages = [open_pages(layers, blocks) for layers in self.tensors]
        facts = Facts("test", "float64", "test", tuple(one.row_bytes for one in pages))
        self.scheduler = SchedulerSide(store, groups, TOKENS, namespace=namespace, facts=facts, probe_s=probe_s)
        self.worker = WorkerSide(store, pages)
        self.free = list(range(1, blocks))  # 0 is vLLM's null block; oldest first
        self.cached: dict[tuple[int, tuple[int, ...]], int] = {}  # (group, all tokens up to its end) -> block
        self.users: dict[int, int] = {}
        self.requests: dict[str, Request] = {}
        self.ended: set[str] = set()

    def add(self, request: Request) -> Request:
        self.requests[request.request_id] = request
        return request

    def run(self, request: Request, answer: int = 3, drafts: int = 0) -> Request:
        """Until it has so many new tokens, and is over."""
        self.add(request)
        end = time.monotonic() + waiting.PATIENCE_S
        while request.num_tokens < request.num_prompt + answer:
            assert time.monotonic() < end, f"request {request.request_id} never ended: {request.state}"
            self.step(drafts=drafts)
        self.finish(request)
        self.step()
        return request

    def step(self, budget: int = 12, drafts: int = 0) -> None:
        """Schedule, compute, and take notice of what the worker says."""
        scheduled: dict[Request, int] = {}
        for request in list(self.requests.values()):
            if request.state == "waiting" and budget:
                self._admit(request)
            if request.state != "running" or not budget:
                continue
            count = min(budget, request.num_tokens - request.num_computed_tokens)
            extra = min(drafts, budget - count) if count == 1 else 0
            if not self._grow(request, request.num_computed_tokens + count + extra, request.num_computed_tokens):
                self._preempt(request)
                continue
            scheduled[request] = count + extra
            budget -= count + extra
        output = SimpleNamespace(
            num_scheduled_tokens={r.request_id: n for r, n in scheduled.items()},
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_spec_decode_tokens={
                r.request_id: [0] * extra
                for r, n in scheduled.items()
                if (extra := r.num_computed_tokens + n - r.num_tokens) > 0
            },
            kv_connector_block_state=SimpleNamespace(get_block_ids=lambda name: self.requests[name].tables),
        )
        plan = self.scheduler.plan(output)
        for request, count in scheduled.items():
            self._forward(request, count)
        self.worker.begin(plan)
        self.worker.save(plan.saves)
        received, failed = self.worker.finished_loads(self.ended)
        self.ended = set()
        for request, count in scheduled.items():
            request.num_computed_tokens = min(request.num_computed_tokens + count, request.num_tokens)
            self._remember(request)
            if request.num_computed_tokens == request.num_tokens:
                request.all_token_ids += [
                    self.random.randrange(50) for _ in range(1 + self.random.randrange(drafts + 1))
                ]
        self._received(received, failed)
        self.scheduler.stepped(self.worker.take_outcome())

    def finish(self, request: Request) -> None:
        """It is done, or was given up."""
        self.scheduler.finished(request)
        self.ended.add(request.request_id)
        if request.state == "loading":
            request.state = "gone"  # its blocks go when the worker says that nothing writes there any more
        else:
            self._release(request)
            del self.requests[request.request_id]

    def close(self) -> None:
        self.worker.close()
        self.scheduler.close()

    def _received(self, received: set[str], failed: set[str]) -> None:
        for name in received:
            request = self.requests[name]
            if request.state == "gone":
                self._release(request)
                del self.requests[name]
                continue
            request.state = "waiting"
            if name in failed:
                self._release(request)
                request.num_computed_tokens = 0
            else:
                self._remember(request)
                request.state = "running"

    def _admit(self, request: Request) -> None:
        local = self._local_hit(request)
        stored = self.scheduler.match(request, local)
        if stored is None:
            return
        hit = [[self.cached[number, tuple(request.all_token_ids[: (i + 1) * TOKENS])]
                if i >= first_needed(group.window, local, TOKENS) else NULL_BLOCK for i in range(local // TOKENS)]
               for number, group in enumerate(self.groups)]  # fmt: skip
        self._use([block for table in hit for block in table])
        request.tables = hit
        if not self._grow(request, local + stored + (0 if stored else 1), local + stored):
            self._release(request)
            return
        request.cached_tokens, request.stored_tokens = local, stored
        request.num_computed_tokens = local + stored
        request.state = "loading" if stored else "running"
        self.scheduler.allocated(request, request.tables, stored)

    def _local_hit(self, request: Request) -> int:
        """Tokens of the longest prefix that every group has on the device."""
        for stop in range((request.num_tokens - 1) // TOKENS, 0, -1):
            needed = (
                (number, tuple(request.all_token_ids[: (i + 1) * TOKENS]))
                for number, group in enumerate(self.groups)
                for i in range(first_needed(group.window, stop * TOKENS, TOKENS), stop)
            )
            if request.cache_salt is None and all(name in self.cached for name in needed):
                return stop * TOKENS
        return 0

    def _grow(self, request: Request, tokens: int, computed: int) -> bool:
        """Blocks for so many tokens; none for what a window has left when `computed` are there."""
        request.tables = request.tables or [[] for _ in self.groups]
        for group, table in zip(self.groups, request.tables, strict=True):
            left = first_needed(group.window, computed, TOKENS)
            self._unuse(table[:left])
            table[:left] = [NULL_BLOCK] * left
        missing = [-(-tokens // TOKENS) - len(table) for table in request.tables]
        if sum(max(0, n) for n in missing) > len(self.free):
            return False
        for table, count in zip(request.tables, missing, strict=True):
            new = [self.free.pop(0) for _ in range(max(0, count))]
            self.cached = {name: block for name, block in self.cached.items() if block not in new}
            for block in new:
                self.users[block] = 1
                for layers in self.tensors:
                    for tensor in layers:
                        tensor[block] = -1
            table.extend(new)
        return True

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.num_computed_tokens = 0
        request.state = "waiting"

    def _release(self, request: Request) -> None:
        for table in request.tables:
            self._unuse(reversed(table))
        request.tables = []

    def _use(self, blocks: list[int]) -> None:
        for block in blocks:
            if block != NULL_BLOCK:
                if block in self.free:
                    self.free.remove(block)
                self.users[block] = self.users.get(block, 0) + 1

    def _unuse(self, blocks: Any) -> None:
        for block in blocks:
            if block != NULL_BLOCK:
                self.users[block] -= 1
                if self.users[block] == 0:
                    self.free.append(block)

    def _remember(self, request: Request) -> None:
        for number, table in enumerate(request.tables):
            for index in range(request.num_computed_tokens // TOKENS):
                if table[index] != NULL_BLOCK and request.cache_salt is None:
                    self.cached.setdefault((number, tuple(request.all_token_ids[: (index + 1) * TOKENS])), table[index])

    def _forward(self, request: Request, count: int) -> None:
        """Check what attention would read, then write KV of the next tokens, made-up drafts included."""
        tokens = request.all_token_ids + [99] * count
        start = request.num_computed_tokens
        for number, group in enumerate(self.groups):
            first = 0 if group.window is None else max(0, start - group.window + 1)
            for layer, tensor in enumerate(self.tensors[number]):
                for position in range(first, start + count):
                    slot = tensor[request.tables[number][position // TOKENS]][:, position % TOKENS]
                    if position >= start:
                        slot.copy_(kv(tokens, position, number, layer))
                    assert torch.equal(slot, kv(tokens, position, number, layer)), (request.request_id, position)


def kv(tokens: list[int], position: int, group: int, layer: int) -> torch.Tensor:
    """KV of one token: [heads, width], a function of every token up to it."""
    seed = hash((tuple(tokens[: position + 1]), group, layer)) & 0xFFFFFFFF
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((HEADS, WIDTH)))
