"""vLLM's KV connector interface, handed to the two sides.

vLLM makes one object per side: scheduler and worker.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockRemoved, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvire.connectors.options import SharedStore, store_config
from kvire.connectors.vllm.events import Event
from kvire.connectors.vllm.groups import read_groups
from kvire.connectors.vllm.identity import check_options, facts_of, namespace_of
from kvire.connectors.vllm.messages import Facts, Outcome, StepPlan
from kvire.connectors.vllm.metrics import KvireMetrics, KvireStats
from kvire.connectors.vllm.pages import open_pages
from kvire.connectors.vllm.scheduler import SchedulerSide
from kvire.connectors.vllm.worker import WorkerSide
from kvire.core.tier_kind import TierKind

OWNER = "kvire"  # in KV events
SOURCES = {TierKind.MEMORY: "host", TierKind.DISK: "disk"}  # vLLM's names
OTHER_SOURCE = "external_unspecified"
LEAST_BUFFER_BYTES, MOST_BUFFER_BYTES = 64 << 20, 1 << 30  # for blocks on their way into the tiers
SCHEDULER_BUFFER_BYTES = 1 << 20  # that side saves nothing


class KvirePlan(KVConnectorMetadata):
    """A plan, as vLLM carries it."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan


class KvireOutcome(KVConnectorWorkerMetadata):
    """An outcome, as vLLM carries it."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Of two workers."""
        assert isinstance(other, KvireOutcome)
        return KvireOutcome(self.outcome.merge(other.outcome))


