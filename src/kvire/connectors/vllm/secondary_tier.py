"""The store as a secondary tier of vLLM's, as vLLM's tier manager calls it.

vLLM's scheduler thread makes every call, and none waits but `drain_jobs` and `shutdown`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvire.connectors.options import store_config
from kvire.connectors.vllm.groups import Group
from kvire.connectors.vllm.messages import Move
from kvire.connectors.vllm.metrics import COUNTERS
from kvire.connectors.vllm.secondary_requests import Requests
from kvire.connectors.vllm.secondary_transfers import Job, Primary, Transfers
from kvire.core.config import StoreConfig
from kvire.core.errors import ConfigError
from kvire.core.keys import Namespace
from kvire.plan.cost import PrefillSpeed
from kvire.store.open import open_store
from kvire.store.reuse.look import Part
from kvire.store.reuse.planner import Reuse
from kvire.store.reuse.probe import Probe
from kvire.store.tiered import TieredStore

COUNTED = (
    "excluded_requests", "slower_tokens", "loaded_blocks", "loaded_bytes", "load_seconds", "failed_blocks",
    "saved_blocks", "saved_bytes", "dropped_blocks", "refused_writes", "unavailable", "damaged",
)  # fmt: skip


class KvireTier(SecondaryTierManager):
    """The store as a secondary tier of vLLM's.

    options: as in docs/vllm.md; raises ConfigError for wrong ones.

    It works from `begin` on. After that no fault of the store fails a request: missing, damaged,
    slow and evicted blocks are misses.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        connector: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        if connector is None:
            raise ConfigError(
                "KvireTier has to know which weights and token ids KV belongs to, and vLLM's OffloadingConnector does "
                'not tell: set "kv_connector":"KvireOffloadingConnector" and "kv_connector_module_path":'
                '"kvire.connectors.vllm.secondary" in --kv-transfer-config'
            )
        self._config = tier_config(options)
        self._primary = Primary(primary_kv_view)
        self._store: TieredStore | None = None
        self._probe: Probe | None = None
        self._jobs: dict[int, tuple[TransferJob, list[OffloadKey]]] = {}  # with the keys whose blocks move

    def begin(self, namespace: Namespace, *, groups: Sequence[Group], prefill: PrefillSpeed, buffer_bytes: int) -> None:
        """Open the store. Raises StoreError or ConfigError.

        namespace: of the workers' KV.
        groups: vLLM's.
        prefill: as the connector measures it.
        buffer_bytes: for blocks on their way into the store.
        """
        spec = self._offloading_spec
        self._store = open_store(self._config, namespace.kv_dtype, buffer_bytes=buffer_bytes)
        self._transfers = Transfers(self._store, self._primary)
        chunk_tokens = spec.tokens_per_block[0] * spec.blocks_per_chunk
        reuse = Reuse(
            self._store,
            replace(namespace, block_size=chunk_tokens, shard=f"{namespace.shard} in {row_layout(spec)}"),
            [Part(self._primary.row_bytes, group.window) for group in groups],
            chunk_tokens,
            prefill=prefill,
        )
        if self._store.remote_speed() is not None:
            self._probe = Probe(reuse, self._config.load_timeout_s)
        self._requests = Requests(reuse, self._probe)

    def meet(self, request: Any) -> None:
        """A new request, before vLLM asks for its blocks."""
        self._requests.meet(request)

    def begins(self, request_id: str, device_tokens: int) -> None:
        """A request's blocks are about to be looked up, after the device's own."""
        self._requests.begins(request_id, device_tokens)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:  # noqa: ARG002
        """Keep blocks as they are computed."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Its blocks were used."""
        self._requests.finished(req_context.req_id)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """From the local tiers' indexes at once; RETRY while a remote tier is asked."""
        record = self._requests.record(key, req_context)
        found = False if record is None else self._requests.has(record, req_context.req_id)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Bring rows into the store."""
        self._transfers.save(self._job(job_metadata))

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Bring blocks into rows."""
        self._transfers.load(self._job(job_metadata))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that ended. A block that did not arrive becomes a miss for its request."""
        return [self._result(job) for job in self._transfers.finished()]

    def drain_jobs(self) -> None:
        """Wait for all jobs. vLLM calls it when its caches are reset; blocks stored before are no
        longer found.
        """
        self._transfers.drain()
        self._requests.reset()

    def shutdown(self) -> None:
        """Close the store; no row is touched afterwards. Idempotent."""
        self._primary.close()
        if self._store is not None:
            self._transfers.close()
            if self._probe is not None:
                self._probe.close()
            self._store.close()

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:  # noqa: ARG003
        """The counters of get_stats, for vLLM's registry."""
        labels = {name: COUNTERS[name].label for name in COUNTED}
        return {
            metric_name(name): OffloadingCounterMetadata(
                documentation=COUNTERS[name].text, labelnames=(label,) if label else ()
            )
            for name, label in labels.items()
        }

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Counts since the last call."""
        counts = self._transfers.take_counts() + self._requests.counts
        self._requests.counts.clear()
        stats = OffloadingConnectorStats()
        for (name, label), amount in counts.items():
            if amount:
                stats.increase_counter(metric_name(name), amount, (label,) if COUNTERS[name].label else ())
        return stats

    def _job(self, given: TransferJob) -> Job:
        """The blocks of a job that the store may have or get."""
        keys, moves = [], []
        for key, row in zip(given.keys, given.chunk_ids, strict=True):
            record = self._requests.record(key, given.req_context)
            if record is not None:
                keys.append(key)
                moves.append(Move(record, int(row)))
        self._jobs[given.job_id] = given, keys
        return Job(given.job_id, moves, self._requests.patience_s(given.req_context.req_id))

    def _result(self, job: Job) -> JobResult:
        given, keys = self._jobs.pop(job.number)
        done = [key for key, is_done in zip(keys, job.done, strict=True) if is_done]
        if given.is_promotion:
            lost = [move.record.id for move, is_done in zip(job.moves, job.done, strict=True) if not is_done]
            self._requests.failed(given.req_context.req_id, lost)
            success = len(done) == len(given.keys)
        else:
            success = all(job.done)
        return JobResult(
            job_id=given.job_id,
            success=success,
            successful_keys=done,
            transfer_time=job.seconds,
            transfer_bytes=len(done) * self._primary.row_bytes,
        )


def tier_config(options: Mapping[str, Any]) -> StoreConfig:
    """The store that a tier's options ask for. Raises ConfigError."""
    if "ram" in options:
        raise ConfigError(
            "KvireTier stands behind vLLM's memory tier: give it the memory, by cpu_bytes_to_use, not ram"
        )
    return store_config(options, "the options of KvireTier in secondary_tiers")


def row_layout(spec: Any) -> str:
    """How vLLM puts the workers' shares into a row of its CPU tier."""
    config = spec.config
    return (
        f"cpu_tier row={spec.kv_bytes_per_chunk} chunk={spec.blocks_per_chunk} "
        f"workers={config.parallel.world_size}x{spec.cpu_page_size_per_worker} replicated={spec.replicated_layout} "
        f"canonical={config.canonical_layout} layout={config.kv_cache_layout}"
    )


def metric_name(name: str) -> str:
    """In vLLM's registry."""
    return f"vllm:kvire_tier_{name}"
