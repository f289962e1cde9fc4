"""The connector's counters in vLLM's metrics: the /metrics page and the periodic log line."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import prometheus_client
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats


class Meaning(NamedTuple):
    """How a count is exported.

    label: that divides the count, if any.
    """

    text: str
    label: str | None = None


COUNTERS = {
    "looked_up_tokens": Meaning("Tokens of requests that were looked up in the store."),
    "matched_tokens": Meaning("Tokens that vLLM took from the store instead of computing them.", "tier"),
    "slower_tokens": Meaning("Tokens that were stored, but computed because that was faster."),
    "excluded_requests": Meaning("Requests whose KV depends on more than token ids, so nothing was kept.", "reason"),
    "foreign_requests": Meaning(
        "Requests whose tokens are stored by an engine whose blocks this one must not read, by what differs.", "fields"
    ),
    "loaded_blocks": Meaning("Parts of blocks that were loaded, by where they came from.", "tier"),
    "loaded_bytes": Meaning("Bytes of KV loaded.", "tier"),
    "load_seconds": Meaning("Seconds that loads took, in all threads together."),
    "failed_blocks": Meaning("Parts of blocks that could not be loaded; their requests were computed.", "reason"),
    "saved_blocks": Meaning("Parts of blocks handed to the store."),
    "saved_bytes": Meaning("Bytes of KV handed to the store."),
    "dropped_blocks": Meaning("Parts of blocks not stored because too much was on its way already."),
    "save_seconds": Meaning("Seconds that steps took longer because blocks were copied out."),
    "refused_writes": Meaning("Writes that a tier did not keep: it is full, or pinned, or over its quota.", "tier"),
    "unavailable": Meaning("Times that a tier could not answer.", "tier"),
    "damaged": Meaning("Blocks found damaged, and removed.", "tier"),
}


class KvireStats(KVConnectorStats):
    """Counts since the last report: name -> label value ("" without) -> amount."""

    data: dict[str, dict[str, float]]

    @classmethod
    def of(cls, counts: Counter[tuple[str, str]]) -> "KvireStats | None":
        """The stats; None without counts, which vLLM need not send on."""
        data: dict[str, dict[str, float]] = {}
        for (name, label), amount in counts.items():
            if amount:
                data.setdefault(name, {})[label] = amount
        return cls(data) if data else None

    def reset(self) -> None:
        """Begin again."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another's counts to these."""
        for name, labels in other.data.items():
            mine = self.data.setdefault(name, {})
            for label, amount in labels.items():
                mine[label] = mine.get(label, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        """For a log line."""
        return {
            f"{name}{{{label}}}" if label else name: round(amount, 3)
            for name, labels in self.data.items()
            for label, amount in labels.items()
        }

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class KvireMetrics(KVConnectorPromMetrics):
    """The counters as vllm:kvire_*_total."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, dict(metric_types), labelnames, per_engine_labelvalues)
        counter = metric_types[prometheus_client.Counter]
        self._metrics = {
            name: counter(
                name=f"vllm:kvire_{name}",
                documentation=meaning.text,
                labelnames=labelnames + ([meaning.label] if meaning.label else []),
            )
            for name, meaning in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one report's counts."""
        for name, labels in transfer_stats_data.items():
            for label, amount in labels.items():
                values = [*self.per_engine_labelvalues[engine_idx], *([label] if COUNTERS[name].label else [])]
                self._metrics[name].labels(*values).inc(amount)
