"""Metrics for Prometheus.

Counts and times only: no text, no token, no path that a client made up.
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvire.core.report import MissReason
from kvire.core.tier_kind import every_kind
from kvire.engine.client import EngineClient
from kvire.store.tiered import HandleStats, StoreStats

TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TPOT_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """The metrics of one app, in a registry of their own: two servers in a process share none."""

    def __init__(self, client: EngineClient, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(client, model_name))
        self.ttft_s = Histogram(
            "kvire_ttft_seconds", "From a request's submission to its first token.", buckets=TTFT_BUCKETS_S,
            registry=self._registry,
        )  # fmt: skip
        self.tpot_s = Histogram(
            "kvire_tpot_seconds", "Per token after the first.", buckets=TPOT_BUCKETS_S, registry=self._registry
        )
        self.requests = Counter(
            "kvire_http_requests", "Answered HTTP requests.", ("route", "status"), registry=self._registry
        )

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self._registry)


class EngineCollector(Collector):
    """Reads the engine's own counters when asked; they only grow, so reading needs no lock."""

    def __init__(self, client: EngineClient, model_name: str) -> None:
        self._client = client
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """All families."""
        yield from self._tokens()
        yield from self._cache()
        yield from self._load()
        yield from store_metrics(self._client.engine.reuse.stats())

    def _tokens(self) -> Iterator[Metric]:
        stats = self._client.engine.stats
        by_source = CounterMetricFamily(
            "kvire_prompt_tokens", "Prompt tokens by source of their KV.", labels=["source"]
        )
        by_source.add_metric(["device"], stats.device_tokens)
        for kind, tokens in every_kind(stats.loaded_tokens).items():
            by_source.add_metric([kind], tokens)
        by_source.add_metric(["computed"], stats.computed_tokens)
        yield by_source
        yield CounterMetricFamily("kvire_generated_tokens", "Tokens of answers.", stats.generated_tokens)
        saved = "What computing the reused tokens would have taken, less what was waited for them."
        yield GaugeMetricFamily("kvire_saved_seconds", saved, stats.saved_s)
        recomputed = "Tokens computed once more after preemptions."
        yield CounterMetricFamily("kvire_recomputed_tokens", recomputed, stats.recomputed_tokens)
        yield CounterMetricFamily("kvire_prompts", "Prompts computed.", stats.requests)

    def _cache(self) -> Iterator[Metric]:
        stats, pool = self._client.engine.stats, self._client.engine.pool
        misses = CounterMetricFamily(
            "kvire_cache_misses", "Prompts that could not reuse all they have, by reason.", labels=["reason"]
        )
        seen = dict(stats.misses)
        for reason in MissReason:
            if reason is not MissReason.COMPLETE:  # everything was reused; the rest of kvire_prompts
                misses.add_metric([reason.value], seen.get(reason, 0))
        yield misses
        counts = pool.stats
        yield CounterMetricFamily("kvire_evictions", "Remembered blocks that made room.", counts.evictions)
        collisions = "Keys that agreed where tokens did not; treated as misses."
        yield CounterMetricFamily("kvire_collisions", collisions, counts.collisions)
        yield CounterMetricFamily("kvire_copies_on_write", "Shared blocks copied.", counts.copies_on_write)

    def _load(self) -> Iterator[Metric]:
        engine = self._client.engine
        pool, scheduler = engine.pool, engine.scheduler
        dtype = engine.paged.spec.dtype
        info = {"model": self._model_name, "kv_dtype": dtype, "block_size": str(pool.block_size)}
        yield InfoMetricFamily("kvire_engine", "What runs here.", info)
        block_size = "Tokens per block; a shorter shared prefix is never reused."
        yield GaugeMetricFamily("kvire_block_size_tokens", block_size, pool.block_size)
        yield GaugeMetricFamily("kvire_pool_blocks", "Blocks of the pool.", pool.num_blocks)
        yield GaugeMetricFamily("kvire_pool_free_blocks", "Blocks that no request holds.", pool.num_free)
        remembered = "Free blocks whose KV can still be reused."
        yield GaugeMetricFamily("kvire_pool_remembered_blocks", remembered, pool.num_remembered)
        yield GaugeMetricFamily("kvire_queue_requests", "Requests that wait.", waiting(self._client))
        yield GaugeMetricFamily("kvire_running_sequences", "Answers in progress.", len(scheduler.running))
        yield CounterMetricFamily("kvire_preemptions", "Answers that made room for older ones.", scheduler.preemptions)


