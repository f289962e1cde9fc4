"""Reports: written and read again, refused where they are not what they say, compared, and shown."""

import copy
import json
from html.parser import HTMLParser

import pytest
from bench_command.made import made_report

from kvire.bench import figures, html, results
from kvire.bench.compare import compare, within_run
from kvire.bench.results import first_difference
from kvire.bench.states import TierState
from kvire.core.errors import ConfigError


def test_a_report_comes_back_as_it_was_written(tmp_path):
    report = made_report()
    results.write(report, tmp_path / "report.json")
    assert results.read_report(tmp_path / "report.json") == json.loads(json.dumps(report))
    with pytest.raises(ConfigError, match="cannot write"):
        results.write(report, tmp_path / "missing" / "report.json")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda r: r.update(schema="kvire.bench/2"), "schema"),
        (lambda r: r.pop("machine"), "no machine"),
        (lambda r: r["rows"][0].pop("state"), r"rows\[0\] has no state"),
        (lambda r: r["rows"][1].update(state="X"), "no known state"),
        (lambda r: r["rows"][0]["samples"][1].update(ttft_s="1"), r"rows\[0\]\.samples\[1\] has no ttft_s"),
        (lambda r: r["rows"][0]["samples"][0].update(prompt_tokens=True), "prompt_tokens"),
        (lambda r: r["rows"][0]["passes"][0].pop("wall_s"), r"passes\[0\] has no wall_s"),
        (lambda r: r["rows"].append([]), "is no object"),
        (lambda r: r["arms"][0].pop("name"), r"arms\[0\] has no name"),
        (lambda r: r["rows"][0].pop("rate_per_s"), "has no rate_per_s"),
    ],
)
def test_what_is_no_report_is_refused_by_the_first_field_that_is_wrong(tmp_path, damage, says):
    report = made_report()
    damage(report)
    (tmp_path / "bad.json").write_text(json.dumps(report))
    with pytest.raises(ConfigError, match=says):
        results.read_report(tmp_path / "bad.json")
    for text in ("[]", "{", ""):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ConfigError, match=r"bad\.json is no"):
            results.read_report(tmp_path / "bad.json")


def test_a_speed_up_is_the_median_of_the_ratios_within_repeats():
    rows = {row["state"]: row["summary"] for row in made_report()["rows"]}
    gain = rows["G"]["speedup"]
    assert gain["median"] == pytest.approx(10.0) and (gain["low"], gain["high"]) == pytest.approx((10.0, 10.0))
    assert rows["G"]["baseline"]["ttft_s"]["median"] == 3.0
    assert rows["G"]["baseline"]["prefill_tokens_per_s"] == pytest.approx(1000 / 3.0)
    assert rows["G"]["baseline"]["break_even_bytes_per_s"] == pytest.approx(1000 / 3.0 * 46_080)
    assert "speedup" not in rows["E"] and "speedup" not in rows["Z"] and "speedup" not in rows["unproved"]
    assert rows["G"]["outputs"] == {"compared": 5, "same": 4}


def test_a_request_that_failed_is_told_and_left_out_on_both_sides():
    for failing in (TierState.G, TierState.Z):
        report = made_report(failing=failing)
        rows = {row["state"]: row["summary"] for row in report["rows"]}
        assert rows["G"]["speedup"]["median"] == pytest.approx(10.0), "the other took 100 s where it was answered"
        notes = " ".join(figures.bench_notes(report))
        assert (
            f"1 at once, {figures.state({'state': failing, 'asked': failing})}: 5 of 10 requests failed: 5 timeout."
            in notes
        )
    report["arms"].append(report["arms"][0] | {"name": "B"})
    report["rows"] += [row | {"arm": "B"} for row in made_report(failing=TierState.G)["rows"]]
    ratios = {one.row["state"]: one.ratio.median for one in within_run(report) if one.measure == "ttft_s"}
    assert ratios["G"] == ratios["Z"] == pytest.approx(1.0)
    differs = compare(made_report(), made_report(failing=TierState.G)).differs
    assert "docqa, 1,024 tokens, 1 at once, G: 5 of 10 requests failed in the second" in differs


def test_a_state_of_other_prompts_has_no_speed_up():
    report = made_report()
    rows = {row["asked"]: row for row in report["rows"]}
    assert [rows[state]["same_prompts"] for state in "EGZ"] == [False, True, True]
    report["rows"] = [rows["E"], rows["Z"]]
    assert "No gain is stated" in html.page(report).html()


def test_answers_are_compared_piece_by_piece():
    assert first_difference(("a", "b"), ("a", "b")) is None
    assert [first_difference(("a", "b"), other) for other in (("x", "b"), ("a", "c"), ("a",), ("a", "b", "c"))] == [
        0,
        1,
        1,
        2,
    ]
    assert first_difference(("a", "b"), ("ab",)) is None, "the same text, cut otherwise"


