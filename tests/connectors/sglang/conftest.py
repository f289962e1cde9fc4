"""SGLang's released storage interface, loaded by itself: SGLang as a whole needs a GPU, these files do not.

$KVIRE_SGLANG_SOURCE names the folder that holds `sglang/` as it lies in the wheel. Of it run here: hicache_storage.py
with SGLang's own file backend, environ.py, and the factory that makes backends by name. What stands in for the rest is
below: how the server was started, its metrics record, one of its helpers, and host pools.
"""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from models.tiny import make_tiny

SOURCE = "KVIRE_SGLANG_SOURCE"
PACKAGES = ("sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.observability", "sglang.srt.utils")


@dataclass
class StorageMetrics:
    """As in sglang/srt/observability/metrics_collector.py of 0.5.23."""

    prefetch_pgs: list[int] = field(default_factory=list)
    backup_pgs: list[int] = field(default_factory=list)
    prefetch_bandwidth: list[float] = field(default_factory=list)
    backup_bandwidth: list[float] = field(default_factory=list)


class HostPool:
    """Pages of K and V in host memory, as MHATokenToKVPoolHost lays them out. layout: layer_first or page_first."""

    def __init__(self, pages: int, layout: str = "layer_first", page_size: int = 4, dtype=torch.bfloat16) -> None:
        self.layout, self.page_size, self.dtype = layout, page_size, dtype
        self.start_layer, self.end_layer = 0, 3
        self.size_per_token = 2 * 3 * 2 * 8 * dtype.itemsize
        shape = (2, 3, pages * page_size, 2, 8) if layout == "layer_first" else (2, pages * page_size, 3, 2, 8)
        self.kv_buffer = torch.zeros(shape, dtype=dtype)

    def _page(self, index: int) -> torch.Tensor:
        return self.kv_buffer.narrow(2 if self.layout == "layer_first" else 1, index, self.page_size)

    def get_data_page(self, index: int, *, flat: bool = True) -> torch.Tensor:
        return self._page(index).flatten() if flat else self._page(index)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros_like(self._page(0)).flatten()

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        self._page(index).copy_(data_page.reshape(self._page(index).shape))

    def fill(self, seed: int = 0) -> "HostPool":
        self.kv_buffer.copy_(torch.randn(self.kv_buffer.shape, generator=torch.Generator().manual_seed(seed)))
        return self


@pytest.fixture
def host_pool() -> type[HostPool]:
    """Makes host pools."""
    return HostPool


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("served"), tokenizer=False)


@pytest.fixture
def arguments(checkpoint: Path) -> SimpleNamespace:
    """How the server was started: a few of SGLang's arguments."""
    return SimpleNamespace(
        model_path=str(checkpoint), served_model_name="tiny", revision=None, dtype="bfloat16", kv_cache_dtype="auto",
        attention_backend="fa3", quantization=None, port=30000, random_seed=7, mem_fraction_static=0.8,
        hicache_storage_backend="dynamic",
    )  # fmt: skip


@pytest.fixture
def interface(arguments: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """hicache_storage.py as released."""
    source = os.environ.get(SOURCE)
    if not source:
        pytest.skip(f"${SOURCE} names no folder with SGLang's released files")
    before = {name: module for name, module in sys.modules.items() if _is_ours(name)}
    for name in before:
        del sys.modules[name]
    for name in PACKAGES:
        package = ModuleType(name)
        package.__path__ = [str(Path(source, *name.split(".")))]  # its own __init__ wants a GPU
        sys.modules[name] = package
    context = ModuleType("sglang.srt.runtime_context")
    context.get_server_args = lambda: arguments
    metrics = ModuleType("sglang.srt.observability.metrics_collector")
    metrics.StorageMetrics = StorageMetrics
    common = ModuleType("sglang.srt.utils.common")
    common.human_readable_int = int  # for command lines, of the file backend's options
    sys.modules |= {module.__name__: module for module in (context, metrics, common)}
    try:
        yield import_module("sglang.srt.mem_cache.hicache_storage")
    finally:
        for name in [name for name in sys.modules if _is_ours(name)]:
            del sys.modules[name]
        sys.modules |= before


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs SGLang's files."""
    for item in items:
        if "interface" in getattr(item, "fixturenames", ()) and item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.engine)


def _is_ours(name: str) -> bool:
    return name.split(".", maxsplit=1)[0] == "sglang" or name == "kvire.connectors.sglang.storage"


@pytest.fixture
def start(interface: ModuleType, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes a backend as SGLang does: by its factory, from the extra config; closed at the end."""
    factory = import_module("sglang.srt.mem_cache.storage.backend_factory").StorageBackendFactory
    opened = []

    def make(*, ranks: dict[str, Any] | None = None, **extra: Any) -> Any:
        asked = {
            "backend_name": "kvire", "module_path": "kvire.connectors.sglang", "class_name": "KvireStorage",
            "interface_v1": 1, "store": str(tmp_path / "store"), "disk_size": "64MB",
            "key_file": str(tmp_path / "keys" / "keyring.json"),
        }  # fmt: skip
        asked = {name: value for name, value in (asked | extra).items() if value is not None}
        config = interface.HiCacheStorageConfig(
            **{
                "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
                "is_mla_model": False, "enable_storage_metrics": True, "is_page_first_layout": False,
                "model_name": "tiny", "extra_config": asked,
            }
            | (ranks or {})
        )  # fmt: skip
        opened.append(factory.create_backend("dynamic", config, None))
        return opened[-1]

    yield make
    for backend in opened:
        backend.close()
