"""`kvire models`: the models there are, and facts about one without loading it."""

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from kvire.cli import options as opt
from kvire.cli.display import LoadProgress
from kvire.core.dtypes import KV_DTYPES
from kvire.core.memory import format_size
from kvire.models.catalog import ListedModel, ModelFacts, describe, list_models, unused_copies
from kvire.models.made_once import remove_copy
from kvire.models.resolve import resolve

DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")]


def ls(as_json: opt.Json = False) -> None:
    """Embedded models, installed or not, and every GGUF that was converted."""
    found = list_models()
    if as_json:
        _print_json([asdict(model) for model in found])
        return
    table = Table("name", "state", "size", "packed", "about")
    for model in found:
        size = format_size(model.size_bytes) if model.size_bytes else ""
        packed = format_size(model.packed_bytes) if model.packed_bytes else ""
        about = model.about if model.installed else f"{model.about}: {model.install}"
        table.add_row(model.name, _state(model), size, packed, about)
    Console().print(table)


def show(model: opt.ModelName, as_json: opt.Json = False) -> None:
    """Architecture, layers, context, weights, KV bytes per token; the model is not loaded."""
    facts = describe(model)
    if as_json:
        _print_json(asdict(facts) | {"memory_bytes": facts.memory_bytes})
        return
    table = Table("name", Column(overflow="fold"), show_header=False)
    for name, value in _rows(facts):
        table.add_row(name, value)
    Console().print(table)


def pull(model: opt.ModelName) -> None:
    """Fetch or convert a model now, so that the first start is as fast as the next ones."""
    with LoadProgress() as progress:
        path = resolve(model, progress=progress)
    print(path)


def gc(dry_run: DryRun = False, as_json: opt.Json = False) -> None:
    """Remove converted and packed copies without a source, or made by another version."""
    found = [(folder, sum(file.stat().st_size for file in folder.iterdir())) for folder in unused_copies()]
    for folder, _ in found if not dry_run else ():
        remove_copy(folder)
    if as_json:
        _print_json([{"path": folder, "size_bytes": size, "removed": not dry_run} for folder, size in found])
        return
    for folder, size in found:
        print(f"{'would remove' if dry_run else 'removed'} {folder} ({format_size(size)})")
    if not found:
        print("nothing to remove: every copy has its source, and was made by this version")


def _state(model: ListedModel) -> str:
    if not model.installed:
        return "not installed"
    return "ready" if model.converted else "installed"


def _rows(facts: ModelFacts) -> list[tuple[str, str]]:
    rows = [("name", facts.name), ("path", str(facts.path)), ("architecture", facts.model_type)]
    if not facts.supported:
        return [*rows, ("supported", f"no: {facts.reason}")]
    rows += [
        ("supported", "yes"),
        ("parameters", f"{facts.parameters:,}"),
        ("context", f"{facts.context_tokens} tokens"),
        ("weights", f"{format_size(facts.weights_bytes)} on disk, {format_size(facts.memory_bytes)} in memory"),
    ]
    for group in facts.groups:
        window = f", window of {group.window} tokens" if group.window else ""
        widths = f"K {group.key_width} + V {group.value_width}"
        rows.append(
            (f"{group.kind} attention", f"{len(group.layers)} layers, {group.kv_heads} KV heads, {widths}{window}")
        )
    if shared := facts.layers - sum(len(group.layers) for group in facts.groups):
        rows.append(("shared KV", f"{shared} layers read an earlier layer's, and keep none of their own"))
    per_token = ", ".join(f"{format_size(size)} in {dtype}" for dtype, size in facts.kv_bytes_per_token.items())
    rows.append(("KV per token", per_token))
    if facts.expanded_elements_per_token is not None:
        rows.append(("without latent attention", _expanded(facts, facts.expanded_elements_per_token)))
    return rows


def _expanded(facts: ModelFacts, elements: int) -> str:
    kept = sum(group.elements_per_token for group in facts.groups)
    expanded = elements * KV_DTYPES["float16"].element_bytes
    return f"{format_size(expanded)} a token in float16, {elements / kept:.0f} times as much"


def _print_json(value: Any) -> None:
    print(json.dumps(value, default=str, indent=2, ensure_ascii=False))
