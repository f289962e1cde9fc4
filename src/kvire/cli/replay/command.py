"""`kvire replay`: hit rates of caches of several sizes on a recorded trace."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvire.cli.replay import show as replay_show
from kvire.cli.store.place import late_progress
from kvire.core.config import EngineConfig
from kvire.core.errors import ConfigError
from kvire.core.memory import parse_size
from kvire.models.planned import find_model
from kvire.plan.shape import Storage
from kvire.replay.formats import read_trace
from kvire.replay.policies import DEFAULT_POLICIES, POLICIES
from kvire.replay.report import CapacitySize, TierSize, TokenKV, build_tiers, replay_values
from kvire.replay.trace import Trace
from kvire.report.charts import picture_kind

EPILOG = (
    "Example: kvire replay mooncake_conversation_trace.jsonl --policy lru --policy s3-fifo --policy optimum "
    "--capacity 1% --capacity 5M --picture curves.svg. What traces look like: docs/replay.md"
)
DEFAULT_CAPACITIES = ("1%", "5%", "10%", "25%", "50%", "100%")
TIERS = ("memory", "disk")
KV_DTYPE = "float16"  # as kvire plan counts by default
TOKEN_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def replay(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE",
            help="A .jsonl with hash_ids (Mooncake, Bailian, Dynamo), a session of kv-cache-tester or a folder of "
            "them, or Kvire's own .jsonl.",
            show_default=False,
        ),
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="lru, store, lfu, gdsf, cost-aware, s3-fifo, sieve, ttl=SECONDS, optimum, or all; may be repeated. "
            "By default lru, which is what the store does, and optimum.",
            show_default=False,
        ),
    ] = None,
    capacity: Annotated[
        list[str] | None,
        typer.Option(
            help="Tokens (500k, 5M), a share of the working set (5%), or bytes (100GB); may be repeated.",
            show_default=False,
        ),
    ] = None,
    tier: Annotated[
        list[str] | None,
        typer.Option(
            help="The store's tiers instead of curves: memory=SIZE and disk=SIZE, sizes as --capacity.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Whose tokens the bytes hold: as in kvire plan MODEL.", show_default=False)
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            help="That model's KV in float32 (Kvire's pool by default), float16, bfloat16, fp8 or int8.",
            show_default=KV_DTYPE,
        ),
    ] = None,
    bytes_per_token: Annotated[
        int | None, typer.Option(help="How many bytes the KV of one token takes.", min=1, show_default=False)
    ] = None,
    block_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens that one of the trace's hash_ids stands for, where lengths do not tell.",
            min=1,
            show_default=False,
        ),
    ] = None,
    time_unit: Annotated[
        str | None,
        typer.Option(help="What the trace's timestamps are in, s or ms, where it is not told.", show_default=False),
    ] = None,
    spread: Annotated[
        bool, typer.Option("--spread", help="Spread requests of one time stamp until the next; matters for ttl only.")
    ] = False,
    half: Annotated[
        int | None,
        typer.Option(
            help="Only the first or second half: of the sessions, or of the requests.", min=1, max=2, show_default=False
        ),
    ] = None,
    coarse: Annotated[
        int, typer.Option(help="Join so many blocks into one: faster, and a little less to hit.", min=1)
    ] = 1,
    picture: Annotated[Path | None, typer.Option(help="Draw the curves: .svg or .png.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON (schema kvire.replay/1).")] = False,
) -> None:
    """Hit rates of a trace against capacity, by policy, beside the best possible.

    No model and no GPU needed.
    """
    if tier and (policy or capacity or picture):
        raise ConfigError("--tier replays the store as it is: leave out --policy, --capacity and --picture")
    if picture is not None:
        picture_kind(picture)
    kv = _token_kv(model, kv_dtype, bytes_per_token)
    with late_progress() as report:
        trace = read_trace(path, report, block_tokens=block_tokens, time_unit=time_unit)
        trace = trace if half is None else trace.halves()[half - 1]
        trace = trace.coarse(coarse) if coarse > 1 else trace
        trace = trace.spread() if spread else trace
        if not trace.working_set_tokens:
            raise ConfigError(
                f"no prompt that is left fills a block of {trace.block_tokens} tokens: there is nothing to hit. "
                "Replay a longer trace, or leave out --half and --coarse"
            )
        if tier:
            values = build_tiers(trace, _tiers(tier, trace, kv), spread=spread, report=report)
        else:
            names = list(POLICIES) if "all" in (policy or ()) else list(dict.fromkeys(policy or DEFAULT_POLICIES))
            sizes = {_size(text, trace, kv) for text in capacity or DEFAULT_CAPACITIES}
            values = replay_values(
                trace, names, sorted(sizes, key=lambda size: size.tokens), spread=spread, report=report
            )
    values["kv"] = None if kv is None else asdict(kv)
    if picture is not None:
        replay_show.draw_curves(values, picture)
    if as_json:
        print(json.dumps(values, ensure_ascii=False, indent=1))
    else:
        replay_show.print_replay(values, Console(highlight=False))


def _token_kv(model: str | None, kv_dtype: str | None, bytes_per_token: int | None) -> "TokenKV | None":
    """The KV of one token; None if not given.

    Raises ConfigError if it was given twice, or in part.
    """
    if model is not None and bytes_per_token is not None:
        raise ConfigError("give either --model or --bytes-per-token: one is counted, the other given")
    if model is None:
        if kv_dtype is not None:
            raise ConfigError("--kv-dtype says how a model's KV is kept: which one? add --model MODEL")
        return None if bytes_per_token is None else TokenKV(bytes_per_token)
    storage = Storage(kv_dtype or KV_DTYPE, EngineConfig().block_size)
    found = find_model(model)
    return TokenKV(found.shape.stored_bytes(storage), found.title, storage.dtype, found.shape.state_bytes(storage))


def _tiers(asked: list[str], trace: "Trace", kv: "TokenKV | None") -> "list[TierSize]":

    sizes = {}
    for text in asked:
        name, _, size = text.partition("=")
        if name not in TIERS or not size or name in sizes:
            raise ConfigError(f"--tier {text}: write memory=SIZE and disk=SIZE, each at most once")
        sizes[name] = _size(size, trace, kv)
    return [TierSize(name, sizes[name]) for name in TIERS if name in sizes]


def _size(text: str, trace: "Trace", kv: "TokenKV | None") -> "CapacitySize":
    """A capacity as people write it. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]?)\s*(%?)\s*", text.lower())
    if match is None:
        size_bytes = parse_size(text, "--capacity")
        if kv is None:
            raise ConfigError(f"how many tokens are {text}? add --model MODEL or --bytes-per-token N")
        return CapacitySize(size_bytes // kv.bytes_per_token, size_bytes)
    number, unit, percent = match.groups()
    if percent:
        tokens = int(float(number) * TOKEN_UNITS[unit] * trace.working_set_tokens / 100)
        tokens = max(tokens, trace.block_tokens)
    else:
        tokens = int(float(number) * TOKEN_UNITS[unit])
    return CapacitySize(tokens, None if kv is None else tokens * kv.bytes_per_token)
