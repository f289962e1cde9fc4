"""Every state and workload on real servers of a tiny model, and what must not be called a state."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from bench_command.conftest import PROGRAM

from kvire.bench import html, page_cache, results, run
from kvire.bench.arms import kvire_repeat
from kvire.bench.arms.kvire_repeat import KvireArm, Repeat
from kvire.bench.arms.server import RunningServer
from kvire.bench.client import ask_completion
from kvire.bench.settings import Settings
from kvire.bench.states import TIER_OF, TierState
from kvire.bench.work.prompts import message
from kvire.bench.work.tokens import token_ids
from kvire.bench.work.workloads import WORKLOADS
from kvire.core.errors import ConfigError

pytestmark = pytest.mark.slow
ROUNDED = 1e-6  # of shares


def settings(workloads: tuple[str, ...], states: str, **more) -> Settings:
    more = {"repeats": 1, "scripts": 2, "output_tokens": 3, "contexts": (480,), "at_once": (1,)} | more
    return Settings(workloads=workloads, states=tuple(map(TierState, states)), nonce=run.new_nonce(), **more)


def measured(model: Path, place: Path, plan: Settings, **more) -> results.BenchReport:
    return run.measure_arms({"A": arm(model, place, plan, **more)}, plan, lambda *_: None)


def arm(model: Path, place: Path, plan: Settings, **more) -> KvireArm:
    return KvireArm(model=str(model), settings=plan, encode=token_ids(str(model)), place=place, **more)


def doubts(report: results.BenchReport, workload: str) -> list[str]:
    rows = (row for row in report["rows"] if row["workload"] == workload and row["state"] == "unproved")
    return [f"{row['proof']['doubts']}, {[sample['miss'] for sample in row['samples']]}" for row in rows]


def states(report: results.BenchReport, workload: str) -> list[str]:
    return [row["state"] for row in report["rows"] if row["workload"] == workload]


@pytest.mark.usefixtures("no_processes")
def test_every_workload_is_proved_in_every_state(tiny_model: Path, tmp_path: Path):
    remote = (tmp_path / "remote").as_uri()
    report = measured(tiny_model, tmp_path / "place", settings(tuple(WORKLOADS), "EGRDNZ", at_once=(2,)), remote=remote)
    for workload in WORKLOADS:
        wanted = {"E", "Z"} if workload == "random" else set("EGRDNZ")
        assert set(states(report, workload)) == wanted, doubts(report, workload)
    for row in report["rows"]:
        check_row(row)
    assert not list((tmp_path / "place").iterdir()), "the stores are gone"
    path = tmp_path / "report.json"
    results.write(report, path)
    assert results.read_report(path) == json.loads(json.dumps(report))
    assert "unproved" not in html.page(report).html()


def check_row(row: results.BenchRow) -> None:
    summary, where = row["summary"], (row["workload"], row["state"])
    assert summary["errors"] == {} and summary["answered"] == summary["requests"] > 0, where
    assert all(sample["output_tokens"] == 3 for sample in row["samples"]), where
    assert all(s["cached_tokens"] <= s["ideal_tokens"] + ROUNDED for s in row["samples"]), where
    if row["state"] in TIER_OF:
        others = {"device", TIER_OF[row["state"]]}  # what the tier gave to one request, the next one has in the pool
        shares = summary["hit_by_tier"]
        assert shares[TIER_OF[row["state"]]] > 0.2 and {t for t in shares if shares[t]} <= others, where
        assert row["same_prompts"] and summary["baseline"]["break_even_bytes_per_s"] > 0, where
    compared = row["same_prompts"] and row["state"] != "Z"
    requests = summary["requests"] if compared else 0
    assert summary["outputs"] == {"compared": requests, "same": requests}, where
    assert ("speedup" in summary) == compared, where
    if row["state"] == "Z":
        assert summary["hit_rate"] == summary["ideal_hit_rate"] == 0, where


def test_processes_are_started_restarted_and_stopped(tiny_model: Path, tmp_path: Path):
    report = measured(tiny_model, tmp_path / "place", settings(("docqa",), "EGDZ"), program=PROGRAM)
    assert states(report, "docqa") == ["E", "G", "D", "Z"], doubts(report, "docqa")
    for row in report["rows"]:
        check_row(row)
    broken = arm(tiny_model, tmp_path, settings(("docqa",), "E"), options=("--kv-memory", "1"), program=PROGRAM)
    with pytest.raises(ConfigError, match=r"did not start: .*kv_memory"):
        next(iter(broken.measure(1, broken.scale, lambda _: None)))


@pytest.mark.usefixtures("no_processes")
def test_a_warm_page_cache_and_a_pool_that_was_not_flushed_are_no_states(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(page_cache, "drop", lambda _: None)
    monkeypatch.setattr(Repeat, "_flush_pool", lambda *_: None)
    report = measured(tiny_model, tmp_path, settings(("docqa",), "GRDZ"))
    assert states(report, "docqa") == ["G", "unproved", "unproved", "Z"]
    pool, pages = (row["proof"]["doubts"] for row in report["rows"] if row["state"] == "unproved")
    assert any("from the memory tier" in doubt for doubt in pool)
    assert any("lay in the page cache" in doubt for doubt in pages)
    for row in report["rows"]:
        assert ("speedup" in row["summary"]) == (row["state"] == "G")


@pytest.mark.usefixtures("no_processes")
def test_a_store_that_was_not_emptied_is_not_called_empty(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Repeat, "_store", tmp_path / "kept")
    keys = ["--key-file", str(tmp_path / "keys" / "keyring.json")]
    local_tiers = Repeat._local_tiers
    monkeypatch.setattr(Repeat, "_local_tiers", lambda self: [*local_tiers(self), *keys])
    plan = settings(("docqa",), "EDZ", repeats=2)
    report = measured(tiny_model, tmp_path / "place", plan)
    assert states(report, "docqa") == ["unproved", "D", "Z"]
    assert any("blocks lay in its store" in doubt for doubt in report["rows"][0]["proof"]["doubts"])


@pytest.mark.usefixtures("no_processes")
def test_a_node_that_still_has_its_disk_is_not_new(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    options = Repeat._options
    monkeypatch.setattr(Repeat, "_options", lambda self, *, local: options(self, local=True))
    remote = (tmp_path / "remote").as_uri()
    report = measured(tiny_model, tmp_path / "place", settings(("docqa",), "N"), remote=remote)
    assert states(report, "docqa") == ["unproved"]
    assert any("elsewhere than the remote tier" in doubt for doubt in report["rows"][0]["proof"]["doubts"])


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize("when", ["before", "during"])
def test_whoever_else_asks_spoils_the_states_from_then_on(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
):
    run_pass = kvire_repeat.send_all
    done = []

    def with_a_stranger(endpoint, scripts, *more):
        if len(done) == 1:
            ask_completion(endpoint, [message("user", "who are you?")], 1)
        done.append(run_pass(endpoint, scripts, *more))
        return done[-1]

    if when == "during":
        monkeypatch.setattr(kvire_repeat, "send_all", with_a_stranger)
    else:
        flush = RunningServer.flush
        monkeypatch.setattr(
            RunningServer,
            "flush",
            lambda self: bool(ask_completion(self.endpoint, [message("user", "?")], 1)) and flush(self),
        )
    report = measured(tiny_model, tmp_path, settings(("docqa",), "EGZ"))
    assert states(report, "docqa") == ["E", "unproved", "unproved"]
    assert all(row["proof"]["doubts"] == ["others asked the process as well"] for row in report["rows"][1:])


@pytest.mark.usefixtures("no_processes")
def test_requests_that_fail_are_no_strangers(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run_pass = kvire_repeat.send_all

    def refused(endpoint, scripts, loop, extra=None):
        done = run_pass(endpoint, scripts, loop, extra)
        lost = replace(endpoint, url=endpoint.url.replace("/v1", "/nowhere"))
        return replace(done, samples=(*done.samples, *run_pass(lost, scripts, loop, extra).samples))

    monkeypatch.setattr(kvire_repeat, "send_all", refused)
    report = measured(tiny_model, tmp_path, settings(("docqa",), "EGZ"))
    assert states(report, "docqa") == ["E", "G", "Z"], doubts(report, "docqa")
    assert all(row["summary"]["errors"] == {"http_404": 2} for row in report["rows"])


@pytest.mark.usefixtures("no_processes")
def test_two_arms_take_turns_on_the_same_words(tiny_model: Path, tmp_path: Path):
    plan = settings(("docqa",), "GZ", repeats=2)
    made = [arm(tiny_model, tmp_path, plan, options=options) for options in ((), ("--kv-dtype", "float16"))]
    said = []
    report = run.measure_arms(dict(zip("AB", made, strict=True)), plan, lambda _, __, what: said.append(what))
    order = [what.split()[4].rstrip(":") for what in said if what.endswith("first start")]
    assert order == ["A", "B", "B", "A"]
    assert [(row["arm"], row["state"]) for row in report["rows"]] == [("A", "G"), ("A", "Z"), ("B", "G"), ("B", "Z")]
    first, second = ([s["prompt_tokens"] for s in row["samples"]] for row in report["rows"] if row["state"] == "Z")
    assert sorted(first) == sorted(second)
    bytes_per_token = [arm["model"]["kv_bytes_per_token"] for arm in report["arms"]]
    assert bytes_per_token[0] == 2 * bytes_per_token[1]
