"""Blocks in real Redis servers; what every tier does is in test_contract.py, what broken servers do in
test_remote_faults.py.
"""

import datetime as dt
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from harness.waiting import until
from store import remote_stubs as stubs
from store import servers
from store.blocks import chain, frame_of, kv_of, tenant_key

from kvire.codec.frame import Frames
from kvire.core.errors import BlockMissing, ConfigError, FrameDamaged, TierUnavailable
from kvire.core.record import BlockRecord
from kvire.store.remote.open import open_remote
from kvire.store.remote.redis_nodes import slot_of
from kvire.store.remote.tier import RemoteTier, block_name
from kvire.store.tier import Tier

TAG = tenant_key().tag
FRAMES = Frames(tenant_key)


@pytest.fixture
def tier(redis_url: str) -> Iterator[RemoteTier]:
    opened = open_remote(redis_url, timeout_s=5)
    opened.clear()
    yield opened
    opened.close()


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


def put(tier: Tier, record: BlockRecord, ttl_s: float | None = None) -> None:
    assert tier.write(record, frame_of(record), tenant_key(record.tenant).tag, ttl_s=ttl_s)


def load(tier: Tier, record: BlockRecord) -> None:
    """What a store does with a block; raises what the store counts."""
    out = memoryview(bytearray(record.kv_bytes))
    reading = FRAMES.reading(record, out)
    reading.finish(tier.read(record.id, reading.buffers))
    assert out == kv_of(record)


def test_a_block_is_one_value_and_its_name_tells_nothing(tier, client):
    records = chain(3)
    for record in records:
        put(tier, record)
    names = {name.decode() for name in client.scan_iter()}
    assert names == {f"kvire/1/{r.id.key.hex()[:2]}/{r.id.key.hex()}-0" for r in records}
    assert all(client.get(block_name(r.id))[16:] == bytes(frame_of(r)) for r in records)


def test_what_is_not_ours_stays(tier, client):
    client.set("session:1", "x")
    client.set("kvire/2/later", "x")
    put(tier, chain(1)[0])
    assert tier.clear() == 1
    assert {"session:1", "kvire/2/later"} <= {name.decode() for name in client.scan_iter()}
    client.flushdb()


def test_a_server_that_evicts_costs_misses_only(tmp_path):
    """S50: room for a fifth of the blocks, evicted at random; then values cut, emptied and swapped."""
    options = ["--maxmemory", "6mb", "--maxmemory-policy", "allkeys-random", "--maxmemory-samples", "1"]
    with servers.redis_server(tmp_path, *options) as port, redis.Redis(port=port) as client:
        tier = open_remote(f"redis://127.0.0.1:{port}", timeout_s=5)
        records = chain(500, kv_bytes=50_000)
        for record in records:
            put(tier, record)
        rng = random.Random(1)
        outcomes = {"loaded": 0, "missing": 0}
        for _ in range(1000):
            record = rng.choice(records)
            try:
                load(tier, record)
                outcomes["loaded"] += 1
            except BlockMissing:
                outcomes["missing"] += 1
        assert outcomes["loaded"] > 20 and outcomes["missing"] > 500
        assert tier.health.healthy

        there = [record for record, here in zip(records, tier.held([r.id for r in records]), strict=True) if here]
        value = client.get(block_name(there[0].id))
        for damaged in (value[:-1], value[:100], value[:3], b"", value + b"x"):
            client.set(block_name(there[0].id), damaged)
            with pytest.raises(FrameDamaged):
                load(tier, there[0])
        client.delete(block_name(there[0].id))
        client.rpush(block_name(there[0].id), "a list")
        with pytest.raises(FrameDamaged, match="type"):
            load(tier, there[0])
        assert there[0].id in {entry.id for entry in tier.entries()}
        assert tier.delete([there[0].id], "damaged") == 1
        put(tier, there[0])
        load(tier, there[0])
        tier.close()


def test_a_full_server_refuses_and_that_is_counted(tmp_path):
    options = ["--maxmemory", "3mb", "--maxmemory-policy", "noeviction"]
    with servers.redis_server(tmp_path, *options) as port:
        tier = open_remote(f"redis://127.0.0.1:{port}", timeout_s=5)
        kept = [tier.write(r, frame_of(r), TAG, ttl_s=60) for r in chain(100, kv_bytes=50_000)]
        assert True in kept and False in kept
        assert tier.stats().refused == {"full": kept.count(False)}
        assert tier.health.healthy
        tier.close()


