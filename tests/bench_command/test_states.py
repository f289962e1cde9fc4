"""What proves a state, and what little is enough to doubt it."""

from dataclasses import replace

import pytest

from kvire.bench import page_cache
from kvire.bench.arms.server import Traffic, parse_metrics
from kvire.bench.states import Around, Proof, SeenRequest, TierState, prove

BLOCK = 16
DISK = Around(loaded_bytes=1e6, resident_bytes=0, read_bytes=1_000_000)


def request(tier: str | None = None, reused: int = 0, *, prompt=1000, stored=900.0, inside=20.0, earlier=0.0, **also):
    tiers = dict.fromkeys(("device", "memory", "disk", "remote"), 0) | also
    if tier is not None:
        tiers[tier] += reused
    return SeenRequest(prompt, sum(tiers.values()), tiers, stored, inside, earlier)


def held(state: TierState, requests: list[SeenRequest], around: Around | None = None) -> Proof:
    return prove(state, requests, around or Around(), BLOCK)


@pytest.mark.parametrize(
    ("state", "tier", "around"),
    [
        (TierState.G, "device", Around()),
        (TierState.R, "memory", Around(loaded_bytes=1e6)),
        (TierState.D, "disk", DISK),
        (TierState.N, "remote", Around(loaded_bytes=1e6)),
    ],
)
def test_a_tier_gave_what_only_it_had(state, tier, around):
    good = [request(tier, 896), request(tier, 880, device=16 if tier != "device" else 0)]
    assert held(state, good, around).holds
    assert held(state, good, around).evidence
    other = "disk" if tier != "disk" else "memory"
    for bad in (
        [request(tier, 896), request(tier, 100)],  # most of one is missing
        [request(tier, 896), request(other, 896)],  # another tier had it
        [request(tier, 896), request()],  # nothing at all
        [],
    ):
        assert not held(state, bad, around).holds, bad
    if tier != "device":
        assert not held(state, good, replace(around, loaded_bytes=0)).holds
        assert held(state, [request(tier, 480)], around).holds, "the other half was computed meanwhile"
        slower = replace(request(), slower=True)
        assert held(state, [request(tier, 896), slower], around).holds and not held(state, [slower], around).holds
        assert "since that was faster" in held(state, [slower], around).doubts[0]
        mostly_computed = [request(tier, 896), slower, slower]
        assert not held(state, mostly_computed, around).holds, "less than half of what the tier has"
        begun = replace(request(tier, 16), slower=True)
        assert not held(state, [begun], around).holds, "a load that was given up"
        assert not held(state, good, replace(around, unwritten=True)).holds


@pytest.mark.parametrize("state", [TierState.G, TierState.W])
def test_what_requests_bring_each_other_is_not_what_the_fill_left(state):
    first = request("device", 0, inside=900.0)
    others = [request("device", 900, inside=900.0, earlier=900.0)] * 15
    assert sum(r.reused for r in others) >= 0.9 * 16 * 900
    assert held(state, [request("device", 900, inside=900.0), *others]).holds
    assert not held(state, [first, *others]).holds


def test_the_beginning_of_a_template_proves_nothing():
    assert not held(TierState.G, [request("device", 16, stored=16.0)]).holds


def test_the_pool_may_give_what_the_pass_itself_brought():
    first, next_one = request("disk", 896), request("device", 896, inside=896.0, earlier=896.0)
    assert held(TierState.D, [first, next_one], DISK).holds
    assert not held(TierState.D, [first, replace(next_one, inside=100.0)], DISK).holds
    assert not held(TierState.G, [request("device", 896, disk=1)]).holds


@pytest.mark.parametrize(
    ("around", "doubt"),
    [
        (replace(DISK, resident_bytes=4096), "lay in the page cache"),
        (replace(DISK, read_bytes=800_000), "read from storage"),
        (replace(DISK, resident_bytes=None, read_bytes=None), "does not say whether the page cache"),
        (replace(DISK, loaded_bytes=0.0), "counters know of no byte"),
    ],
)
def test_disk_warm_needs_bytes_from_the_disk(around, doubt):
    proof = held(TierState.D, [request("disk", 896)], around)
    assert any(doubt in line for line in proof.doubts)
    assert held(TierState.D, [request("disk", 896)], replace(DISK, read_bytes=None)).holds
    assert held(TierState.D, [request("disk", 896)], replace(DISK, resident_bytes=None)).holds