def test_a_comparison_gives_ratios_with_intervals_and_says_what_differs():
    first, second = made_report(), made_report(slower=2.0)
    second["commit"], second["machine"]["cores"] = "other", 4
    found = compare(first, second)
    ttft = {ratio.row["state"]: ratio.ratio for ratio in found.ratios if ratio.measure == "ttft_s"}
    assert set(ttft) == {"E", "G", "Z"}, "what is not proved is not compared"
    assert ttft["G"].median == pytest.approx(2.0) and 1.0 < ttft["G"].low < 2.0 < ttft["G"].high
    assert any("cores: 2 and 4" in line for line in found.differs) and any("commit" in line for line in found.differs)
    second["rows"] = [row for row in second["rows"] if row["state"] != "E"]
    assert any("E" in line for line in compare(first, second).only)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda r: (r["model"].update(name="other"), r["arms"][0]["model"].update(name="other")), "name is 'smollm2'"),
        (lambda r: r["settings"].update(output_tokens=99), "output_tokens is 16 in the first and 99"),
        (lambda r: [row.update(workload="fork") for row in r["rows"]], "the workloads are docqa and fork"),
        (lambda r: [row.update(context_tokens=9) for row in r["rows"]], "share no proved row"),
    ],
)
def test_different_things_are_not_compared(change, says):
    second = made_report()
    change(second)
    with pytest.raises(ConfigError, match=says):
        compare(made_report(), second)
    with pytest.raises(ConfigError, match="has no arm B"):
        compare(made_report(), made_report(), ("A", "B"))


def test_two_arms_of_a_run_are_compared_repeat_by_repeat():
    report, slow = made_report(), made_report(slower=3.0)
    report["arms"].append(copy.deepcopy(report["arms"][0]) | {"name": "B"})
    report["rows"] += [row | {"arm": "B"} for row in slow["rows"]]
    found = {ratio.row["state"]: ratio.ratio for ratio in within_run(report) if ratio.measure == "ttft_s"}
    assert found["G"].median == pytest.approx(3.0)
    assert (found["G"].low, found["G"].high) == pytest.approx((3.0, 3.0)), "noise that both share is gone"


def test_notes_say_what_must_not_be_overlooked():
    report = made_report()
    row = report["rows"][1]["summary"]
    row["client_saturated"], row["client_cpu"], row["speedup"]["median"] = True, 0.62, 1.05
    notes = " ".join(figures.bench_notes(report))
    assert "D was asked for, but no state is named, since 3.0 MB of the store lay in the page cache" in notes
    assert "62 % of a core" in notes and "the gain is small, 1.05 x" in notes
    assert "1 of 5 answers differ from those without reuse" in notes
    assert "later than due" not in notes
    for late, said in ((0.09, False), (0.11, True)):
        row["late_s"] = late
        assert (
            "device-warm: a request was sent 110 ms later than due" in " ".join(figures.bench_notes(report))
        ) == said
    [line] = figures.comparisons(report)
    assert (
        line.startswith("docqa, 1,024 tokens, 1 at once: ")
        and "computing everything takes 3.00 s" in line
        and "333 prompt tokens a second" in line
        and "15.4 MB/s" in line
    )


def test_lines_name_the_arm_where_there_are_two():
    report = made_report()
    report["arms"].append(report["arms"][0] | {"name": "B"})
    report["rows"] += [row | {"arm": "B"} for row in made_report()["rows"]]
    for lines in (figures.bench_notes(report), figures.comparisons(report)):
        assert lines and all("1 at once, arm A" in line or "1 at once, arm B" in line for line in lines)
    assert "docqa at 1,024 tokens, arm A, device-warm" in html.page(report).html()


class Links(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str | None] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        fetching = {"src", "href", "xlink:href", "srcset"}
        self.found += [value for name, value in attrs if name in fetching and not (value or "").startswith("#")]
        self.found += ["script"] if tag == "script" else []


def test_the_page_is_one_file_with_every_row_and_proof():
    report = made_report()
    longer = copy.deepcopy(report["rows"][1])
    longer["context_tokens"] = 2048
    report["rows"].append(longer)
    report["rows"][2]["proof"]["doubts"].append("<script>")
    report["model"]["name"] = report["rows"][0]["model"] = "<script src='x'>"
    page = html.page(report).html()
    assert Links(page).found == [] and "&lt;script&gt;" in page and "&lt;script src=" in page
    assert page.count("<svg") == 3 and "Up to 10 x: docqa at 1,024 tokens, device-warm, starts after 300 ms" in page
    for text in ("D unproved", "lay in the page cache", "300 ms (", "abc+", "token ids", "outside the server"):
        assert text in page, text
