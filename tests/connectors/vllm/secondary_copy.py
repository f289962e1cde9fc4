"""vLLM's tiered offloading on a CPU: everything of it but the copies between GPU and CPU tier, which need a GPU.

Runs under vLLM's Python. The engine's own cache lies in main memory here, so those copies are plain ones.
"""

from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyingWorker(OffloadingWorker):
    """Copies at once, and says so at the next question, as a GPU does. For one group, a block to a chunk."""

    def __init__(self, caches: Any, region: SharedOffloadRegion) -> None:
        self.pages = [one.tensor for one in caches.tensors]
        self.chunks = [region.create_next_worker_view(one.page_size_bytes) for one in caches.tensors]
        self.finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for pages, chunks in zip(self.pages, self.chunks, strict=True):
            chunks[dst_spec.chunk_ids] = pages[src_spec.block_ids]
        self.finished.append(TransferResult(job_id, success=True))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for pages, chunks in zip(self.pages, self.chunks, strict=True):
            pages[dst_spec.block_ids] = chunks[src_spec.chunk_ids]
        self.finished.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self.finished = self.finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        pass


class CopyingSpec(TieringOffloadingSpec):
    """vLLM refuses to offload without a GPU in `get_worker` alone."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        self.region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=0,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return CopyingWorker(kv_caches, self.region)