def test_use_prolongs_a_life_and_a_pin_lasts(redis_url, client):
    used, _, pinned = records = chain(3)
    tier = open_remote(redis_url, timeout_s=5, ttl_s=60)
    for record in records:
        put(tier, record, ttl_s=0.6)
    tier.touch([used.id])
    assert tier.pin([pinned.id], pinned=True) == 1
    put(tier, pinned, ttl_s=0.6)  # written again, it stays pinned
    time.sleep(0.8)
    assert tier.held([r.id for r in records]) == [True, False, True]
    assert 50_000 < client.pttl(block_name(used.id)) <= 60_000
    assert client.pttl(block_name(pinned.id)) == -1
    assert {entry.id: entry.pinned for entry in tier.entries()} == {used.id: False, pinned.id: True}
    tier.touch([pinned.id])
    assert client.pttl(block_name(pinned.id)) == -1
    assert tier.pin([pinned.id], pinned=False) == 1
    assert 50_000 < client.pttl(block_name(pinned.id)) <= 60_000
    tier.close()


def test_writing_again_never_shortens_a_life(redis_url, client):
    record = chain(1)[0]
    tier = open_remote(redis_url, timeout_s=5)
    put(tier, record, ttl_s=60)
    put(tier, record, ttl_s=1)
    assert client.pttl(block_name(record.id)) > 50_000
    put(tier, record, ttl_s=600)
    assert client.pttl(block_name(record.id)) > 500_000
    tier.close()


def test_many_more_blocks_than_one_request_takes(tier):
    records = chain(700, kv_bytes=50) + chain(40, seed=1, kv_bytes=50, tenant="other")
    for record in records:
        put(tier, record)
    ids = [record.id for record in records]
    assert tier.held(ids) == [True] * 740
    assert sorted(entry.id for entry in tier.entries()) == sorted(ids)
    assert tier.delete_tenant(tenant_key("other").tag) == 40
    assert tier.delete(ids, "forgotten") == 700
    assert tier.stats().evictions["forgotten"] == 740


def test_many_threads_share_few_connections(tier, client):
    records = chain(30)
    for record in records:
        put(tier, record)

    def use(_: int) -> None:
        for record in records:
            load(tier, record)
            assert tier.held([record.id]) == [True]

    with ThreadPoolExecutor(20) as pool:
        list(pool.map(use, range(20)))
    until(lambda: len(client.client_list()) <= 8 + 1)  # what is kept, and the one that asks
    tier.close()
    until(lambda: len(client.client_list()) == 1)


def test_a_connection_that_the_server_closed_is_replaced(tier, client):
    record = chain(1)[0]
    put(tier, record)
    client.client_kill_filter(skipme=True, _type="normal")
    load(tier, record)
    assert tier.stats().unavailable == 0


def test_a_restarted_server_is_an_empty_one(tmp_path):
    record = chain(1)[0]
    with servers.redis_server(tmp_path) as port:
        tier = open_remote(f"redis://127.0.0.1:{port}", timeout_s=5)
        put(tier, record)
    with pytest.raises(TierUnavailable):
        load(tier, record)
    with servers.redis_server(tmp_path, port=port):
        with pytest.raises(BlockMissing):
            load(tier, record)
        put(tier, record)
        load(tier, record)
    tier.close()


def test_logins(tmp_path):
    record = chain(1)[0]
    options = ["--requirepass", "p@ss/word", "--user", "kv", "on", ">other", "~kvire/*", "+@all"]
    with servers.redis_server(tmp_path, *options, password="p@ss/word") as port:
        here = f"127.0.0.1:{port}"
        default = open_remote(f"redis://:p%40ss%2Fword@{here}/2", timeout_s=5)
        put(default, record)
        load(default, record)
        assert default.name == f"redis://{here}/2"
        default.close()

        user = open_remote(f"redis://kv:other@{here}/2", timeout_s=5)
        load(user, record)
        user.close()

        for wrong in (f"redis://kv:p%40ss%2Fword@{here}", f"redis://{here}", f"redis://:p%40ss%2Fword@{here}/99"):
            tier = open_remote(wrong, timeout_s=5)
            with pytest.raises(TierUnavailable) as caught:
                load(tier, record)
            assert "p@ss" not in str(caught.value) and "p%40ss" not in str(caught.value) + tier.name
            tier.close()


