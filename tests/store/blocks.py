"""Blocks for tests: records of real chains, with KV that follows from the key, so that any mix-up shows."""

import hashlib
from collections.abc import Sequence

import numpy as np

from kvire.codec.frame import Frames
from kvire.codec.seal import TenantKey
from kvire.core.keys import Namespace, block_keys, content_ids
from kvire.core.record import BlockId, BlockRecord
from kvire.store.ticket import Wanted

TOKENS = 16
KV_BYTES = 6_000  # no multiple of anything
SECRET = b"s" * 32


def tenant_key(name: str = "", *, secret: bytes | None = None) -> TenantKey:
    """The same one for the same name."""
    salt = hashlib.sha256(f"salt {name}".encode()).hexdigest()
    return TenantKey(name, salt, secret, hashlib.sha256(f"tag {name}".encode()).digest()[:16])


def namespace(salt: str = "", **changed: str) -> Namespace:
    fields = {"weights": "w", "config": "c", "numerics": "n", "kv_dtype": "float16", "spec": "s", "block_size": TOKENS}
    return Namespace(**(fields | changed), salt=salt)


def records_of(
    token_ids: Sequence[int],
    *,
    tenant: str = "",
    salt: str | None = None,
    group: int = 0,
    kv_bytes: int = KV_BYTES,
    **fields: str,
) -> list[BlockRecord]:
    """The full blocks of a prompt."""
    salt = tenant_key(tenant).salt if salt is None else salt
    root = namespace(salt, **fields).root
    keys = block_keys(root, token_ids, TOKENS)
    contents = content_ids(salt, token_ids, [TOKENS * (i + 1) for i in range(len(keys))])
    return [
        BlockRecord(
            id=BlockId(key, group),
            parent=keys[i - 1] if i else root,
            root=root,
            index=i,
            token_ids=tuple(token_ids[i * TOKENS : (i + 1) * TOKENS]),
            kv_bytes=kv_bytes,
            content=contents[i],
            tenant=tenant,
        )
        for i, key in enumerate(keys)
    ]


def chain(count: int, seed: int = 0, **options) -> list[BlockRecord]:
    """`count` blocks of a prompt of its own."""
    rng = np.random.default_rng(seed)
    return records_of([int(x) for x in rng.integers(0, 50_000, count * TOKENS)], **options)


def kv_of(record: BlockRecord, version: int = 0) -> memoryview:
    """The block's KV; read-only."""
    seed = int.from_bytes(record.id.key[:8], "little") + record.id.group + 1_000_003 * version
    return memoryview(np.random.default_rng(seed).bytes(record.kv_bytes))


def frame_of(record: BlockRecord, *, key: TenantKey | None = None, version: int = 0) -> memoryview:
    """The block as an unsealed frame of its tenant."""
    frames = Frames(lambda name: key or tenant_key(name))
    out = memoryview(bytearray(frames.frame_bytes(record)))
    return out[: frames.encode(record, kv_of(record, version), out)]


def wanted(records: Sequence[BlockRecord], poison: int = 0xEE) -> list[Wanted]:
    """Destinations that hold a pattern until something is loaded."""
    return [Wanted(record, memoryview(bytearray([poison]) * record.kv_bytes)) for record in records]
