"""What is missing, damaged, slow or gone is a shorter hit; and nothing is computed on KV of other tokens."""

import threading

import pytest
import torch
from harness.plain_generate import greedy, prompt, tiny
from harness.waiting import PATIENCE_S, until

from kvire.codec.frame import Frames
from kvire.connectors.transformers import StoredCache
from kvire.connectors.transformers.blocks import CACHE, new_cache
from kvire.connectors.transformers.computed import Computed
from kvire.core.errors import GenerationError
from kvire.core.record import BlockId
from kvire.core.report import MissReason
from kvire.store.keyring import Keyring
from kvire.store.memory.tier import MemoryTier
from kvire.store.open import unsealed
from kvire.store.tiered import TieredStore

IDS = prompt(100)


class Stalling:
    """A tier whose reads wait for `goes_on`, but for those of quick blocks; it has no other way to read."""

    read_run = lent = None

    def __init__(self, tier) -> None:
        self._tier = tier
        self.goes_on = threading.Event()
        self.quick: set[BlockId] = set()
        self.reading = 0  # that wait, or are about to

    def __getattr__(self, name):
        return getattr(self._tier, name)

    def read(self, block_id, buffers, timeout_s=None) -> int:
        if block_id in self.quick:
            return self._tier.read(block_id, buffers, timeout_s)
        self.reading += 1
        self.goes_on.wait(3 * PATIENCE_S)
        length = self._tier.read(block_id, buffers, timeout_s)
        self.reading -= 1
        return length


def _keys(stored) -> list:
    return stored._chain(IDS[0].tolist()).keys


@pytest.fixture
def filled(model, config) -> torch.Tensor:
    """The answer, once its blocks are stored."""
    with StoredCache.open(model, config) as stored:
        return stored.generate(IDS, **greedy(20))


@pytest.mark.parametrize(("hole", "reused"), [(0, 0), (3, 48), (5, 80)])
def test_a_missing_block_ends_the_hit(model, config, filled, hole, reused) -> None:
    with StoredCache.open(model, config) as stored:
        stored.store.discard([BlockId(_keys(stored)[hole], 0)])
        stored.store.flush(10)
        assert torch.equal(stored.generate(IDS, **greedy(20)), filled)
        assert stored.report.reused_tokens == reused
        stored.generate(IDS, **greedy(20))
        assert stored.report.reused_tokens == 96, "it was stored again"


@pytest.mark.parametrize("family", ["gemma3_text", "mistral"])
def test_a_missing_block_of_a_window_moves_it(tmp_path, config, family) -> None:
    """The hit ends before the hole; the window before that was stored, too."""
    model = tiny(family, tmp_path / "model")
    with StoredCache.open(model, config) as stored:
        answer = stored.generate(IDS, **greedy(20))
        group = len(stored._layout.spec.groups) - 1
        stored.store.discard([BlockId(_keys(stored)[4], group)])
        stored.store.flush(10)
        assert torch.equal(stored.generate(IDS, **greedy(20)), answer)
        assert stored.report.reused_tokens == 64


def test_damaged_frames_are_misses(model, config, filled) -> None:
    """Every byte of the segments behind their heads, turned over."""
    for segment in config.path.glob("*.seg*"):
        content = bytearray(segment.read_bytes())
        content[4096:] = bytes(byte ^ 0xFF for byte in content[4096:])
        segment.write_bytes(content)
    with StoredCache.open(model, config) as stored:
        assert torch.equal(stored.generate(IDS, **greedy(20)), filled)
        assert stored.report.reused_tokens < 96
        assert stored.report.miss is MissReason.DAMAGED


def test_a_block_damaged_behind_the_index_moves_a_window(tmp_path, config) -> None:
    """held() promises what read() then finds damaged: the load starts over with the window before."""
    model = tiny("mistral", tmp_path / "model")
    with StoredCache.open(model, config) as stored:
        answer = stored.generate(IDS, **greedy(20))
        stored.store.flush(10)
        disk = next(level.tier for level in stored.store._handles)
        bad, read = BlockId(_keys(stored)[5], 0), disk.read

        def garbled(block_id, buffers, timeout_s=None) -> int:
            size = read(block_id, buffers, timeout_s)
            if block_id == bad:
                buffers[0][0] ^= 1
            return size

        disk.read = garbled
        disk.read_run = None
        assert torch.equal(stored.generate(IDS, **greedy(20)), answer)
        assert stored.report.reused_tokens == 80
        assert stored.report.miss is MissReason.DAMAGED


@pytest.mark.parametrize("sound", [0, 3])
def test_a_tier_slower_than_computing_is_not_waited_for(model, config, monkeypatch, sound) -> None:
    """What came in time is used; and a tier that is known to be slow is not asked again."""
    monkeypatch.setattr("kvire.plan.cost.PrefillSpeed.seconds", lambda *_: 2.0 if sound else 0.5)
    keyring = Keyring(config.key_file)
    stalling = Stalling(MemoryTier(config.disk_bytes))
    with TieredStore([(stalling, Frames(unsealed(keyring)))], keyring, config) as store:
        stored = StoredCache.open(model, store)
        answer = stored.generate(IDS, **greedy(20))
        store.flush(10)
        stalling.quick = {BlockId(key, 0) for key in _keys(stored)[:sound]}
        assert torch.equal(stored.generate(IDS, **greedy(20)), answer)
        assert stalling.reading, "it came back while they still wait"
        assert (stored.report.reused_tokens, stored.report.miss) == (sound * 16, MissReason.SLOWER)
        stalling.goes_on.set()
        until(lambda: not stalling.reading)
        stalling.goes_on.clear()
        assert torch.equal(stored.generate(IDS, **greedy(20)), answer)
        assert not stalling.reading
        assert (stored.report.reused_tokens, stored.report.miss) == (0, MissReason.SLOWER)


def test_other_tokens_than_the_prompts_are_not_computed_on_its_kv(model) -> None:
    """As a version of transformers would that slices a prompt in another way."""
    used = new_cache(model.config)
    with torch.no_grad():
        model(input_ids=IDS[:, :32], **{CACHE: used})
        for wrong in (IDS, IDS[:, 33:], IDS[:, 32:].roll(1)):
            with Computed(model, used, IDS[0].tolist(), 32), pytest.raises(GenerationError, match="other tokens"):
                model(input_ids=wrong, **{CACHE: used})
        with Computed(model, used, IDS[0].tolist(), 32) as computed:
            model(input_ids=IDS[:, 32:50], **{CACHE: used})
        assert computed.token_ids(None) == IDS[0, :50].tolist()
        assert computed.token_ids(limit=40) == IDS[0, :40].tolist()
        used.crop(-3)  # as generate() does where it notices late that it was to stop
        assert computed.token_ids(None) == IDS[0, :47].tolist()


def test_nothing_is_stored_of_a_call_that_failed(model, config) -> None:
    def fail(*_):
        raise ValueError("a stopping criterion failed")

    with StoredCache.open(model, config) as stored:
        with pytest.raises(ValueError, match="criterion"):
            stored.generate(IDS, **greedy(20), stopping_criteria=[fail])
        assert not model._forward_pre_hooks
        stored.store.flush(10)
        assert stored.store.stats().saves == 0
