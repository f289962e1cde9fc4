"""What lies at rest says nothing: no token, no KV, no word of a prompt; and the same search finds them unsealed."""

import logging
import stat
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from harness.engines import BLOCK, drive, request, words
from harness.loads import engine_over

from kvire.codec.frame import Frames
from kvire.core.config import StoreConfig
from kvire.core.keys import block_keys
from kvire.server.metrics import store_metrics
from kvire.sessions.folder import Session, Sessions
from kvire.store.disk.tier import DiskTier
from kvire.store.keyring import Keyring
from kvire.store.remote.open import open_remote
from kvire.store.tiered import TieredStore

PROMPTS, PROMPT_TOKENS = 1_000, 2 * BLOCK + 3
NEEDLE_TOKENS, NEEDLE_BYTES = 8, 64
SECRET = "the secret word is mandragora"


def fill(folder: Path, *, encrypt: bool) -> tuple[list[bytes], list[bytes], str]:
    """1,000 prompts through an engine over a disk and a shared folder: pieces of tokens and KV, and what is told."""
    keyring = Keyring(folder / "keys" / "keyring.json", encrypt=encrypt)
    frames = Frames(keyring.tenant)
    disk, shared = DiskTier(folder / "disk", 256 << 20), open_remote(f"file://{folder / 'shared'}")
    tokens, kv = [], []
    with TieredStore([(disk, frames), (shared, frames)], keyring, StoreConfig(), buffer_bytes=256 << 20) as store:
        engine = engine_over(store, num_blocks=256)
        for first in range(0, PROMPTS, 20):
            prompts = [words(i, PROMPT_TOKENS) for i in range(first, first + 20)]
            drive(engine, [request(prompt, max_tokens=1) for prompt in prompts], check=False)
            for prompt in prompts:
                tokens.append(np.asarray(prompt[:NEEDLE_TOKENS], "<i4").tobytes())
                (key, _) = block_keys(engine.root, prompt, BLOCK)
                block = engine.pool.pools[0]._index[key]
                kv.append(bytes(engine.paged.memory(0, block.id)[-NEEDLE_BYTES:]))  # its last token in the last layer
            engine.pool.clear()
        assert store.flush(60)
        Sessions(folder / "disk", keyring, 1 << 20).save("", Session("work", ({"role": "user", "content": SECRET},)))
        names = " ".join(store.stats().handles) + str([metric.samples for metric in store_metrics(store.stats())])
        assert store.stats().dropped_saves == 0
    return tokens, kv, names


def at_rest(folder: Path) -> bytes:
    """Every byte under the store's folders, and every name."""
    paths = [path for place in ("disk", "shared") for path in sorted((folder / place).rglob("*"))]
    names = "\n".join(str(path.relative_to(folder)) for path in paths).encode()
    return names + b"".join(path.read_bytes() for path in paths if path.is_file())


def count_found(needles: list[bytes], everything: bytes) -> int:
    """How many of the needles are in there, at whatever place: looked for by their first eight bytes, all at once."""
    anchors = np.unique(np.frombuffer(b"".join(needle[:8] for needle in needles), "<u8"))
    by_anchor = defaultdict(set)
    for needle in needles:
        by_anchor[needle[:8]].add(needle)
    found: set[bytes] = set()
    for shift in range(8):
        windows = np.frombuffer(everything, "<u8", (len(everything) - shift) // 8, shift)
        for at in np.flatnonzero(np.isin(windows, anchors)) * 8 + shift:
            found |= by_anchor[everything[at : at + 8]] & {everything[at : at + len(needles[0])]}
    return len(found)


@pytest.mark.parametrize("encrypt", [True, False], ids=["sealed", "unsealed"])
def test_a_search_of_everything_at_rest(tmp_path: Path, caplog, *, encrypt: bool) -> None:
    caplog.set_level(logging.DEBUG)
    tokens, kv, names = fill(tmp_path, encrypt=encrypt)
    everything = at_rest(tmp_path)
    found = [count_found(needles, everything) for needles in (tokens, kv, [SECRET.encode()])]
    assert found == ([0, 0, 0] if encrypt else [PROMPTS, PROMPTS, 1])
    assert SECRET not in names + caplog.text and "mandragora" not in names + caplog.text
    for path in (tmp_path / "disk").rglob("*"):
        assert stat.S_IMODE(path.lstat().st_mode) == (0o700 if path.is_dir() else 0o600), path