def test_tls(tmp_path):
    certificate, key = _certificate(tmp_path)
    record = chain(1, kv_bytes=200_000)[0]
    port = servers.free_port()
    options = ["--tls-port", str(port), "--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
    options += ["--tls-ca-cert-file", str(certificate), "--tls-auth-clients", "no"]
    with servers.redis_server(tmp_path, *options):
        tier = open_remote(f"rediss://localhost:{port}?ssl_ca_certs={certificate}", timeout_s=5)
        put(tier, record)
        load(tier, record)
        load(tier, record)
        tier.close()
        stranger = open_remote(f"rediss://localhost:{port}", timeout_s=5)
        with pytest.raises(TierUnavailable, match="certificate"):
            load(stranger, record)
        stranger.close()
        trusting = open_remote(f"rediss://localhost:{port}?ssl_cert_reqs=none", timeout_s=5)
        load(trusting, record)
        trusting.close()


def test_unix_sockets(tmp_path):
    path = tmp_path / "redis.sock"
    record = chain(1)[0]
    with servers.redis_server(tmp_path, "--unixsocket", str(path)):
        tier = open_remote(f"unix://{path}?db=1", timeout_s=5)
        put(tier, record)
        load(tier, record)
        tier.close()


def test_slots_are_those_of_the_cluster(cluster_url):
    port = int(cluster_url.rpartition(":")[2])
    with redis.Redis(port=port) as client:
        for record in chain(20):
            assert slot_of(block_name(record.id)) == client.execute_command("CLUSTER", "KEYSLOT", block_name(record.id))


def test_a_cluster_spreads_blocks_and_finds_them(cluster_url):
    records = chain(60)
    tier = open_remote(cluster_url, timeout_s=5)
    for record in records:
        put(tier, record)
    assert tier.held([record.id for record in records]) == [True] * 60
    for record in records:
        load(tier, record)
    with redis.Redis(port=int(cluster_url.rpartition(":")[2])) as client:
        nodes = [redis.Redis(port=int(row[2][1])) for row in client.execute_command("CLUSTER", "SLOTS")]
    assert all(node.dbsize() > 5 for node in nodes)
    assert tier.clear() == 60
    assert [node.dbsize() for node in nodes] == [0, 0, 0]
    for node in nodes:
        node.close()
    tier.close()


def test_slots_that_move_are_followed(tmp_path):
    """ASK while a slot is under way, MOVED afterwards; the other nodes are asked when one dies."""
    record = chain(1)[0]
    name, slot = block_name(record.id), slot_of(block_name(record.id))
    with servers.redis_cluster(tmp_path) as ports:
        nodes = [redis.Redis(port=port) for port in ports]
        ids = [node.execute_command("CLUSTER", "MYID").decode() for node in nodes]
        source = slot * 3 // 16384
        target = (source + 1) % 3
        tier = open_remote(f"redis+cluster://127.0.0.1:{ports[target]},127.0.0.1:{ports[source]}", timeout_s=5)
        put(tier, record)
        other = open_remote(f"redis+cluster://127.0.0.1:{ports[target]}", timeout_s=5)
        load(other, record)
        nodes[target].execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
        nodes[source].execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
        nodes[source].execute_command("MIGRATE", "127.0.0.1", ports[target], name, 0, 5000)
        load(tier, record)
        assert tier.held([record.id]) == [True]
        for node in (target, source):
            nodes[node].execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[target])
        load(tier, record)
        put(tier, record)
        assert nodes[target].exists(name)
        assert tier.stats().unavailable == 0
        tier.close()

        nodes[source].shutdown(nosave=True)
        with pytest.raises(TierUnavailable):
            load(other, record)  # where the block was when it last asked
        load(other, record)
        other.close()
        for node in nodes:
            node.close()


def test_a_server_that_is_no_cluster_is_said_to_be_none(redis_url):
    tier = open_remote(redis_url.replace("redis://", "redis+cluster://"), timeout_s=5)
    with pytest.raises(TierUnavailable, match="use redis://"):
        load(tier, chain(1)[0])
    tier.close()


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("redis://host/one", "database is a number"),
        ("redis+cluster://host/1", "always 0 in a cluster"),
        ("redis://user:secret@a,b", "write redis\\+cluster://"),
        ("redis://user:secret@host:99999", "port"),
        ("redis://user:secret@host:0", "port"),
        ("redis://user:secret@host?timeout=3", "unknown option timeout"),
        ("rediss://host?ssl_ca_certs=/nowhere", "certificate cannot be read"),
        ("rediss://host?ssl_cert_reqs=maybe", "required or none"),
        ("http://user:secret@host", "one of redis:"),
        ("user:secret@host", "one of redis:"),
    ],
)
def test_urls_that_cannot_work_are_refused_without_their_secrets(url, hint):
    with pytest.raises(ConfigError, match=hint) as caught:
        open_remote(url)
    assert "secret" not in str(caught.value)


def _certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for localhost that signs itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "certificate.pem", folder / "key.pem"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    paths[1].write_bytes(key.private_bytes(pem, form, serialization.NoEncryption()))
    return paths


def test_a_name_that_the_server_lists_twice_counts_once():
    """SCAN may tell a name again, in one reply or in several, while the server's table grows or shrinks."""
    one, two, three = (block_name(record.id).encode() for record in chain(3))
    pages = {b"0": (b"7", [one, two, two]), b"7": (b"0", [two, three])}

    def answer(words: list[bytes]) -> bytes:
        if words[0] != b"SCAN":
            return b"+OK\r\n" if words[0] == b"CLIENT" else b":1\r\n"
        cursor, names = pages[words[1]]
        listed = b"".join(map(stubs.redis_value, names))
        return b"*2\r\n%b*%d\r\n%b" % (stubs.redis_value(cursor), len(names), listed)

    with stubs.Stub(stubs.redis_request, lambda words: iter([answer(words)])) as server:
        tier = open_remote(f"redis://127.0.0.1:{server.port}", timeout_s=5)
        assert tier.clear() == 3
        tier.close()
