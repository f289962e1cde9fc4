"""`kvire plan`: the size of a model's KV, the gain of keeping it, and the hardware to buy."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvire.bench.results import read_report
from kvire.cli import options as opt
from kvire.cli.lazy import deferred
from kvire.cli.plan import options as groups
from kvire.cli.plan import show as plan_show
from kvire.cli.plan.picture import draw_plan
from kvire.cli.plan.show import show_check
from kvire.core.cache_folder import write_json
from kvire.core.errors import ConfigError
from kvire.models.planned import find_model
from kvire.plan import make
from kvire.plan.calibration import calibration_file
from kvire.plan.cards import cards as all_cards
from kvire.plan.check import check_times
from kvire.plan.make import MEASURED, Hardware
from kvire.plan.plan import Plan, PlannedModel, predictor
from kvire.plan.read_shape import read_shape
from kvire.plan.report import as_text, plan_values
from kvire.plan.shape import Storage
from kvire.plan.sizing import ServingUse
from kvire.report.charts import picture_kind

calibration = deferred("kvire.cli.plan.calibrate")

EPILOG = (
    "Example: kvire plan llama-3.1-8b --hardware h100 --context 32768 --users 20 --reuse 0.6 --sessions 500 "
    "--tier ram=512GB --tier nvme4=4TB"
)


@opt.with_options(model=groups.MODEL, machine=groups.MACHINE, reuse=groups.REUSE, use=groups.USE, money=groups.MONEY)
def plan(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A card (--cards), a transformers directory, a config.json, a .gguf file, or a hub id.",
            show_default=False,
        ),
    ] = None,
    cards: Annotated[
        bool, typer.Option("--cards", help="List the models that Kvire knows without having them.")
    ] = False,
    calibrate: Annotated[
        bool,
        typer.Option("--calibrate", help="Measure this machine first, about a minute with smollm2; it is remembered."),
    ] = False,
    check: Annotated[
        Path | None,
        typer.Option(help="A report of kvire bench: set the prediction beside it.", show_default=False),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw KV against context into this .svg or .png.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON (schema kvire.plan/1).")] = False,
    *,
    model: dict[str, Any],
    machine: dict[str, Any],
    reuse: dict[str, Any],
    use: dict[str, Any],
    money: dict[str, Any],
) -> None:
    """Bytes per token, users per machine, break-even bandwidth, times per tier, prices.

    The answer: buy X GB of Y, or nothing.

    Bytes are exact, by the model's config; times are estimates unless this machine was measured
    (--calibrate).
    """
    out = Console(highlight=False)
    if cards:
        _list_cards(out, as_json=as_json)
        return
    if name is None:
        raise ConfigError("say which model: kvire plan MODEL; kvire plan --cards lists those known here")
    if check is not None and picture is not None:
        raise ConfigError("--check draws no picture: leave out one of the two options")
    if picture is not None:
        picture_kind(picture)
    found, kept = _find(name), make.Kept(**model)
    if calibrate:
        machine = _calibrate(name, machine, kept.kv_dtype)
    planned = make.make(
        found, kept, make.Hardware(**machine), make.PlannedReuse(**reuse), ServingUse(**use), make.Spent(**money)
    )
    if check is not None:
        _check(planned, check, out, as_json=as_json)
        return
    if picture is not None:
        draw_plan(planned, picture)
    if as_json:
        print(as_text(plan_values(planned)))
    else:
        plan_show.print_plan(plan_values(planned), out)


def _find(name: str) -> "PlannedModel":

    return find_model(name, lambda text: print(text, file=sys.stderr, flush=True))


def _calibrate(name: str, machine: dict[str, Any], kv_dtype: str) -> dict[str, Any]:
    """Measure this machine and remember it; the options with it."""
    if machine["hardware"] not in (None, MEASURED):
        raise ConfigError("--calibrate measures this machine: leave --hardware out, or say measured")
    measured = {**machine, "hardware": MEASURED}
    Hardware(**measured)  # refuses before anything is measured
    write_json(calibration_file(), calibration.measure(name, kv_dtype))
    return measured


def _check(planned: "Plan", path: Path, out: Console, *, as_json: bool) -> None:
    """Rows of a bench report beside this plan's predictions."""
    if planned.who is None:
        raise ConfigError(
            "a prediction needs a machine: --hardware measured after --calibrate, or a device of the table"
        )
    same = {"layers": planned.shape.layers, "kv_dtype": planned.storage.dtype}
    rows = check_times(read_report(path), predictor(planned), same)
    if as_json:
        print(json.dumps([asdict(row) | {"error": row.error, "within": row.within} for row in rows], indent=1))
    else:
        show_check(rows, out)


def _list_cards(out: Console, *, as_json: bool) -> None:

    found = list(all_cards().values())
    if as_json:
        print(json.dumps([asdict(card) for card in found], ensure_ascii=False, indent=1))
        return
    table = Table("card", "model", "parameters", "KV bytes/token", "verified", box=None, pad_edge=False)
    for card in found:
        shape = read_shape(card.config)
        billions, each = shape.weights.total / 1e9, f"{shape.growing_bytes(Storage()):,}"
        size = f"{billions:,.0f} B" if billions >= 100 else f"{billions:.3g} B"
        table.add_row(card.name, card.title, size, each, "yes" if card.verified else "no")
    out.print(table)
