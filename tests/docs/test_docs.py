"""The docs are true: examples run, every command, option and parameter is described."""

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import typer.main
from harness.engines import tiny_engine

from kvire.cli.main import cli
from kvire.core.config import EngineConfig
from kvire.core.report import CacheReport, MissReason
from kvire.engine.client import EngineClient
from kvire.engine.request import SamplingParams
from kvire.server.metrics import Metrics

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WRITTEN = [*PAGES, *sorted((ROOT / "docs" / "adr").glob("*.md")), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
LINE_CHARACTERS = 100
REFERENCE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")


def examples() -> list[tuple[str, str]]:
    """Fenced Python blocks of all pages, except those marked no-run (they need a running server)."""
    found = []
    for page in PAGES:
        for i, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)):
            found.append((f"{page.name}-{i}", code))
    return found


@pytest.mark.model
@pytest.mark.parametrize(("name", "code"), examples(), ids=lambda part: part if len(part) < 40 else "")
def test_examples_run(
    name: str, code: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # what an example keeps goes with the test
    exec(compile(code, name, "exec"), {"__name__": "example"})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_example_files_run(path: Path) -> None:
    done = subprocess.run([sys.executable, path], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def heading_anchors(page: Path) -> set[str]:
    """GitHub's anchors of a page: headings in lower case, without punctuation, joined by dashes."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            linked = page.parent / target if target else page
            assert linked.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in heading_anchors(linked), f"{page.name}: {target}#{anchor}"


def long_prose_lines(text: str) -> list[str]:
    """Lines over LINE_CHARACTERS outside code and tables; the target of a link does not count."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    lines = [line for line in prose.splitlines() if not line.lstrip().startswith("|") and not line.startswith("    ")]
    return [line for line in lines if len(re.sub(r"\]\([^)]*\)", "]", line)) > LINE_CHARACTERS]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_prose_is_wrapped(page: Path) -> None:
    assert not long_prose_lines(page.read_text(encoding="utf-8"))


def test_every_command_is_described() -> None:
    group = typer.main.get_command(cli)
    for name, command in group.commands.items():
        for full in [f"{name} {sub}" for sub in getattr(command, "commands", {})] or [name]:
            assert f"`kvire {full}" in REFERENCE, full


@pytest.mark.parametrize("record", [EngineConfig, SamplingParams], ids=lambda record: record.__name__)
def test_every_option_is_described(record: type) -> None:
    for field in fields(record):
        assert f"| `{field.name}` |" in REFERENCE, field.name
        assert re.search(rf"\b{field.name}\b", record.__doc__ or ""), f"{record.__name__}: {field.name}"


def test_every_miss_reason_is_described() -> None:
    for reason in MissReason:
        assert f"`{reason}`" in REFERENCE, reason
    for name in ("computed_tokens", "recomputed_tokens", "preemptions"):
        assert name in REFERENCE
        assert name in {f.name for f in fields(CacheReport)}


def test_the_readme_is_short_enough_to_read() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_every_metric_is_described() -> None:
    page = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
    with EngineClient(tiny_engine()) as client:
        exposition = Metrics(client, "tiny").text().decode()
    names = set(re.findall(r"# TYPE (\w+)", exposition))
    assert len(names) > 15
    for name in names:
        if not name.endswith("_created"):  # prometheus-client adds these
            assert re.search(rf"`{name}(\{{[a-z,]+\}})?`", page), name
