"""The options of `kvire plan`, by subject."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kvire.plan.tiers import EXAMPLE

_MODEL, _MACHINE, _REUSE, _USE, _MONEY = "Model and KV", "Machine", "Reuse and tiers", "Use", "Money"


def _option(kind: Any, help_text: str, panel: str, **more: Any) -> Any:
    return Annotated[kind, typer.Option(help=help_text, rich_help_panel=panel, **more)]


def _unset(kind: Any, help_text: str, panel: str, **more: Any) -> tuple[Any, None]:
    return _option(kind | None, help_text, panel, show_default=False, **more), None


MODEL: dict[str, tuple[Any, Any]] = {
    "weights_dtype": _unset(
        str, "Weights in float32, bfloat16, fp8, int8, int4 or mxfp4; by default as published.", _MODEL
    ),
    "kv_dtype": (
        _option(str, "KV in float32, float16, bfloat16, fp8 or int8 (Kvire's, with scales).", _MODEL),
        "float16",
    ),
    "index_dtype": _unset(str, "A sparse indexer's keys, if not as the KV.", _MODEL),
    "block_size": (_option(int, "Tokens per block; KV is allocated in whole blocks.", _MODEL), 16),
    "tp": _unset(int, "Ranks of tensor parallelism; by default as many as --devices.", _MODEL),
}
MACHINE: dict[str, tuple[Any, Any]] = {
    "hardware": _unset(str, "A device of the table (h100, rtx4090...), or measured: this machine.", _MACHINE),
    "devices": (_option(int, "So many of them together.", _MACHINE, min=1), 1),
    "mfu": _unset(float, "Share of the peak FLOP/s that prefill reaches, instead of the table's assumption.", _MACHINE),
    "memory": _unset(str, "Memory for weights and KV, such as 80GB, instead of the device's.", _MACHINE),
    "reserve": (_option(float, "Share of the memory that neither weights nor KV get.", _MACHINE), 0.1),
}  # fmt: skip
REUSE: dict[str, tuple[Any, Any]] = {
    "tier": _unset(list[str], f"A place to keep KV; may be repeated. {EXAMPLE}.", _REUSE),
    "hit_curve": _unset(Path, "Hit rates by capacity, from kvire replay --json.", _REUSE),
    "policy": _unset(str, "Which of that file's policies; lru by default.", _REUSE),
    "reuse": _unset(float, "Instead of a curve: share of prompt tokens seen before, such as 0.6.", _REUSE),
    "new_tokens": (_option(int, "At a prompt's end, tokens that nobody has computed before.", _REUSE, min=1), 64),
}  # fmt: skip
USE: dict[str, tuple[Any, Any]] = {
    "context": (_option(int, "Tokens of one conversation, or prompt.", _USE, min=1), 8192),
    "users": (_option(int, "At once.", _USE, min=1), 1),
    "reasoning_tokens": (_option(int, "Thought before an answer, and kept.", _USE, min=1), 8192),
    "hours": (_option(int, "That a session goes on.", _USE, min=1), 8),
    "tokens_per_hour": (_option(int, "That it adds.", _USE, min=1), 16384),
    "sessions": (_option(int, "Kept for their return.", _USE, min=1), 1000),
    "agents": (_option(int, "That fork one context.", _USE, min=1), 16),
    "agent_tokens": (_option(int, "That each adds to it.", _USE, min=1), 2048),
}
MONEY: dict[str, tuple[Any, Any]] = {
    "usd_per_hour": _unset(float, "What the machine costs an hour, all devices together.", _MONEY),
    "requests_per_hour": _unset(float, "That it answers.", _MONEY),
    "output_tokens": (_option(int, "Tokens of an answer.", _MONEY, min=0), 256),
    "tbw": _unset(str, "What the disk may be written in its life, such as 1200TB.", _MONEY),
    "price": _unset(list[str], "Hosted models to compare with; may be repeated. By default all of the table.", _MONEY),
}
