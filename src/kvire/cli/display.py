"""Progress bars, tables and numbers for people."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

MOST_COLUMNS = 10_000
console = Console(stderr=True, highlight=False)


class LoadProgress:
    """A bar on standard error per long stage of work, as kvire.models.progress defines it."""

    def __init__(self) -> None:
        self._bars = Progress(
            TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), console=console, transient=True
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Draw nothing before the first call and after the last one: serving takes hours."""
        if stage not in self._tasks:
            self._bars.start()
            self._tasks[stage] = self._bars.add_task(stage, total=total)
        self._bars.update(self._tasks[stage], completed=done, total=total)
        if done >= total:
            self._bars.remove_task(self._tasks.pop(stage))
        if not self._tasks:
            self._bars.stop()


def seconds(value: float) -> str:
    """0.42 s, 12 ms."""
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.2f} s"


def tables_of_columns(out: Console, build: Callable[[Sequence[Any]], Table], columns: Sequence[Any]) -> Iterator[Table]:
    """One table, or several if `out` is too narrow, each with all columns that fit whole.

    build: makes a table whose columns do not wrap.
    """
    first = 0
    while first < len(columns):
        last = first + 1
        while last < len(columns) and _width(out, build(columns[first : last + 1])) <= out.width:
            last += 1
        yield build(columns[first:last])
        first = last


def _width(out: Console, table: Table) -> int:
    """The width of a table with enough room."""
    lines = out.render_lines(table, out.options.update(width=MOST_COLUMNS), pad=False)
    return max(sum(segment.cell_length for segment in line) for line in lines)
