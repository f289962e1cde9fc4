"""KvireStorage against the interface as released: what is set comes back, nothing else does, and no call raises."""

import hashlib
import random

import pytest
import torch

from kvire.core.record import BlockId
from kvire.store.disk.tier import DiskTier

PAGE = 4


def hashes(count: int, seed: str = "") -> list[str]:
    """Page hashes as SGLang's: each over the one before."""
    found, last = [], seed
    for number in range(count):
        last = hashlib.sha256(f"{last}/{number}".encode()).hexdigest()
        found.append(last)
    return found


def slots(pages) -> torch.Tensor:
    """Token indices of pages, as SGLang gives them."""
    return torch.tensor([page * PAGE + token for page in pages for token in range(PAGE)])


def _config(interface):
    return interface.HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
        enable_storage_metrics=False, is_page_first_layout=False, model_name="tiny",
    )  # fmt: skip


KEYS = hashes(8)


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_pages_come_back_into_other_slots_of_another_server(start, host_pool, layout) -> None:
    source, target = host_pool(16, layout).fill(), host_pool(16, layout)
    first = start()
    first.register_mem_pool_host(source)
    assert first.batch_exists(KEYS) == 0
    assert first.batch_set_v1(KEYS, slots(range(8))) == [True] * 8
    first.close()
    second = start()
    second.register_mem_pool_host(target)
    assert second.batch_exists(KEYS) == 8 and second.exists(KEYS[7])
    assert second.batch_get_v1(KEYS[2:6], slots((15, 3, 0, 7))) == [True] * 4
    for page, slot in zip(range(2, 6), (15, 3, 0, 7), strict=True):
        assert torch.equal(target.get_data_page(slot * PAGE), source.get_data_page(page * PAGE))
    assert not target.get_data_page(5 * PAGE).any(), "no other slot was touched"


def test_the_class_is_loaded_and_checked_by_sglangs_own_factory(start, interface) -> None:
    assert isinstance(start(), interface.HiCacheStorage)


def test_every_page_has_an_answer(start, host_pool) -> None:
    """A list of as many booleans as keys: None ends the thread that asked."""
    storage, pool = start(), host_pool(16).fill()
    storage.register_mem_pool_host(pool)
    assert storage.batch_set_v1(KEYS[:3], slots(range(3))) == [True] * 3
    storage._store.flush(10)
    assert storage.batch_get_v1(KEYS[:5], slots(range(5))) == [True, True, True, False, False]
    assert storage.batch_get_v1(["not a hash", "", "é"], slots(range(3))) == [False] * 3
    assert storage.batch_get_v1([], slots([])) == storage.batch_set_v1([], slots([])) == []
    assert storage.batch_get_v1(KEYS[:3], slots(range(2))) == [False] * 3, "no room for the third"
    assert storage.batch_set_v1(KEYS[5:], slots(range(2))) == [False] * 3
    assert storage.batch_exists(KEYS[5:]) == 0
    assert storage.batch_exists([]) == 0


def test_errors_below_are_misses(start, host_pool, monkeypatch) -> None:
    storage = start()
    storage.register_mem_pool_host(host_pool(16).fill())
    storage.batch_set_v1(KEYS, slots(range(8)))
    storage._store.flush(10)

    def broken(*_, **__):
        raise OSError("the disk is gone")

    for name in ("load", "held", "save"):
        monkeypatch.setattr(storage._store, name, broken)
    assert storage.batch_exists(KEYS) == 0
    assert storage.batch_get_v1(KEYS, slots(range(8))) == [False] * 8
    assert storage.batch_set_v1(KEYS, slots(range(8))) == [False] * 8


def test_a_damaged_page_is_a_miss_and_leaves_its_slot_alone(start, host_pool, monkeypatch) -> None:
    storage, target = start(), host_pool(16)
    storage.register_mem_pool_host(host_pool(16).fill())
    storage.batch_set_v1(KEYS, slots(range(8)))
    storage._store.flush(10)
    storage.register_mem_pool_host(target)
    bad = BlockId(storage._pools["kv"]._pages([KEYS[3]]).keys[0], 0)
    read = DiskTier.read

    def garbled(tier, block_id, buffers, timeout_s=None) -> int:
        size = read(tier, block_id, buffers, timeout_s)
        if block_id == bad:
            buffers[-1][0] ^= 1
        return size

    monkeypatch.setattr(DiskTier, "read", garbled)
    monkeypatch.setattr(DiskTier, "read_run", None)
    assert storage.batch_get_v1(KEYS, slots(range(8))) == [True] * 3 + [False] + [True] * 4
    assert not target.get_data_page(3 * PAGE).any()


