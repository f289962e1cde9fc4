"""Stores for the tests of `kvire store`: filled by the real tiers, with blocks of a few kilobytes."""

import contextlib
import json
import select
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from harness.waiting import PATIENCE_S
from store.blocks import kv_of, namespace, records_of

from kvire.codec.frame import Frames
from kvire.core.errors import TierUnavailable
from kvire.core.record import BlockRecord
from kvire.store.disk.tier import DiskTier
from kvire.store.keyring import Keyring
from kvire.store.remote.open import open_remote
from kvire.store.remote.tier import RemoteTier

CAPACITY_BYTES = 128 << 20  # more than a writer fills during a test
SPEC = "full layers=0,1 heads=1 k=4 v=4 window=0"
HOUR_S = 3600.0
BLOCKS = 12  # that fill() stores: 3 shared, 2 and 1 of their own, 3 of another engine, 3 of another tenant

Tier = DiskTier | RemoteTier


def open_tier(where: Path | str, *, age_s: float = 0.0) -> Tier:
    """A tier that says its blocks are so old."""
    if isinstance(where, str):
        return open_remote(where, timeout_s=PATIENCE_S)
    return DiskTier(where, CAPACITY_BYTES, wall=lambda: time.time() - age_s)


def frame_of(keyring: Keyring, record: BlockRecord) -> memoryview:
    frames = Frames(keyring.tenant)
    out = memoryview(bytearray(frames.frame_bytes(record)))
    return out[: frames.encode(record, kv_of(record), out)]


def prompt(keyring: Keyring, token_ids: Sequence[int], *, tenant: str = "", **fields) -> list[BlockRecord]:
    """The blocks of a prompt, under the tenant's own salt."""
    salt = keyring.tenant(tenant).salt
    return records_of(token_ids, tenant=tenant, salt=salt, **({"spec": SPEC} | fields))


def put(tier: Tier, keyring: Keyring, records: Sequence[BlockRecord], *, ttl_s: float | None = None) -> None:
    for record in records:
        assert tier.write(record, frame_of(keyring, record), keyring.tenant(record.tenant).tag, ttl_s=ttl_s)


def fill(where: Path | str, keyring: Keyring, *, age_s: float = 0.0) -> dict[str, list[BlockRecord]]:
    """Two prompts that share three blocks, one of another engine, and one of another tenant."""
    shared = list(range(48))
    prompts = {
        "long": prompt(keyring, shared + [7] * 32),
        "short": prompt(keyring, shared + [8] * 16),
        "half": prompt(keyring, shared, kv_dtype="int8"),
        "other": prompt(keyring, shared, tenant="other"),
    }
    with contextlib.closing(open_tier(where, age_s=age_s)) as tier:
        for records in prompts.values():
            put(tier, keyring, records)
        if isinstance(tier, DiskTier):
            for tenant, changed in (("", {}), ("", {"kv_dtype": "int8"}), ("other", {})):
                noted = namespace(keyring.tenant(tenant).salt, **({"spec": SPEC} | changed))
                tier.note_namespace(noted.root, noted.public_fields())
    return prompts


def held(where: Path | str, records: list) -> list[bool]:
    with contextlib.closing(open_tier(where)) as tier:
        return tier.held([record.id for record in records])


def write_until_told(folder: str, key_file: str) -> None:
    """A writer like a server: blocks of ever new prompts, until standard input ends; then what it could not do.

    A write that comes when the index is busy is tried again, as a server would with its next block.
    """
    keyring, seed, errors = Keyring(Path(key_file)), 0, []
    print("ready", flush=True)
    with DiskTier(Path(folder), CAPACITY_BYTES) as tier:
        end = time.monotonic() + 60
        while time.monotonic() < end and not select.select([sys.stdin], [], [], 0.002)[0]:
            seed += 1
            records, last_try = prompt(keyring, [seed] * 32), time.monotonic() + 20
            while True:
                try:
                    put(tier, keyring, records)
                    break
                except TierUnavailable as error:
                    if time.monotonic() > last_try:
                        errors.append(repr(error))
                        break
    print(json.dumps({"prompts": seed, "errors": errors}))


if __name__ == "__main__":
    write_until_told(sys.argv[1], sys.argv[2])
