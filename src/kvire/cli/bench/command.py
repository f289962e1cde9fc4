"""`kvire bench`: the gain of the cache on this machine, in proved tier states."""

import signal
import sys
from pathlib import Path
from typing import Annotated, Any, Self

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvire.bench.compare import compare as compared
from kvire.bench.html import page
from kvire.bench.results import read_report, write
from kvire.bench.run import measure_arms
from kvire.cli import options as opt
from kvire.cli.bench.arms import arms_of, check_outputs, settings_of, without_secrets
from kvire.cli.bench.options import ASKED, WRITTEN
from kvire.cli.bench.table import print_comparison, print_report
from kvire.cli.display import console
from kvire.core.errors import ConfigError

bench = typer.Typer(invoke_without_command=True, add_completion=False)


@bench.callback()
@opt.with_options(asked=ASKED, written=WRITTEN)
def run(
    ctx: typer.Context,
    *,
    asked: dict[str, Any],
    written: dict[str, Any],
) -> None:
    """Measure the gain of the cache: the same questions with KV in each tier, and without.

    States: KV nowhere, in the pool, in memory, on disk, and without reuse.

    A state is named only if counters prove it.

    The default takes less than ten minutes on two cores; nothing else should run meanwhile.

        kvire bench --html report.html

        kvire bench --context 512,2048 --workload docqa --against "--kv-dtype float16"

        kvire bench --url http://127.0.0.1:8080/v1 --json other.json

        kvire bench compare before.json after.json
    """
    if ctx.invoked_subcommand is not None:
        return

    check_outputs(*written.values())
    settings = settings_of(asked)
    arms = arms_of(asked, settings)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that started servers end as well
    with _Steps() as steps:
        report = measure_arms(arms, settings, steps, command=["kvire", *without_secrets(sys.argv[1:])])
    print_report(report)  # before the files: a full disk must not cost the run
    if written["json_file"] is not None:
        write(report, written["json_file"])
    if written["html_file"] is not None:
        page(report).write(written["html_file"])
    for path in filter(None, written.values()):
        console.print(f"written: {path}", markup=False, soft_wrap=True)


@bench.command()
def compare(
    first: Annotated[Path, typer.Argument(help="A report that `kvire bench --json` wrote.", show_default=False)],
    second: Annotated[Path, typer.Argument(help="The one to set beside it.", show_default=False)],
    arms: Annotated[
        str, typer.Option(help="Which arm of each, such as AB: arm A of the first, B of the second.")
    ] = "AA",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Set two reports side by side: second over first, row by row, with intervals.

    Below 1, the second is faster.

    Reports of different models or workloads are refused.

        kvire bench compare before.json after.json
    """
    if len(arms) != 2:
        raise ConfigError(f"--arms names one arm of each report, such as AA or AB; got {arms!r}")
    print_comparison(compared(read_report(first), read_report(second), (arms[0], arms[1])), as_json=as_json)


class _Steps:
    """A bar on standard error."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self._bars = Progress(*columns, console=console, transient=True)
        self._task = self._bars.add_task("starting", total=None)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def __call__(self, step: int, steps: int, what: str) -> None:
        """A step begins; earlier ones are done."""
        self._bars.update(self._task, completed=step - 1, total=steps, description=what)
