"""What the benchmarks report must be what they measured: waste counted right, a missed bar shown as missed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from harness.engines import BLOCK, tiny_engine
from server.serving import running
from server.serving import tiny_engine as served_engine

from kvire.engine.request import Request, SamplingParams

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(autouse=True)
def bench_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))


def submit(engine, name: str, ids: list[int]) -> None:
    engine.submit(Request(name, tuple(ids), SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)))


def test_waste_counts_a_shared_block_once_and_only_written_slots():
    from pool_waste import slots  # noqa: PLC0415  (bench is on the path only within a test)

    engine = tiny_engine(max_batch_tokens=BLOCK + 4, max_num_seqs=2)
    prefix = list(range(2 * BLOCK))
    submit(engine, "a", [*prefix, 100])
    engine.step()  # computes 20 of its 33 tokens, in 3 blocks
    waste, reserved = slots(engine)
    assert (waste, reserved) == (28 / 48, 13 / 48)

    engine.step()
    assert slots(engine) == (15 / 48, 0)
    submit(engine, "b", [*prefix, 101])
    engine.step()  # b shares two blocks and fills one slot of a third; a has 34 tokens by now
    assert slots(engine) == ((64 - 32 - 2 - 1) / 64, 0)


def test_a_roofline_counts_arithmetic_and_reads():
    from limits import Roofline  # noqa: PLC0415

    machine = Roofline(body=100, head=10, pair_flops=4, kv_bytes_per_token=8, flops=1e3, read_bytes=1e3)
    assert machine.decode_s(1, 5) == (110 * 4 + 5 * 8) / 1e3  # bound by reads
    assert machine.prefill_s(10) == (2 * 100 * 10 + 2 * 10 + 4 * 50) / 1e3  # bound by arithmetic
    assert machine.prefill_s(10, reused=100) == (2000 + 20 + 4 * (1000 + 50)) / 1e3


def test_the_page_says_which_bars_are_missed(tmp_path):
    from reporting import Bar, figure  # noqa: PLC0415

    table = [
        figure("fast", "x", [3.0, 1.0, 2.0], bar=Bar(">=", 2)),
        figure("slow", "x", [1.0, 1.9, 5.0], bar=Bar(">=", 2)),
    ]
    where = {"cpu": "some", "threads": 2, "torch": "2", "commit": "abc"}
    report = {"machine": where, "break_even_mb_s": 30.0, "skipped": ["vLLM: not here"], "table": table}
    (tmp_path / "serving.json").write_text(json.dumps(report))
    subprocess.run([sys.executable, BENCH / "table.py", tmp_path], check=True, capture_output=True)
    page = (tmp_path / "README.md").read_text()
    assert "| fast | 2 x (1 to 3) | 30 MB/s | >= 2 | yes |" in page
    assert "| slow | 1.9 x (1 to 5) | 30 MB/s | >= 2 | **no** |" in page
    assert "vLLM: not here" in page and "commit abc." in page


@pytest.mark.parametrize(
    ("work", "answers", "cold"), [("docqa", 4, 1), ("multiturn", 6, 1), ("again", 5, 1), ("shared", 3, 0)]
)
def test_the_client_counts_what_was_answered_and_reused(tmp_path, work, answers, cold):
    out = tmp_path / "rows.json"
    with running(served_engine()) as served:
        call = [sys.executable, BENCH / "workloads.py", "--url", f"{served.url}/v1", "--model", "tiny", "--work", work]
        call += ["--doc-words", "20", "--max-tokens", "4", "--concurrency", "3", "--out", out]
        subprocess.run(call, check=True)
    rows = json.loads(out.read_text())
    assert [row["out"] for row in rows] == [4] * answers
    assert [row["state"] for row in rows].count("cold") == cold
    assert all(0 < row["ttft_ms"] <= row["e2e_ms"] for row in rows)
    warm = [row for row in rows if row["state"] == "warm"]
    assert all(row["cached"] > 100 for row in warm)  # a token is a byte: most of twenty words
    assert min(row["cached"] for row in rows) == 0  # whoever came first


def test_reports_keep_their_rows_and_leave_their_samples_in_the_build_folder(tmp_path, monkeypatch):
    import reporting  # noqa: PLC0415

    monkeypatch.setattr(reporting, "RAW_FOLDER", tmp_path / "build")
    table = [reporting.figure("fast", "x", [3.0, 1.0, 2.0])]
    reporting.write(tmp_path / "some.json", {"machine": {"threads": 2}, "table": table, "samples": {"fast": [3.0]}})
    kept, raw = (json.loads((folder / "some.json").read_text()) for folder in (tmp_path, tmp_path / "build"))
    assert kept["machine"] == raw["machine"] == {"threads": 2} and "samples" not in kept
    assert kept["table"][0]["median"] == 2.0 and "samples" not in kept["table"][0]
    assert raw["table"][0]["samples"] == [3.0, 1.0, 2.0] and raw["samples"] == {"fast": [3.0]}


def test_committed_results_are_small_and_hold_no_samples():
    results = sorted((BENCH.parent / "docs" / "results").iterdir())
    assert {path.suffix for path in results} == {".json", ".md"}
    assert sum(path.stat().st_size for path in results) < 300_000
