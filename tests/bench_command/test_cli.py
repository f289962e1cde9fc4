"""`kvire bench` from the command line: files, tables, and mistakes that end before anything starts."""

import json
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from bench_command.conftest import PROGRAM
from bench_command.made import made_report
from harness.commands import command
from server.serving import running, tiny_engine

from kvire.bench import results
from kvire.cli.bench.arms import arms_of, without_secrets
from kvire.core.errors import ConfigError


@pytest.fixture
def bench(monkeypatch, capsys):
    """Runs `kvire bench ...`; exit status, standard output, standard error on one line."""
    monkeypatch.setenv("COLUMNS", "240")

    return command(monkeypatch, capsys, "bench")


def test_a_run_writes_what_it_prints(bench, tmp_path):
    files = tmp_path / "report.json", tmp_path / "report.html"
    with running(tiny_engine()) as one, running(tiny_engine()) as other:
        urls = ["--url", f"{one.url}/v1", "--against", f"{other.url}/v1"]
        size = ["--context", "300,500", "--repeats", 2, "--output-tokens", 2, "--scripts", 1]
        code, out, err = bench(*urls, *size, "--workload", "docqa,shortchat", "--json", files[0], "--html", files[1])
    assert code == 0, err
    report = results.read_report(files[0])
    assert report["command"][:3] == ["kvire", "bench", "--url"]
    assert {(row["arm"], row["workload"], row["context_tokens"], row["state"]) for row in report["rows"]} == {
        (arm, workload, context, state)
        for arm in "AB"
        for workload, context in (("docqa", 300), ("docqa", 500), ("shortchat", 60))
        for state in ("E", "unproved" if workload == "shortchat" else "W", "Z")
    }, "of a short chat, what is reused may be the chat template's beginning"
    assert "W warm" in out and "B over A, repeat by repeat" in out and "order statistics" in out
    assert f"written: {files[0]} written: {files[1]}" in err
    assert files[1].read_text().startswith("<!doctype html>")


def test_a_trace_is_replayed(bench, tmp_path):
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 100 * i, "input_length": 3000, "output_length": 40, "hash_ids": [0, 1, 2, 3, 10 + i, 20 + i]}
        for i in range(4)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "report.json"
    with running(tiny_engine()) as served:
        asked = ["--url", f"{served.url}/v1", "--workload", "none", "--trace", trace, "--scale", 0.1, "--repeats", 1]
        code, _, err = bench(*asked, "--json", out)
    assert code == 0, err
    empty, none = results.read_report(out)["rows"]
    assert (empty["workload"], empty["state"], none["state"]) == ("trace", "E", "Z")
    assert empty["summary"]["ideal_hit_rate"] == pytest.approx(0.5, abs=0.1)
    assert empty["summary"]["hit_rate"] == pytest.approx(empty["summary"]["ideal_hit_rate"], abs=0.1)
    early = [sample["sent_s"] < 0.1 * i for i, sample in enumerate(empty["samples"])]
    assert early == [False] * 4, "no request is sent before its time"
    assert empty["summary"]["speedup"]["median"] > 0, "both states sent the same prompts, but for a mark"


def test_the_default_measures_every_state_of_the_embedded_model(bench, monkeypatch):
    asked = {}

    def measure(arms, settings, *_, **__):
        asked.update(arms=arms, settings=settings)
        return made_report()

    monkeypatch.setattr("kvire.cli.bench.command.measure_arms", measure)
    monkeypatch.setattr("kvire.cli.bench.arms.token_ids", lambda *_: lambda prompt: tuple(prompt.text.encode()))
    code, out, err = bench()
    assert code == 0, err
    settings, [arm] = asked["settings"], asked["arms"].values()
    assert "".join(settings.states) == "EGRDZ" and settings.repeats == 5 and arm.model == "smollm2"
    assert "no state is named" in out
    bench("--store", "/a,/b", "--remote", "redis://localhost", "--options", "--kv-dtype int8")
    assert [str(arm.place) for arm in asked["arms"].values()] == ["/a", "/b"]
    assert "".join(asked["settings"].states) == "EGRDNZ"
    bench("--against", "--no-store")
    assert "".join(asked["settings"].states) == "EGZ"
    assert [arm.options for arm in asked["arms"].values()] == [(), ("--no-store",)]