def test_more_pages_than_are_staged_at_once(start, host_pool, monkeypatch) -> None:
    storage, source = start(), host_pool(16).fill()
    storage.register_mem_pool_host(source)
    monkeypatch.setattr("kvire.connectors.sglang.pages.STAGED_BYTES", 3 * storage._pools["kv"].page_bytes)
    storage.batch_set_v1(KEYS, slots(range(8)))
    storage._store.flush(10)
    target = host_pool(16)
    storage.register_mem_pool_host(target)
    assert storage.batch_get_v1(KEYS, slots(range(8))) == [True] * 8
    assert torch.equal(target.kv_buffer[:, :, : 8 * PAGE], source.kv_buffer[:, :, : 8 * PAGE])


def test_clear_forgets_sglangs_pages_and_nobody_elses(start, host_pool) -> None:
    ours, other = start(), start(tenant="somebody")
    for storage in (ours, other):
        storage.register_mem_pool_host(host_pool(16).fill())
        storage.batch_set_v1(KEYS, slots(range(8)))
        storage._store.flush(10)
    names = set(ours._pools["kv"]._pages(KEYS).keys)
    assert ours.clear() is True
    assert names.isdisjoint(ours._pools["kv"]._pages(KEYS).keys), "under the new salt"
    assert (ours.batch_exists(KEYS), other.batch_exists(KEYS)) == (0, 8)
    assert ours.batch_set_v1(KEYS, slots(range(8))) == [True] * 8
    ours._store.flush(10)
    assert ours.batch_exists(KEYS) == 8


def test_stats_are_those_since_the_last_time(start, host_pool) -> None:
    storage = start()
    storage.register_mem_pool_host(host_pool(16).fill())
    storage.batch_set_v1(KEYS, slots(range(8)))
    storage._store.flush(10)
    storage.batch_get_v1(KEYS[:5], slots(range(5)))
    stats = storage.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([8], [5])
    assert all(value > 0 for value in stats.backup_bandwidth + stats.prefetch_bandwidth)
    assert storage.get_stats().prefetch_pgs == []


def test_a_remote_tier_is_asked_whether_it_has_pages(start, host_pool, tmp_path) -> None:
    """As on another machine: nothing is local."""
    remote = {"store": None, "disk_size": None, "remote": f"file://{tmp_path / 'shared'}"}
    first = start(**remote)
    first.register_mem_pool_host(host_pool(16).fill())
    first.batch_set_v1(KEYS[:5], slots(range(5)))
    first.close()
    second, target = start(**remote), host_pool(16)
    second.register_mem_pool_host(target)
    assert second.batch_exists(KEYS) == 5
    assert second.batch_get_v1(KEYS[:5], slots(range(5))) == [True] * 5
    assert target.get_data_page(4 * PAGE).any()


def test_the_generic_interface_is_not_answered(start) -> None:
    for call in ("get", "set", "batch_get", "batch_set"):
        with pytest.raises(NotImplementedError, match="interface_v1"):
            getattr(start(), call)(KEYS)