MetricReading = tuple[str, str, Callable[[HandleStats], float]]  # name, help, value
GAUGES: tuple[MetricReading, ...] = (
    ("kvire_store_used_bytes", "Bytes that a tier takes.", lambda level: level.tier.used_bytes),
    ("kvire_store_limit_bytes", "Bytes that a tier may take; 0 for no limit of ours.",
     lambda level: level.tier.limit_bytes or 0),
    ("kvire_store_blocks", "Blocks in a tier, where it is known.", lambda level: level.tier.blocks),
    ("kvire_store_queue_blocks", "Blocks that wait to be written.", lambda level: level.queued_blocks),
    ("kvire_store_queue_bytes", "Bytes that wait to be written.", lambda level: level.queued_bytes),
    ("kvire_store_bytes_per_second", "How fast a tier gave blocks lately; a guess before the first.",
     lambda level: level.speed.bytes_per_s),
    ("kvire_store_latency_seconds", "How long a tier took lately to give the first block.",
     lambda level: level.speed.latency_s),
)  # fmt: skip
COUNTERS: tuple[MetricReading, ...] = (
    ("kvire_store_loaded_blocks", "Blocks read and verified.", lambda level: level.counts.loaded_blocks),
    ("kvire_store_loaded_bytes", "Bytes of KV read and verified.", lambda level: level.counts.loaded_bytes),
    ("kvire_store_load_seconds", "Time that reads took, added up over threads.", lambda level: level.counts.load_s),
    ("kvire_store_saved_blocks", "Blocks written.", lambda level: level.counts.saved_blocks),
    ("kvire_store_saved_bytes", "Bytes of frames written.", lambda level: level.counts.saved_bytes),
    ("kvire_store_dropped_blocks", "Blocks not written because the buffer was full.",
     lambda level: level.counts.dropped),
    ("kvire_store_damaged_blocks", "Blocks that were not what was written; removed.",
     lambda level: level.counts.damaged),
    ("kvire_store_unavailable", "Times that a tier could not answer, or not in time.",
     lambda level: level.counts.unavailable),
)  # fmt: skip


def store_metrics(stats: StoreStats) -> Iterator[Metric]:
    """Counters of a store, tier by tier; none without a tier."""
    tiers = stats.handles.items()
    if not tiers:
        return
    for name, text, value in GAUGES:
        gauge = GaugeMetricFamily(name, text, labels=["tier"])
        for tier, level in tiers:
            gauge.add_metric([tier], value(level))
        yield gauge
    for name, text, value in COUNTERS:
        counter = CounterMetricFamily(name, text, labels=["tier"])
        for tier, level in tiers:
            counter.add_metric([tier], value(level))
        yield counter
    evicted = CounterMetricFamily("kvire_store_evictions", "Blocks that went from a tier.", labels=["tier", "reason"])
    refused = CounterMetricFamily("kvire_store_refused", "Blocks that a tier did not keep.", labels=["tier", "reason"])
    for tier, level in tiers:
        for reason, count in sorted(level.tier.evictions.items()):
            evicted.add_metric([tier, reason], count)
        for reason, count in sorted(level.tier.refused.items()):
            refused.add_metric([tier, reason], count)
    yield from (evicted, refused)


def waiting(client: EngineClient) -> int:
    """Requests in the engine's queue."""
    return len(client.engine.scheduler.waiting) + client.engine.inbox.qsize()


class RequestCounter:
    """Counts answers by route and status. A request whose client left counts as 499."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app and count its answer."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = 499

        async def noting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, noting_send)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self.metrics.requests.labels(route, str(status)).inc()
