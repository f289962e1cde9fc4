"""Servers behind a URL: three states, by their own count of cached tokens, and nothing that cannot be proved."""

import pytest
from bench_command.streams import DONE, END, piece, scripted, usage
from server.serving import running, tiny_engine

from kvire.bench import run
from kvire.bench.arms.url import UrlArm, check_states
from kvire.bench.client import Endpoint
from kvire.bench.settings import Settings
from kvire.bench.states import TierState
from kvire.bench.work.prompts import TokenScale
from kvire.core.errors import ConfigError


def settings(states="EWZ", **more):
    more = {"workloads": ("docqa",), "contexts": (400,), "at_once": (1,), "repeats": 2, "output_tokens": 3} | more
    return Settings(states=tuple(map(TierState, states)), nonce=run.new_nonce(), **more)


def measured(url, plan, no_reuse=None):
    return run.measure_arms({"A": UrlArm(Endpoint(url, "tiny"), plan, no_reuse)}, plan, lambda *_: None)


def test_a_foreign_server_is_empty_warm_or_reuses_nothing():
    with running(tiny_engine()) as served:
        report = measured(
            f"{served.url}/v1", settings(workloads=("docqa", "shared", "multiturn", "fork"), at_once=(2,))
        )
    assert [(row["workload"], row["proof"]) for row in report["rows"] if not row["proof"]["holds"]] == []
    for row in report["rows"]:
        assert row["summary"]["outputs"]["compared"] == 0, "marked prompts are other prompts"
        assert row["summary"]["baseline"]["break_even_bytes_per_s"] is None, "nobody knows its bytes per token"
        assert ("speedup" in row["summary"]) == (row["state"] == "W"), "marked prompts take as long as others"
        if row["state"] == "W":
            assert row["summary"]["hit_rate"] == pytest.approx(row["summary"]["ideal_hit_rate"], abs=0.12)
    assert {row["state"] for row in report["rows"]} == {"E", "W", "Z"}


def test_with_a_field_against_reuse_answers_are_compared():
    with running(tiny_engine()) as served:
        report = measured(f"{served.url}/v1", settings(), {"cache_salt": "{unique}"})
    by_state = {row["state"]: row for row in report["rows"]}
    assert set(by_state) == {"E", "W", "Z"}
    assert by_state["W"]["summary"]["outputs"] == {"compared": 4, "same": 4}
    assert by_state["Z"]["summary"]["hit_rate"] == 0.0


def test_where_empty_and_no_reuse_send_the_same_prompts_they_are_compared():
    with running(tiny_engine()) as served:
        report = measured(f"{served.url}/v1", settings("EZ", workloads=("random",)), {"cache_salt": "{unique}"})
    empty, none = report["rows"]
    assert (empty["state"], none["state"], empty["same_prompts"]) == ("E", "Z", True)
    assert empty["summary"]["outputs"] == {"compared": 4, "same": 4} and empty["summary"]["speedup"]["n"] == 2
    assert none["summary"]["outputs"]["compared"] == 0 and "speedup" not in none["summary"]


def test_every_server_is_warmed_up_before_the_first_pass():
    asked = []

    class Noting(UrlArm):
        @property
        def scale(self):
            asked.append(self)
            return TokenScale(1.0, 0.0)

        def measure(self, *given):
            assert asked == list(made.values())
            return super().measure(*given)

    with scripted([piece("a"), END, usage(1000, 2, 0), DONE]) as (one, _), scripted([DONE]) as (other, _):
        plan = settings("E", repeats=1)
        made = {name: Noting(Endpoint(url, "m"), plan) for name, url in (("A", one), ("B", other))}
        run.measure_arms(made, plan, lambda *_: None)


@pytest.mark.parametrize(("no_reuse", "second"), [(None, "ZEW"), ({"cache_salt": "{unique}"}, "EWZ")])
def test_what_sends_the_same_texts_comes_last(no_reuse, second):
    plan, said = settings(), []
    with running(tiny_engine()) as served:
        arm = UrlArm(Endpoint(f"{served.url}/v1", "tiny"), plan, no_reuse)
        run.measure_arms({"A": arm}, plan, lambda *step: said.append(step[-1][-1]))
    assert "".join(said) == "EWZ" + second


def test_a_server_that_remembers_nothing_is_never_called_warm():
    with running(tiny_engine(prefix_cache=False)) as served:
        report = measured(f"{served.url}/v1", settings())
    assert [row["state"] for row in report["rows"]] == ["E", "unproved", "Z"]
    assert "that the fill had" in report["rows"][1]["proof"]["doubts"][0]
    assert "speedup" not in report["rows"][1]["summary"]


def test_a_server_that_reuses_in_spite_of_the_mark_is_unproved():
    script = [piece("a"), piece("b"), END, usage(1000, 2, 900), DONE]
    with scripted(script) as (url, _):
        plan = settings("EZ")
        arm = UrlArm(Endpoint(url, "m"), plan)
        vars(arm)["scale"] = TokenScale(1.0, 0.0)
        report = run.measure_arms({"A": arm}, plan, lambda *_: None)
    assert {row["state"] for row in report["rows"]} == {"unproved"}


def test_a_server_that_does_not_count_cached_tokens_proves_nothing():
    script = [piece("a"), piece("b"), END, usage(1000, 2), DONE]
    with scripted(script) as (url, _):
        plan = settings("EWZ")
        arm = UrlArm(Endpoint(url, "m"), plan)
        vars(arm)["scale"] = TokenScale(1.0, 0.0)
        report = run.measure_arms({"A": arm}, plan, lambda *_: None)
    assert {row["state"] for row in report["rows"]} == {"unproved"}
    assert all("does not say how many" in row["proof"]["doubts"][0] for row in report["rows"])
    assert report["rows"][0]["summary"]["ttft_s"]["n"] == 2, "times are times all the same"


@pytest.mark.parametrize("state", ["G", "R", "D", "N"])
def test_states_that_would_have_to_be_believed_are_refused(state):
    with pytest.raises(ConfigError, match="cannot be proved of a server behind a URL"):
        check_states([TierState.E, TierState(state)])


def test_a_server_that_counts_no_tokens_is_refused():
    with (
        scripted([piece("a"), END, DONE]) as (url, _),
        pytest.raises(ConfigError, match="does not count prompt tokens"),
    ):
        measured(url, settings())
    for constant in (0, 40):
        with (
            scripted([piece("a"), END, usage(constant, 1), DONE]) as (url, _),
            pytest.raises(ConfigError, match="no measure of length"),
        ):
            measured(url, settings())
    with scripted(["x"], 503) as (url, _), pytest.raises(ConfigError, match="answered http_503"):
        measured(url, settings())
