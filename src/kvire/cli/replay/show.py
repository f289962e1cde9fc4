"""A replay as a table and as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvire.cli.display import tables_of_columns
from kvire.core.memory import format_size
from kvire.report import charts


def print_replay(values: dict[str, Any], out: Console) -> None:
    """Print the report of `kvire.replay.report`."""
    trace = values["trace"]
    out.print(
        f"{trace['name']} ({trace['format']}): {trace['requests']:,} requests in {trace['duration_s']:,.0f} s, "
        f"{tokens(trace['input_tokens'])} input tokens, blocks of {values['block_tokens']}, "
        f"arrivals {trace['arrivals']}",
        soft_wrap=True,
    )
    out.print(
        f"with room for everything ({tokens(trace['working_set_tokens'])} tokens): "
        f"{values['ideal_hit_rate']:.1%} of the tokens hit, in {values['ideal_request_hit_rate']:.1%} of the requests",
        soft_wrap=True,
    )
    if (kv := values["kv"]) is not None:
        out.print(_kv(kv), soft_wrap=True, markup=False)
    for line in trace["skipped"]:
        out.print(f"skipped: {line}", soft_wrap=True, markup=False)
    for line in trace["notes"]:
        out.print(f"note: {line}", soft_wrap=True, markup=False)
    if "tiers" in values:
        out.print(_tiers(values))
        return
    for table in tables_of_columns(out, lambda curves: _curves(values, curves), values["curves"]):
        out.print(table)


def _kv(kv: dict[str, Any]) -> str:
    said = f"in a store, a token takes {kv['bytes_per_token']:,} bytes"
    if kv["model"] is not None:
        said += f": {kv['model']}, KV in {kv['kv_dtype']}, every layer in full"
    if kv["state_bytes_per_sequence"]:
        said += f"; recurrent states, {format_size(kv['state_bytes_per_sequence'])} each, are not counted"
    return said


def _curves(values: dict[str, Any], curves: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="share of prompt tokens that hit", title_justify="left")
    table.add_column("capacity,\ntokens", justify="right", no_wrap=True)
    points = curves[0]["points"]
    in_bytes = "capacity_bytes" in points[0]
    if in_bytes:
        table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("of working\nset", justify="right", no_wrap=True)
    for curve in curves:
        table.add_column(curve["policy"], justify="right", no_wrap=True)
    for row, point in enumerate(points):
        size = point["capacity_tokens"]
        table.add_row(
            tokens(size),
            *([format_size(point["capacity_bytes"])] if in_bytes else []),
            f"{size / values['trace']['working_set_tokens']:.1%}",
            *(f"{curve['points'][row]['hit_rate']:.3f}" for curve in curves),
        )
    return table


def _tiers(values: dict[str, Any]) -> Table:
    table = Table(title="share of prompt tokens that hit, by tier", title_justify="left")
    table.add_column("tier")
    table.add_column("capacity, tokens", justify="right")
    table.add_column("hit rate", justify="right")
    store, best = (curve["points"][0] for curve in values["curves"])
    for tier in values["tiers"]:
        table.add_row(tier["name"], tokens(tier["capacity_tokens"]), f"{store['hit_rate_by_tier'][tier['name']]:.3f}")
    table.add_section()
    table.add_row("together", tokens(store["capacity_tokens"]), f"{store['hit_rate']:.3f}")
    table.add_row("optimum", tokens(best["capacity_tokens"]), f"{best['hit_rate']:.3f}")
    return table


def tokens(count: float) -> str:
    """1.50 M, 512."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f}"


def draw_curves(values: dict[str, Any], path: Path) -> None:
    """Write the curves to `path`.

    Raises ConfigError for another ending, or an unwritable file.
    """
    labels = charts.Labels(
        values["trace"]["name"],
        "share of prompt tokens that hit against the capacity of the cache, by policy",
        "capacity, tokens",
        "share of prompt tokens that hit",
    )
    curves = [
        charts.Series(
            curve["policy"],
            y=[point["hit_rate"] for point in curve["points"]],
            x=[point["capacity_tokens"] for point in curve["points"]],
        )
        for curve in values["curves"]
    ]
    levels = [("room for everything", values["ideal_hit_rate"])]
    figure = charts.draw_lines(curves, labels, log_x=True, levels=levels)
    figure.axes[0].set_ylim(0, 1)
    charts.save(figure, labels, path)