def test_empty_needs_an_empty_start():
    around = Around(own_process=True, stored_blocks=0)
    fresh = [request(stored=0), request("device", 20, inside=20.0)]
    assert held(TierState.E, fresh, around).holds
    assert not held(TierState.E, fresh, replace(around, own_process=False)).holds
    assert not held(TierState.E, fresh, replace(around, stored_blocks=1)).holds
    assert not held(TierState.E, [request("device", 40, inside=20.0)], around).holds
    assert held(TierState.E, [request("device", 36, inside=20.0)], around).holds  # within a block


def test_no_reuse_is_none_behind_a_salt_and_the_template_before_a_mark():
    assert prove(TierState.Z, [request()], Around(), 0).holds
    assert not prove(TierState.Z, [request(), request("device", 1)], Around(), 0).holds
    marked = SeenRequest(1000, 16, None)
    assert held(TierState.Z, [marked]).holds and not held(TierState.Z, [replace(marked, reused=17)]).holds


def test_warm_is_all_that_a_foreign_server_can_prove():
    warm = SeenRequest(1000, 850, None, stored=900.0)
    assert held(TierState.W, [warm]).holds
    assert not held(TierState.W, [replace(warm, reused=800)]).holds
    assert not held(TierState.W, [replace(warm, stored=0.0)]).holds, "nothing to find proves nothing"
    for state in (TierState.G, TierState.R, TierState.D, TierState.N):
        assert held(state, [warm], DISK).doubts == ("the server does not say where reused tokens came from",)
    for state in (TierState.E, TierState.W, TierState.Z):
        assert held(state, [replace(warm, reused=None)]).doubts == (
            "the server does not say how many prompt tokens it reused",
        )


def test_the_beginning_of_a_template_is_not_warm():
    def warm(reused, stored):
        return prove(TierState.W, [SeenRequest(200, reused, None, stored=stored)], Around(), 64)

    assert not warm(64, 49.0).holds and not warm(64, 100.0).holds
    assert warm(98, 100.0).holds and not warm(80, 100.0).holds


@pytest.mark.parametrize(("state", "tier"), [(TierState.G, "device"), (TierState.W, "device"), (TierState.R, "memory")])
def test_more_than_the_fill_had_was_sent_before(state, tier):
    around = Around(loaded_bytes=1e6)
    assert held(state, [request(tier, 916)], around).holds
    proof = held(state, [request(tier, 999)], around)
    assert any("more than the 900 that the fill had" in doubt for doubt in proof.doubts)
    assert held(state, [request(tier, 999, inside=999.0)], around).holds, "another request of the pass brought it"


@pytest.mark.parametrize("state", [TierState.E, TierState.G, TierState.R, TierState.D, TierState.Z])
def test_whoever_else_asks_spoils_every_state(state):
    tier = {TierState.G: "device", TierState.R: "memory", TierState.D: "disk"}.get(state)
    seen = [request(tier, 896 if tier else 0)]
    assert held(state, seen, replace(DISK, own_process=True)).holds
    assert held(state, seen, replace(DISK, own_process=False)).doubts == ("others asked the process as well",)


def test_prompts_of_others_are_told_from_those_that_were_never_counted():
    def counted(n):
        return parse_metrics(f"kvire_prompts_total {n}")

    traffic = Traffic()
    traffic.check(counted(2.0), sent=2)
    traffic.check(counted(5.0), sent=4)  # one was refused, or is counted late
    traffic.check(counted(6.0))
    assert traffic.ours
    traffic.check(counted(7.0))
    traffic.check(counted(8.0), sent=1)
    assert not traffic.ours


def test_a_store_in_use_may_lose_segments_meanwhile(tmp_path, monkeypatch):
    kept, empty, gone = (tmp_path / f"{name}.seg" for name in ("kept", "empty", "gone"))
    kept.write_bytes(b"x" * 10_000)
    empty.touch()
    monkeypatch.setattr(page_cache, "_files", lambda _: iter([gone, empty, kept]))
    assert page_cache.resident_bytes(tmp_path)
    page_cache.drop(tmp_path)
    assert page_cache.resident_bytes(tmp_path) == 0


def test_pages_are_seen_and_dropped(tmp_path):
    (tmp_path / "segments").mkdir()
    path = tmp_path / "segments" / "0-1.seg"
    path.write_bytes(b"x" * 1_000_000)
    (tmp_path / "index").write_bytes(b"y" * 100_000)
    assert page_cache.resident_bytes(tmp_path) in range(1_000_000, 1_004_096)
    page_cache.drop(tmp_path)
    assert page_cache.resident_bytes(tmp_path) == 0
    with path.open("rb") as file:
        file.read(10)
    assert page_cache.resident_bytes(tmp_path)
    assert path.read_bytes() == b"x" * 1_000_000
