"""`kvire plan`: what a model's KV takes, what keeping it is worth, and what to buy, before anything is bought."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvire.cli import options as opt
from kvire.cli import plan_options as groups
from kvire.core.errors import ConfigError
from kvire.core.memory import parse_size

EPILOG = (
    "Example: kvire plan llama-3.1-8b --hardware h100 --context 32768 --users 20 --reuse 0.6 --sessions 500 "
    "--tier ram=512GB --tier nvme4=4TB"
)


@opt.shared(model=groups.MODEL, machine=groups.MACHINE, reuse=groups.REUSE, use=groups.USE, money=groups.MONEY)
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
    """Bytes per token, users per machine, break-even bandwidth, times per tier, prices: buy X GB of Y, or nothing.

    Bytes are exact, by the model's config; times are estimates unless this machine was measured (--calibrate).
    """
    from kvire.cli import plan_show  # noqa: PLC0415  (--help must not wait for it)
    from kvire.plan.report import build  # noqa: PLC0415

    out = Console(highlight=False)
    if cards:
        _list_cards(out, as_json=as_json)
        return
    if name is None:
        raise ConfigError("say which model: kvire plan MODEL; kvire plan --cards lists those known here")
    if check is not None and picture is not None:
        raise ConfigError("--check draws no picture: leave out one of the two options")
    if picture is not None:
        from kvire.report.charts import picture_kind  # noqa: PLC0415  (--help must not wait for it)

        picture_kind(picture)
    planned = _plan(name, model, machine, reuse, use, money, calibrate=calibrate)
    if check is not None:
        _check(planned, check, out, as_json=as_json)
        return
    record = build(planned)
    if picture is not None:
        from kvire.cli.plan_picture import draw  # noqa: PLC0415

        draw(planned, picture)
    if as_json:
        print(json.dumps(_finite(record), ensure_ascii=False, indent=1))
    else:
        plan_show.show(record, out)


def _plan(
    name: str,
    model: dict[str, Any],
    machine: dict[str, Any],
    reuse: dict[str, Any],
    use: dict[str, Any],
    money: dict[str, Any],
    *,
    calibrate: bool,
) -> Any:
    """The options as a Plan."""
    from kvire.cli.plan_machine import choose_machine  # noqa: PLC0415
    from kvire.cli.plan_model import find_model  # noqa: PLC0415
    from kvire.plan.hardware import ASSUMED_RANGE  # noqa: PLC0415
    from kvire.plan.plan import Money, Plan  # noqa: PLC0415
    from kvire.plan.prices import hosted_prices  # noqa: PLC0415
    from kvire.plan.serve import Prompt  # noqa: PLC0415
    from kvire.plan.shape import WEIGHT_BYTES, Storage  # noqa: PLC0415
    from kvire.plan.sizing import Usage  # noqa: PLC0415

    found = find_model(name)
    if model["weights_dtype"] not in (None, *WEIGHT_BYTES):
        raise ConfigError(f"--weights-dtype is one of {', '.join(WEIGHT_BYTES)}, not {model['weights_dtype']!r}")
    if use["context"] < reuse["new_tokens"]:
        raise ConfigError(f"--new-tokens {reuse['new_tokens']} is more than the whole --context {use['context']}")
    storage = Storage(model["kv_dtype"], model["block_size"], model["tp"] or machine["devices"], model["index_dtype"])
    usage = Usage(**use)
    who, measured_tiers = choose_machine(name, machine, model["kv_dtype"], calibrate=calibrate)
    on_this = who is not None and bool(who.measured_on)
    if who is not None and on_this and who.measured_on not in (name, found.name):
        source = f"{who.source}, and scaled to this model by its FLOPs"
        who = replace(who, span=ASSUMED_RANGE, source=source)
    return Plan(
        title=found.title,
        source=found.source,
        verified=found.verified,
        shape=found.shape,
        storage=storage,
        use=usage,
        prompt=Prompt(usage.context, reuse["new_tokens"]),
        tiers=_tiers(reuse["tier"], measured_tiers),
        money=Money(
            usd_per_hour=money["usd_per_hour"],
            requests_per_hour=money["requests_per_hour"],
            output_tokens=money["output_tokens"],
            endurance_bytes=None if money["tbw"] is None else parse_size(money["tbw"], "--tbw"),
            prices=hosted_prices(money["price"] or ()),
        ),
        who=who,
        memory_bytes=None if machine["memory"] is None else parse_size(machine["memory"], "--memory"),
        reserve=machine["reserve"],
        weights_dtype=model["weights_dtype"] or ("float32" if on_this else None),  # the engine computes in float32
        curve=_curve(reuse, usage),
    )


def _tiers(given: list[str] | None, measured: tuple[Any, ...]) -> tuple[Any, ...]:
    """What the user named, with measured speeds where a name is a measured one; else those measured, else the usual."""
    from kvire.plan.tiers import default_tiers, parse_tier  # noqa: PLC0415

    if not given:
        return measured or tuple(default_tiers())
    known = {tier.name: tier for tier in measured}
    return tuple(parse_tier(text, known) for text in given)


def _curve(reuse: dict[str, Any], usage: Any) -> Any:
    from kvire.plan.hits import assumed_reuse, read_curve  # noqa: PLC0415

    if reuse["hit_curve"] is not None and reuse["reuse"] is not None:
        raise ConfigError("give either --hit-curve or --reuse: one is measured, the other assumed")
    if reuse["hit_curve"] is None and reuse["policy"] is not None:
        raise ConfigError("--policy chooses a curve of --hit-curve FILE: say which file")
    if reuse["hit_curve"] is not None:
        return read_curve(_read(reuse["hit_curve"]), reuse["policy"])
    return None if reuse["reuse"] is None else assumed_reuse(reuse["reuse"], usage.sessions * usage.context)


def _check(planned: Any, path: Path, out: Console, *, as_json: bool) -> None:
    """Rows of a bench report beside what this plan predicts for them."""
    from kvire.bench.results import read  # noqa: PLC0415
    from kvire.cli.plan_show import show_check  # noqa: PLC0415
    from kvire.plan.check import check  # noqa: PLC0415
    from kvire.plan.plan import predictor  # noqa: PLC0415

    if planned.who is None:
        raise ConfigError(
            "a prediction needs a machine: --hardware measured after --calibrate, or a device of the table"
        )
    same = {"layers": planned.shape.layers, "kv_dtype": planned.storage.dtype}
    rows = check(read(path), predictor(planned), same)
    if as_json:
        print(json.dumps([asdict(row) | {"error": row.error, "within": row.within} for row in rows], indent=1))
    else:
        show_check(rows, out)


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is no report: it holds no JSON object")
    return value


def _list_cards(out: Console, *, as_json: bool) -> None:
    from kvire.plan.cards import cards as all_cards  # noqa: PLC0415
    from kvire.plan.read_shape import read_shape  # noqa: PLC0415
    from kvire.plan.shape import Storage  # noqa: PLC0415

    found = list(all_cards().values())
    if as_json:
        print(json.dumps([asdict(card) for card in found], ensure_ascii=False, indent=1))
        return
    table = Table("card", "model", "parameters", "KV bytes/token", "verified")
    for card in found:
        shape = read_shape(card.config)
        size, each = f"{shape.weights.total / 1e9:.3g} B", f"{shape.growing_bytes(Storage()):,}"
        table.add_row(card.name, card.title, size, each, "yes" if card.verified else "no")
    out.print(table)


def _finite(value: Any) -> Any:
    """JSON has no infinity: null stands for what has no limit."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and value in (float("inf"), float("-inf")) else value
