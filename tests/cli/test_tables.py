"""Every table stays readable on a terminal of 80 columns: no word, and so no number, is broken or cut."""

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench_command.made import made_report
from cli.stores import fill
from doctor.made_logs import as_lines, time_stamp
from harness.commands import command
from replay.traces import write_lines
from rich.console import Console
from rich.table import Column, Table

from kvire.bench import results
from kvire.cli.bench.table import print_report
from kvire.cli.display import tables_of_columns
from kvire.store.keyring import Keyring


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> list[Table]:
    """The tables that are printed, on 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    tables: list[Table] = []
    print_as_before = Console.print

    def recording(console: Console, *things: object, **options: Any) -> None:
        tables.extend(thing for thing in things if isinstance(thing, Table))
        print_as_before(console, *things, **options)

    monkeypatch.setattr(Console, "print", recording)
    return tables


@pytest.fixture
def kvire(
    printed: list[Table], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., None]:
    """Runs a command and checks its tables."""
    monkeypatch.setenv("KVIRE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    run = command(monkeypatch, capsys)

    def check(*words: object) -> None:
        printed.clear()
        code, _, err = run(*words)
        assert code == 0, err
        assert printed
        for table in list(printed):
            assert_readable(table)

    return check


LONGEST_WORD = 40  # a path may be longer than a line; then all of it has to be there
EXPONENT = re.compile(r"\de[+-]\d")
BETWEEN = re.compile(r"[\s\u2500-\u257f]")  # white space and borders


def assert_readable(table: Table, columns: int = 80) -> None:
    console = Console(width=columns, record=True, file=io.StringIO())
    console.print(table)
    shown = console.export_text()
    last_line = shown.splitlines()[-1]
    assert table.box is None or last_line.endswith(table.box.bottom_right), f"wider than the terminal:\n{shown}"
    for column in table.columns:
        for cell in (column.header, *column.cells):
            for word in str(cell).split():
                text = shown if len(word) <= LONGEST_WORD else BETWEEN.sub("", shown)
                assert word in text, f"{word!r} of {cell!r} is broken in\n{shown}"
                assert not EXPONENT.search(word), f"{cell!r} is hard to read"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    entries = [
        {"t": t, "tokens": 131_073, "block_tokens": 512, "blocks": [f"{t % 2}-{i}" for i in range(256)]}
        for t in range(10)
    ]
    return write_lines(tmp_path / "trace.jsonl", entries)


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--policy", "all", "--policy", "ttl=86400", "--bytes-per-token", 131072),
        ("--policy", "all", "--capacity", "100%", "--bytes-per-token", 5),
        ("--policy", "all", "--capacity", "1M"),
        ("--tier", "memory=50%", "--tier", "disk=100%"),
        ("--capacity", "10%", "--capacity", "262143", "--bytes-per-token", 1234567),
    ],
)
def test_replay(kvire: Callable[..., None], trace: Path, options: tuple[object, ...]) -> None:
    kvire("replay", trace, *options)


def test_doctor(kvire: Callable[..., None], tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_bytes(b"\n".join(as_lines(time_stamp().bodies)))
    kvire("doctor", log)


@pytest.mark.parametrize(
    "options",
    [
        ("llama-2-7b",),
        ("gpt-oss-120b", "--hardware", "h100", "--reuse", 0.6, "--tier", "nvme5=30TB", "--usd-per-hour", 20),
        ("deepseek-v3", "--hardware", "h100", "--devices", 8, "--context", 131072, "--reuse", 0.6),
        ("qwen3.5-397b-a17b", "--hardware", "h100", "--devices", 8, "--reuse", 0.6),
        ("--cards",),
    ],
)
def test_plan(kvire: Callable[..., None], options: tuple[object, ...]) -> None:
    kvire("plan", *options)


def test_bench(kvire: Callable[..., None], tmp_path: Path) -> None:
    for name, slower in (("a", 1.0), ("b", 1.25)):
        results.write(made_report(slower), tmp_path / f"{name}.json")
    kvire("bench", "compare", tmp_path / "a.json", tmp_path / "b.json")


def test_the_report_of_a_bench(printed: list[Table]) -> None:
    print_report(made_report())
    assert printed
    for table in list(printed):
        assert_readable(table)


def test_store(kvire: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key_file = tmp_path / "keys" / "keyring.json"
    monkeypatch.setenv("KVIRE_KEY_FILE", str(key_file))
    fill(tmp_path / "store", Keyring(key_file))
    kvire("store", "ls", tmp_path / "store")


def test_models(kvire: Callable[..., None]) -> None:
    kvire("models", "ls")
    kvire("models", "show", "smollm2")


def test_a_table_that_breaks_a_word_is_noticed() -> None:
    with pytest.raises(AssertionError, match="is broken"):
        assert_readable(Table(*[f"a-rather-long-name-{i}" for i in range(9)]))


def test_columns_that_do_not_fit_go_into_further_tables() -> None:
    names = [f"policy-{i}" for i in range(9)]
    build = lambda chosen: Table(*(Column(name, no_wrap=True) for name in ("capacity,\ntokens", *chosen)))
    tables = list(tables_of_columns(Console(width=40), build, names))
    assert [str(column.header) for table in tables for column in table.columns[1:]] == names
    assert 1 < len(tables) < 9
    for table in tables:
        assert_readable(table, 40)
    (alone,) = tables_of_columns(Console(width=5), build, ["policy-0"])
    assert len(alone.columns) == 2
