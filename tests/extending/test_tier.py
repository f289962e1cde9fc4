"""A tier is a class that no file of Kvire knows, of a kind that none knows either."""

import pytest
from extending.page import shown
from harness.engines import BLOCK, ask, words
from harness.loads import engine_over, keep
from store import test_contract as contract
from store.stores import blocks, load_all, open_store, ready, save_all

from kvire.core.report import CacheReport, MissReason
from kvire.engine.client import EngineClient
from kvire.server.answers import _sum
from kvire.server.metrics import Metrics

PROMPT = words(1, 6 * BLOCK + 1)


@pytest.fixture
def tape():
    names = {}
    exec(compile(shown("class Tape"), "tape.py", "exec"), names)
    return names["Tape"]()


def test_a_tier_is_a_class(tape, tmp_path):
    with open_store(tmp_path, tape) as store:
        records = blocks(store, 8)
        save_all(store, records)
        ticket = load_all(store, records)
        assert ready(ticket) == [True] * 8
        assert {ticket.source(i) for i in range(8)} == {tape.kind}


@pytest.mark.parametrize(
    "promise",
    [
        contract.test_what_was_written_is_read,
        contract.test_what_was_not_written_is_missing,
        contract.test_groups_of_one_key_are_different_blocks,
        contract.test_the_newest_frame_counts_whatever_its_length,
        contract.test_buffers_are_filled_in_order,
        contract.test_a_frame_longer_than_the_buffers_is_damaged_and_one_as_long_is_not,
    ],
)
def test_the_tier_of_the_page_keeps_what_a_tier_promises(tape, promise):
    promise(tape)


def test_reports_and_metrics_name_its_kind(tape, tmp_path):
    with open_store(tmp_path, tape) as store:
        keep(store, PROMPT)
        with EngineClient(engine_over(store)) as client:
            report = ask(client.engine, PROMPT).cache
            exposition = Metrics(client, "tiny").text().decode()
    assert report.loaded_tokens == {"tape": 6 * BLOCK} and report.computed_tokens == 1
    assert report.reused_tokens == 6 * BLOCK and report.disk_tokens == 0
    assert report.as_dict()["tape_tokens"] == 6 * BLOCK
    assert f'kvire_prompt_tokens_total{{source="tape"}} {6.0 * BLOCK}' in exposition
    for known in ("memory", "disk", "remote"):
        assert report.as_dict()[f"{known}_tokens"] == 0
        assert f'kvire_prompt_tokens_total{{source="{known}"}} 0.0' in exposition


def test_reports_of_several_prompts_add_it_up():
    def report(kind: str) -> CacheReport:
        return CacheReport(16, 1, miss=MissReason.COMPLETE, loaded_tokens={kind: 32})

    total = _sum([report("tape"), report("disk"), report("tape")])
    assert (total["tape_tokens"], total["disk_tokens"], total["prompt_tokens"]) == (64, 32, 147)