class TestPools:
    """Version 2 of the interface: several pools, each with a policy."""

    @pytest.fixture
    def storage(self, start, host_pool):
        storage = start()
        storage.register_mem_pool_host(host_pool(16).fill(1))
        storage.register_mem_host_pool_v2(host_pool(16).fill(2), "swa")
        storage.register_mem_host_pool_v2(host_pool(16).fill(3), "indexer")
        storage.on_host_pools_registered()
        return storage

    def _set(self, storage, interface, pool, pages) -> None:
        keys = [KEYS[page] for page in pages]
        transfer = interface.PoolTransfer(name=interface.PoolName(pool), host_indices=slots(pages), keys=keys)
        assert storage.batch_set_v2([transfer]) == {pool: [True] * len(keys)}
        storage._store.flush(10)

    def test_pools_do_not_share_pages(self, storage, interface, host_pool) -> None:
        self._set(storage, interface, "swa", [1, 2])
        assert storage.batch_exists(KEYS[1:3]) == 0
        target = host_pool(16)
        storage.register_mem_host_pool_v2(target, "swa")
        wanted = [
            interface.PoolTransfer(name=interface.PoolName.SWA, host_indices=slots([5, 6]), keys=KEYS[1:3]),
            interface.PoolTransfer(name=interface.PoolName.INDEXER, host_indices=slots([5]), keys=KEYS[1:2]),
        ]
        assert storage.batch_get_v2(wanted) == {"swa": [True, True], "indexer": [False]}
        assert torch.equal(target.get_data_page(6 * PAGE), host_pool(16).fill(2).get_data_page(2 * PAGE))

    @pytest.mark.parametrize(
        ("policy", "trailing", "pages", "final", "restorable"),
        [
            ("all_pages", 1, [0, 1, 2], 3, [1, 2, 3]),
            ("all_pages", 1, [1, 2, 3], 0, []),
            ("all_pages", 1, range(8), 6, [1, 2, 3, 4, 5, 6]),
            ("trailing_pages", 1, [1, 4], 5, [2, 5]),
            ("trailing_pages", 2, [1, 2, 4], 3, [3]),
            ("trailing_pages", 2, [0, 6], 1, [1]),
            ("trailing_pages", 3, [], 0, []),
            ("block_groups", 1, range(8), 0, []),
        ],
    )
    def test_the_longest_prefix_that_every_pool_can_restore(
        self, storage, interface, policy, trailing, pages, final, restorable
    ) -> None:
        """KV has six pages; the other pool those given."""
        self._set(storage, interface, "kv", list(range(6)))
        self._set(storage, interface, "swa", list(pages))
        transfer = interface.PoolTransfer(
            name=interface.PoolName.SWA, keys=KEYS[:trailing], hit_policy=interface.PoolHitPolicy(policy)
        )
        found = storage.batch_exists_v2(KEYS, [transfer])
        assert (found.kv_hit_pages, list(found.restorable_prefix_pages)) == (final, restorable)
        assert found.extra_pool_hit_pages.get("kv") == 6
        assert found.extra_pool_hit_pages.get("swa", 0) == final

    def test_answers_as_sglangs_own_file_backend_does(self, storage, interface, host_pool, tmp_path) -> None:
        """Random pages in three pools, two of them with a policy each."""
        for seed in range(30):
            rng = random.Random(seed)
            keys = hashes(8, str(seed))
            (tmp_path / str(seed)).mkdir()
            peer = interface.HiCacheFile(_config(interface), str(tmp_path / str(seed)))
            peer.register_mem_pool_host(host_pool(16))
            for name in ("kv", "swa", "indexer"):
                peer.register_mem_host_pool_v2(host_pool(16), name)
                pages = sorted(rng.sample(range(8), rng.randint(3, 8))) if name != "kv" else range(rng.randint(0, 8))
                transfer = interface.PoolTransfer(
                    name=interface.PoolName(name), host_indices=slots(pages), keys=[keys[page] for page in pages]
                )
                assert storage.batch_set_v2([transfer]) == peer.batch_set_v2([transfer])
            storage._store.flush(10)
            wanted = [
                interface.PoolTransfer(
                    name=interface.PoolName(name),
                    keys=keys[: rng.randint(1, 3)],
                    hit_policy=rng.choice([interface.PoolHitPolicy.ALL_PAGES, interface.PoolHitPolicy.TRAILING_PAGES]),
                )
                for name in ("swa", "indexer")
            ]
            ours, theirs = storage.batch_exists_v2(keys, wanted), peer.batch_exists_v2(keys, wanted)
            assert (ours.kv_hit_pages, ours.restorable_prefix_pages) == (
                theirs.kv_hit_pages, theirs.restorable_prefix_pages,
            )  # fmt: skip
            if theirs.restorable_prefix_pages:  # theirs stops counting pools when nothing is left
                assert ours.extra_pool_hit_pages == theirs.extra_pool_hit_pages

    def test_kv_alone(self, storage, interface) -> None:
        assert storage.batch_exists_v2(KEYS).kv_hit_pages == 0
        self._set(storage, interface, "kv", [0, 1, 3])
        assert storage.batch_exists_v2(KEYS).kv_hit_pages == 2

    def test_a_pool_that_was_never_registered(self, storage, interface) -> None:
        transfer = interface.PoolTransfer(name=interface.PoolName.MAMBA, host_indices=slots([1]), keys=KEYS[:1])
        assert storage.batch_get_v2([transfer]) == {"mamba": [False]}
        assert storage.batch_set_v2([transfer]) == {"mamba": [False]}