def test_a_full_disk_does_not_cost_the_table(bench, monkeypatch, tmp_path):
    monkeypatch.setattr("kvire.cli.bench.command.measure_arms", lambda *_, **__: made_report())
    monkeypatch.setattr("kvire.cli.bench.arms.token_ids", lambda *_: lambda prompt: tuple(prompt.text.encode()))

    def full(*_):
        raise ConfigError("cannot write: No space left on device")

    monkeypatch.setattr("kvire.cli.bench.command.write", full)
    code, out, err = bench("--json", tmp_path / "report.json")
    assert code == 2 and "No space left" in err
    assert "device-warm" in out and "no state is named" in out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--state", "Q"], "--state takes the letters"),
        (["--state", "N"], "name one with --remote"),
        (["--context", "many"], "--context takes whole numbers"),
        (["--context", "99999"], "more than the 8192 tokens"),
        (["--workload", "nothing"], "no workload 'nothing'"),
        (["--options", "--port 1"], "--port is for `kvire bench` to set"),
        (["--options", "--kv-dtype 'float16"], "cannot be read"),
        (["--options", "--no-store", "--state", "D"], "state D needs a store"),
        (["--slo", "fast"], "--slo is written as"),
        (["--slo", "ttft=inf"], "--slo is written as"),
        (["--rate", "inf"], "--rate is a number"),
        (["--timeout", "inf"], "--timeout lies between"),
        (["--timeout", "nan"], "--timeout lies between"),
        (["--state", ""], "--state names no state"),
        (["--state", "GW"], "states G and W find the same"),
        (["--options", "--kv-dtype float8"], "--kv-dtype is one of float32"),
        (["--options", "--block-size many"], "--block-size is a whole number"),
        (["--options", "--block-size=0"], "--block-size is a whole number"),
        (["--model", "smollm2", "--url", "http://127.0.0.1:9/v1"], "whose model --served-name names"),
        (["--json", "/nowhere/report.json"], "cannot write /nowhere/report.json"),
        (["--html", "."], "cannot write ."),
        (["--url", "http://127.0.0.1:9/v1", "--state", "D"], "cannot be proved of a server behind a URL"),
        (["--url", "http://127.0.0.1:9/v1", "--options", "--no-store"], "are for the built-in engine"),
        (["--url", "http://127.0.0.1:9/v1"], "does not answer"),
        (["--url", "http://h/v1", "--against", "http://h/v1", "--served-name", "m"], "the same server"),
        (["--url", "http://h/v1", "--against", "http://h/v1/", "--served-name", "m"], "the same server"),
        (["--store", "/a,/b", "--against", "--no-store"], "name one model and one store"),
        (["--model", "nowhere"], "no model 'nowhere'"),
    ],
)
def test_mistakes_end_with_status_2_and_say_what_to_do(bench, tiny_model, args, says):
    code, _, err = bench(*([] if {"--model", "--url"} & {*args} else ["--model", tiny_model]), *args)
    assert code == 2 and says in err, err


def test_reports_are_compared(bench, tmp_path):
    paths = tmp_path / "a.json", tmp_path / "b.json"
    for path, slower in zip(paths, (1.0, 2.0), strict=True):
        results.write(made_report(slower), path)
    code, out, err = bench("compare", *paths)
    assert code == 0, err
    assert out.count("2 x (") >= 3 and "TTFT" in out
    code, out, _ = bench("compare", *paths, "--json")
    ratios = json.loads(out)["ratios"]
    assert {one["measure"] for one in ratios} == {"ttft_s", "tpot_s", "e2e_s"}
    assert next(one for one in ratios if one["state"] == "G")["ratio"]["median"] == pytest.approx(2.0)
    report = made_report()
    report["settings"]["seed"] = 7
    results.write(report, paths[1])
    code, _, err = bench("compare", *paths)
    assert code == 2 and "seed is 0 in the first and 7 in the second" in err


def test_reports_keep_no_secrets():
    words = [
        "bench",
        "--api-key",
        "k1",
        "--against-key=k2",
        "--remote",
        "redis://me:pw@host:6379/1",
        "--url",
        "http://h/v1",
    ]
    told = without_secrets(words)
    assert told == [
        "bench",
        "--api-key",
        "...",
        "--against-key=...",
        "--remote",
        "redis://...@host:6379/1",
        *words[-2:],
    ]


def test_help_needs_neither_torch_nor_charts():
    look = "import sys; sys.argv = ['kvire', 'bench', '--help']; import kvire.cli.main as main\n"
    look += "try: main.app()\nexcept SystemExit: pass\n"
    look += "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'matplotlib')))"
    done = subprocess.run([PROGRAM[0], "-c", look], check=False, capture_output=True, text=True)
    assert done.returncode == 0 and "kvire bench compare before.json after.json" in done.stdout, done.stderr


def test_each_server_is_told_its_own_key():
    class Models(BaseHTTPRequestHandler):
        def do_GET(self):
            self.server.keys.append(self.headers.get("Authorization"))
            body = b'{"data": [{"id": "m"}]}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Models) for _ in range(2)]
    for server in servers:
        server.keys = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
    url, against = (f"http://127.0.0.1:{server.server_port}/v1" for server in servers)
    given = dict.fromkeys(("model", "options", "store", "remote", "served_name", "no_reuse", "against_key"))
    given |= {"url": url, "against": against, "api_key": "k1", "timeout": 10.0}
    for options in (given, given | {"against_key": "k2"}):
        arms_of(options, SimpleNamespace(states=()))
    assert [server.keys for server in servers] == [["Bearer k1"] * 2, [None, "Bearer k2"]]
    for server in servers:
        server.shutdown()
        server.server_close()
