"""The store behind vLLM's own CPU tier: a connector and a tier, loaded by name (docs/vllm.md).

vLLM moves KV between the GPU and its CPU tier; KvireTier brings blocks of the CPU tier into the
store, and back. A tier gets only a block's hash and the model's name from vLLM. Neither identifies
weights and kernels, so there is a connector, too: vLLM's own one, which also gives the tier the
requests' token ids, the workers' facts about their caches, and the speed of prompts.
secondary_tier.py is the tier, secondary_requests.py names and judges blocks, secondary_transfers.py
has the threads.
"""

from collections.abc import Mapping
from copy import copy, deepcopy
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kvire.connectors.vllm.connector import LEAST_BUFFER_BYTES, MOST_BUFFER_BYTES, KvireFacts
from kvire.connectors.vllm.groups import read_groups
from kvire.connectors.vllm.identity import check_options, facts_of, namespace_of
from kvire.connectors.vllm.messages import Facts
from kvire.connectors.vllm.secondary_tier import KvireTier
from kvire.connectors.vllm.steps import Steps
from kvire.core.errors import ConfigError, UnsupportedModelError
from kvire.plan.cost import PrefillSpeed

__all__ = ["KvireOffloadingConnector", "KvireTier"]


class KvireStep(KVConnectorWorkerMetadata):
    """A worker's message after a step: that of vLLM's own connector, and the step's number."""

    def __init__(self, told: KVConnectorWorkerMetadata | None, step: int) -> None:
        self.told = told
        self.step = step

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Of two workers."""
        assert isinstance(other, KvireStep)
        if self.told is None or other.told is None:
            return KvireStep(self.told or other.told, self.step)
        return KvireStep(self.told.aggregate(other.told), self.step)


class KvireOffloadingConnector(OffloadingConnector):
    """vLLM's offloading connector, for a TieringOffloadingSpec with a KvireTier.

    The tier is one of its secondary_tiers.

    Raises ConfigError or UnsupportedModelError at start for unsupported models and options.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        check_options(vllm_config)
        check_one_machine(vllm_config.parallel_config)
        self._groups, self._block_tokens = read_groups(kv_cache_config)
        super().__init__(introduced(vllm_config), role, kv_cache_config)
        self._facts: Facts | None = None
        self._tiers: list[KvireTier] = []
        self._prefill = PrefillSpeed()
        self._steps = Steps(self._prefill)
        self._requests: dict[str, Any] = {}  # vLLM's own, by id
        self._step: int | None = None  # the worker's current one
        if self.connector_scheduler is None:
            return
        self._tiers = [
            tier
            for tier in getattr(self.connector_scheduler.manager, "secondary_tiers", ())
            if isinstance(tier, KvireTier)
        ]
        try:
            self._check_tiers()
        except Exception:
            self.shutdown()
            raise

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Note the facts of a worker's cache."""
        super().register_kv_caches(kv_caches)
        blocks = self._kv_cache_config.num_blocks
        sizes = [sum(kv_caches[name].nbytes for name in group.layers) // blocks for group in self._groups]
        self._facts = facts_of(self._vllm_config, self._groups, kv_caches, sizes)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Facts for the scheduler's side, before the first request."""
        return None if self._facts is None else KvireFacts(self._facts)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """The workers are ready: name the namespace, and open the stores."""
        facts = [one.facts for _, one in sorted(metadata.items()) if isinstance(one, KvireFacts)]
        namespace = namespace_of(self._vllm_config, facts, self._block_tokens)
        step_blocks = self._vllm_config.scheduler_config.max_num_batched_tokens // self._block_tokens + 1
        for tier in self._tiers:
            step_bytes = step_blocks * len(self._groups) * tier.block_size_bytes
            buffer_bytes = min(max(LEAST_BUFFER_BYTES, 2 * step_bytes), MOST_BUFFER_BYTES)
            tier.begin(namespace, groups=self._groups, prefill=self._prefill, buffer_bytes=buffer_bytes)

    def on_new_request(self, request: Any) -> None:
        """Show it to the tiers."""
        self._requests[request.request_id] = request
        for tier in self._tiers:
            tier.meet(request)
        super().on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """As vLLM's; first, the tiers learn where the lookups begin."""
        for tier in self._tiers:
            tier.begins(request.request_id, num_computed_tokens)
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return found

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """As vLLM's, with the number of a step that measures the speed of prompts."""
        meta = super().build_connector_meta(scheduler_output)
        counts = scheduler_output.num_scheduled_tokens
        starts = {name: self._requests[name].num_computed_tokens for name in counts if name in self._requests}
        meta.kvire_step = self._steps.planned(starts, counts)
        return meta

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """As vLLM's: a step begins."""
        self._step = getattr(self._connector_metadata, "kvire_step", None)
        super().start_load_kv(forward_context, **kwargs)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """As vLLM's, with the number of the step."""
        told = super().build_connector_worker_meta()
        step, self._step = self._step, None
        return told if step is None else KvireStep(told, step)

    def update_connector_output(self, connector_output: Any) -> None:
        """As vLLM's: a step ended."""
        told = connector_output.kv_connector_worker_meta
        self._steps.ended(told.step if isinstance(told, KvireStep) else None)
        if isinstance(told, KvireStep):
            connector_output.kv_connector_worker_meta = told.told
        super().update_connector_output(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """As vLLM's."""
        self._requests.pop(request.request_id, None)
        over: tuple[bool, dict[str, Any] | None] = super().request_finished(request, block_ids)
        return over

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As vLLM's, for models with several groups."""
        self._requests.pop(request.request_id, None)
        over: tuple[bool, dict[str, Any] | None] = super().request_finished_all_groups(request, block_ids)
        return over

    def _check_tiers(self) -> None:
        if not self._tiers:
            raise ConfigError(
                'KvireOffloadingConnector found no KvireTier: add "spec_name":"TieringOffloadingSpec" and '
                f'"secondary_tiers":[{{"type":"KvireTier","module_path":"{__name__}"}}] to kv_connector_extra_config'
            )
        spec = self._tiers[0]._offloading_spec  # noqa: SLF001 - vLLM's name for it
        if spec.blocks_per_chunk > 1 and any(group.window is not None for group in self._groups):
            # vLLM asks only for the last block of a chunk whether it is still in the tier
            raise UnsupportedModelError(
                "KvireTier cannot keep chunks of several blocks for a model with sliding windows: leave block_size and "
                "blocks_per_chunk out of kv_connector_extra_config"
            )


def check_one_machine(parallel: Any) -> None:
    """The tier sees the shares of workers on its own machine. Raises ConfigError for others."""
    if parallel.nnodes > 1 or parallel.distributed_executor_backend == "ray":
        raise ConfigError(
            "KvireTier reads KV where all workers of a model share one machine's memory: with several nodes, or with "
            "Ray, which may use several, leave it out (KvireConnector works there)"
        )


def introduced(vllm_config: Any) -> Any:
    """A copy of vLLM's config that introduces this connector to its KvireTiers."""
    config = copy(vllm_config)
    config.kv_transfer_config = transfer = copy(vllm_config.kv_transfer_config)
    transfer.kv_connector_extra_config = extra = deepcopy(transfer.kv_connector_extra_config)
    for tier in extra.get("secondary_tiers", ()):
        if tier.get("type") == KvireTier.__name__:
            tier["connector"] = KvireOffloadingConnector.__name__
    return config
