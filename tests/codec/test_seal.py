"""Seals: no nonce twice, nothing readable at rest, nothing secret shown."""

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from codec.samples import OTHER_SECRET, SEALED, SECRET, UNSEALED, block, encoded, frames, read

from kvire.codec.codec import RAW
from kvire.codec.codecs.planes import Planes
from kvire.codec.frame import Header
from kvire.codec.seal import SESSION, SealSession, TenantKey, cipher, forget_ciphers
from kvire.core.errors import FrameDamaged

WRITER = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from codec.samples import SEALED, block, encoded, frames
from kvire.codec.frame import Header
record, kv = block(8)
def write(times):
    headers = [Header.parse(encoded(frames(SEALED), record, kv)) for _ in range(times)]
    return [(h.session.hex(), h.counter) for h in headers]
seen = write(5)
children = []
for _ in range(3):
    ours, theirs = os.pipe()
    if not os.fork():
        grown = write(5)
        if not os.fork():
            os.write(theirs, json.dumps(grown + write(5)).encode())
            os._exit(0)
        os.wait()
        os._exit(0)
    os.wait()
    children += json.loads(os.read(ours, 1 << 16))
assert 'torch' not in sys.modules
print(json.dumps(seen + children + write(5)))
"""


def written_by_another_process() -> list[tuple[str, int]]:
    code = [sys.executable, "-c", WRITER, os.path.dirname(os.path.dirname(__file__))]  # noqa: PTH120
    done = subprocess.run(code, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [tuple(pair) for pair in json.loads(done.stdout)]


def test_no_process_and_no_child_of_one_repeats_a_nonce():
    pairs = [pair for _ in range(3) for pair in written_by_another_process()]
    assert len(pairs) == 3 * (5 + 3 * 10 + 5)
    assert len(set(pairs)) == len(pairs)
    sessions = {session for session, _ in pairs}
    assert len(sessions) == 3 * (1 + 3 * 2)  # the process itself; and for each child itself and its own child


def test_no_thread_repeats_a_nonce():
    record, kv = block(8)
    seen: list[tuple[bytes, int]] = []

    def write() -> None:
        headers = [Header.parse(encoded(frames(SEALED), record, kv)) for _ in range(2000)]
        seen.extend((h.session, h.counter) for h in headers)

    threads = [threading.Thread(target=write) for _ in range(8)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(seen) == 16_000 and len(set(seen)) == 16_000
    assert {session for session, _ in seen} == {SESSION.next()[0]}


def test_a_session_that_is_renewed_shares_nothing_with_the_one_before():
    session = SealSession()
    before = [session.next() for _ in range(3)]
    session.renew()
    assert not {id_ for id_, _ in before} & {session.next()[0]}


def test_the_same_block_never_looks_the_same_twice():
    record, kv = block(64)
    first, second = (encoded(frames(SEALED), record, kv) for _ in range(2))
    assert first[192:] != second[192:]
    assert encoded(frames(UNSEALED), record, kv) == encoded(frames(UNSEALED), record, kv)


@pytest.mark.parametrize("codec", [RAW, Planes(2)], ids=["raw", "planes"])
def test_sealed_frames_show_neither_tokens_nor_kv_and_unsealed_ones_show_both(codec):
    """1,000 blocks; what is looked for is found by the same scan where nothing hides it."""
    found = {True: 0, False: 0}
    for seed in range(1000):
        record, mantissas = block(256, seed=seed)
        kv = mantissas
        if codec != RAW:  # like exponents, so that planes are what is written
            kv = b"".join(bytes([low, 0x3C]) for low in mantissas)
            record = replace(record, kv_bytes=len(kv))
        for key in (SEALED, UNSEALED):
            frame = bytes(encoded(frames(key, codec), record, kv))
            assert Header.parse(frame).codec == codec.id
            ids = b"".join(token.to_bytes(4, "little") for token in record.token_ids)
            # Any two neighbouring tokens, any eight bytes of KV: by chance about once in 10^13 scans.
            needles = [ids[i : i + 8] for i in range(0, 60, 4)] + [mantissas[i : i + 8] for i in range(0, 248, 8)]
            found[key is SEALED] += sum(needle in frame for needle in needles)
    assert found == {True: 0, False: 1000 * (15 + 31)}


def test_keys_show_themselves_to_nobody():
    for shown in (repr(SEALED), str(SEALED), f"{[SEALED]}"):
        assert SEALED.salt not in shown and repr(SECRET) not in shown and SECRET.hex() not in shown
    record, kv = block(8)
    frame = encoded(frames(SEALED), record, kv)
    assert SECRET not in frame and bytes.fromhex(SEALED.salt) not in frame


def test_derived_keys_are_one_per_tenant_and_session_and_can_be_dropped():
    session = bytes(16)
    mine = cipher(SECRET, session)
    assert cipher(SECRET, session) is mine
    assert cipher(OTHER_SECRET, session) is not mine and cipher(SECRET, bytes(15) + b"\1") is not mine
    forget_ciphers()
    assert cipher(SECRET, session) is not mine


def test_a_new_key_for_the_same_name_does_not_open_what_the_old_one_sealed():
    record, kv = block(64)
    old = encoded(frames(SEALED), record, kv)
    new = TenantKey(SEALED.name, SEALED.salt, OTHER_SECRET, SEALED.tag)
    with pytest.raises(FrameDamaged, match="seal"):
        read(frames(new), record, old)
    assert read(frames(SEALED), record, old) == kv
