"""The store alone, without an engine and without torch.

It keeps arrays under their tokens, and another process finds them again.

    python examples/numpy_blocks.py            both halves, each in a process, in a temporary folder
    python examples/numpy_blocks.py put DIR    or each by hand
    python examples/numpy_blocks.py get DIR
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from kvire.core.config import StoreConfig
from kvire.core.keys import Namespace, block_keys, content_ids
from kvire.core.record import BlockId, BlockRecord
from kvire.store.open import open_store
from kvire.store.ticket import LoadState, Wanted
from kvire.store.tiered import TieredStore

BLOCK_SIZE = 16  # tokens per block
SHAPE = (4, 2, BLOCK_SIZE, 2, 32)  # layer, K or V, token, head, width
PROMPT = [(7 * i + 3) % 1000 for i in range(8 * BLOCK_SIZE)]


def kv_of_block(index: int) -> np.ndarray:
    """What a model would have computed: here, numbers that both processes can make."""
    return np.random.default_rng(index).standard_normal(SHAPE).astype(np.float16)


def records(store: TieredStore) -> list[BlockRecord]:
    """Names of the prompt's blocks.

    Whatever decides KV besides tokens is in the namespace, the tenant's salt too.
    """
    salt = store.tenant("").salt
    namespace = Namespace(
        weights="digest of the weight files", config="digest of the model config", numerics="float16",
        kv_dtype="float16", spec=str(SHAPE), block_size=BLOCK_SIZE, salt=salt,
    )  # fmt: skip
    keys = block_keys(namespace.root, PROMPT, BLOCK_SIZE)
    contents = content_ids(salt, PROMPT, range(BLOCK_SIZE, len(PROMPT) + 1, BLOCK_SIZE))
    return [
        BlockRecord(
            id=BlockId(key, group=0),
            parent=keys[i - 1] if i else namespace.root,
            root=namespace.root,
            index=i,
            token_ids=tuple(PROMPT[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE]),
            kv_bytes=kv_of_block(i).nbytes,
            content=contents[i],
        )
        for i, key in enumerate(keys)
    ]


def put(store: TieredStore) -> None:
    """Save every block; the store copies it and writes in the background."""
    blocks = records(store)
    kept = [store.save(block, memoryview(kv_of_block(i)).cast("B")) for i, block in enumerate(blocks)]
    assert all(kept) and store.flush(timeout_s=10)
    print(f"put {len(blocks)} blocks of {len(PROMPT)} tokens")


def get(store: TieredStore) -> None:
    """Load every block into memory of our own and compare."""
    blocks = records(store)
    print("held by", set(store.held([block.id for block in blocks])))
    arrays = [np.empty(SHAPE, np.float16) for _ in blocks]
    begin = time.perf_counter()
    ticket = store.load([Wanted(b, memoryview(a).cast("B")) for b, a in zip(blocks, arrays, strict=True)])
    ticket.wait(timeout_s=10)
    milliseconds = 1e3 * (time.perf_counter() - begin)
    assert ticket.states() == [LoadState.READY] * len(blocks), [ticket.failure(i) for i in range(len(blocks))]
    assert all((array == kv_of_block(i)).all() for i, array in enumerate(arrays))
    print(f"got {len(blocks)} blocks back, verified, in {milliseconds:.1f} ms")


def main() -> None:
    """Both halves, or the one asked for."""
    if len(sys.argv) == 3:
        folder = Path(sys.argv[2])
        config = StoreConfig(path=folder / "blocks", disk_bytes=64 << 20, key_file=folder / "keys" / "keyring.json")
        with open_store(config) as store:
            {"put": put, "get": get}[sys.argv[1]](store)
        assert "torch" not in sys.modules
        return
    with tempfile.TemporaryDirectory() as folder:
        for half in ("put", "get"):
            subprocess.run([sys.executable, __file__, half, folder], check=True)


if __name__ == "__main__":
    main()