class KvireFacts(KVConnectorHandshakeMetadata):
    """Facts, as vLLM carries them."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts


class KvireConnector(KVConnectorBase_V1, SupportsHMA):
    """One side of the connector.

    Raises ConfigError or UnsupportedModelError at start for unsupported models and options; after
    that no fault of the store fails a request.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        check_options(vllm_config)
        self._groups, self._block_size = read_groups(kv_cache_config)
        self._config = store_config(self._kv_transfer_config.kv_connector_extra_config, "kv_connector_extra_config")
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._shared: SharedStore | None = None
        self._facts: Facts | None = None

    @property
    def requires_kv_delivery(self) -> bool:
        """A block that is not saved is only a later miss."""
        return False

    # The worker's side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Open the store: vLLM made its cache."""
        num_blocks = self._kv_cache_config.num_blocks
        pages = [open_pages([kv_caches[name] for name in group.layers], num_blocks) for group in self._groups]
        self._facts = facts_of(self._vllm_config, self._groups, kv_caches, [one.row_bytes for one in pages])
        step_tokens = self._vllm_config.scheduler_config.max_num_batched_tokens
        step_bytes = sum(self._facts.block_bytes) * (step_tokens // self._block_size + 1)
        self._shared = SharedStore(
            self._config,
            kv_dtype=self._facts.kv_dtype,
            buffer_bytes=min(max(LEAST_BUFFER_BYTES, 2 * step_bytes), MOST_BUFFER_BYTES),
            moves_kv=True,
        )
        self._worker = WorkerSide(self._shared.store, pages, self._vllm_config.parallel_config.rank)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Facts for the scheduler's side, before the first request."""
        return None if self._facts is None else KvireFacts(self._facts)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Start the loads of this step."""
        if self._worker is not None:
            self._worker.begin(self._plan())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No wait: vLLM computes nothing on blocks that are being loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """No work here: whole blocks are saved after all layers."""

    def wait_for_save(self) -> None:
        """Copy out the blocks that this step completed."""
        if self._worker is not None:
            self._worker.save(self._plan().saves)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads that ended.

        A request with a missing block is looked up anew, up to that block: if vLLM were told of
        blocks instead, it would continue to report them as cached.
        """
        results = KVConnectorTransferResults()
        if self._worker is not None:
            results.finished_recving, results.failed_recving = self._worker.finished_loads(finished_req_ids)
        return results

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """The outcome of this step, for the scheduler's side."""
        outcome = self._worker.take_outcome() if self._worker is not None else None
        return None if outcome is None else KvireOutcome(outcome)

    # The scheduler's side

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """The workers are ready: name the namespace, and open the store."""
        facts = [one.facts for _, one in sorted(metadata.items()) if isinstance(one, KvireFacts)]
        namespace = namespace_of(self._vllm_config, facts, self._block_size)
        self._shared = SharedStore(
            self._config, kv_dtype=namespace.kv_dtype, buffer_bytes=SCHEDULER_BUFFER_BYTES, moves_kv=False
        )
        events = self._vllm_config.kv_events_config
        # vLLM has one hash for each block (0.31 does not say)
        hashes = getattr(self._kv_cache_config, "hash_block_size", None) in {None, self._block_size}
        self._scheduler = SchedulerSide(
            self._shared.store,
            self._groups,
            self._block_size,
            namespace=namespace,
            facts=facts[0],
            workers=len(facts),
            probe_s=self._config.load_timeout_s,
            tells=bool(events is not None and events.enable_kv_cache_events and hashes),
        )

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """The tokens that can be loaded, always beside vLLM's steps."""
        tokens = self._side.match(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note the blocks that vLLM allocated for a load."""
        self._side.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """The tiers of the matched tokens."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource  # noqa: PLC0415 - vLLM 0.31 has none, nor asks

        if num_external_tokens == 0:
            return {}
        sources: Counter[Any] = Counter()
        for kind, tokens in self._side.sources(request).items():
            sources[CacheHitSource(SOURCES.get(kind, OTHER_SOURCE))] += tokens
        return dict(sources)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The plan of this step."""
        return KvirePlan(self._side.plan(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        """The step was done."""
        meta = connector_output.kv_connector_worker_meta
        self._side.stepped(meta.outcome if isinstance(meta, KvireOutcome) else None)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:  # noqa: ARG002
        """Give the blocks back to vLLM at once: saved ones were copied."""
        self._side.finished(request)
        return False, None

    def request_finished_all_groups(
        self,
        request: Any,
        block_ids: tuple[list[int], ...],  # noqa: ARG002
    ) -> tuple[bool, dict[str, Any] | None]:
        """As request_finished, for models with several groups."""
        self._side.finished(request)
        return False, None

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Blocks that the store gained or lost, as far as this engine knows."""
        return [self._event(event) for event in self._side.announcer.take()]

    def reset_cache(self) -> bool:
        """Hide all blocks stored so far from this process.

        Other processes, and the next start, still find them.
        """
        self._side.reset()
        return True

    # Both

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Counts since the last call."""
        if self._worker is not None:
            return KvireStats.of(self._worker.take_counts())
        if self._scheduler is not None:
            return KvireStats.of(self._scheduler.take_counts())
        return None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """Stats from another process's message."""
        return KvireStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """The counters, in vLLM's registry."""
        return KvireMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """End loads, write queued blocks, close the store."""
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()
        if self._shared is not None:
            self._shared.close()

    def _event(self, event: Event) -> KVCacheEvent:
        hashes = [maybe_convert_block_hash(event.hash)]
        if not event.came:
            return BlockRemoved(hashes, medium=MEDIUM_STORAGE, group_idx=event.group, ownership=OWNER)
        spec = self._kv_cache_config.kv_cache_groups[event.group].kv_cache_spec
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=None if event.parent is None else maybe_convert_block_hash(event.parent),
            token_ids=list(event.token_ids),
            block_size=self._block_size,
            lora_id=None,
            lora_name=None,
            medium=MEDIUM_STORAGE,
            extra_keys=[(event.cache_salt,)] if event.cache_salt else None,
            group_idx=event.group,
            kv_cache_spec_kind=get_kv_cache_spec_kind(spec).value,
            kv_cache_spec_sliding_window=get_kv_cache_spec_sliding_window(spec),
            ownership=OWNER,
        )

    @property
    def _side(self) -> SchedulerSide:
        assert self._scheduler is not None, "vLLM tells what its workers are like before the first request"
        return self._scheduler

    def _plan(self) -> StepPlan:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, KvirePlan)
        return metadata.plan
