"""Options of `kvire bench`: name -> (type and help, default), as in options.py."""

from pathlib import Path
from typing import Annotated, Any

import typer

_WHAT, _LOAD, _SERVER, _OUT = "What is measured", "Load", "Another server", "Output"


def _option(kind: Any, help_text: str, panel: str, *names: str, **more: Any) -> Any:
    return Annotated[kind, typer.Option(*names, help=help_text, rich_help_panel=panel, **more)]


ASKED: dict[str, tuple[Any, Any]] = {
    "model": (
        _option(
            str | None,
            "Model of the built-in engine, by default smollm2; several, separated by commas.",
            _WHAT,
            show_default=False,
        ),
        None,
    ),
    "options": (_option(str, 'More for `kvire serve`, such as "--kv-dtype float16".', _WHAT), ""),
    "against": (
        _option(
            str | None,
            "Compare with a second arm, in turn: a URL, or other options of `kvire serve` in one text.",
            _WHAT,
            show_default=False,
        ),
        None,
    ),
    "state": (
        _option(
            str | None,
            "States by their letters, such as EGDZ: E empty, G device-warm, R memory-warm, D disk-warm, N remote-warm "
            "(needs --remote), W warm somewhere (all that --url can prove), Z no reuse. By default all possible ones.",
            _WHAT,
            show_default=False,
        ),
        None,
    ),
    "workload": (
        _option(str, "docqa, multiturn, shared, agent, fork, shortchat, random, or none; several, by commas.", _WHAT),
        "docqa,multiturn,shortchat",
    ),
    "trace": (
        _option(
            Path | None,
            "Replay arrivals and lengths of a trace: one that `kvire replay` reads, or Azure's CSV.",
            _WHAT,
            show_default=False,
        ),
        None,
    ),
    "store": (
        _option(
            str | None,
            "Folders on the disks to measure, separated by commas; by default the cache folder.",
            _WHAT,
            show_default=False,
        ),
        None,
    ),
    "remote": (
        _option(str | None, "A store that machines share, for state N: redis://host:6379.", _WHAT, show_default=False),
        None,
    ),
    "context": (_option(str, "Tokens of the longest prompts; several lengths, by commas.", _LOAD), "1024"),
    "concurrency": (_option(str, "Clients at once, each waiting for its answers; several, by commas.", _LOAD), "1"),
    "rate": (
        _option(
            float | None,
            "Instead, so many conversations begin each second, whether others have ended or not.",
            _LOAD,
            show_default=False,
        ),
        None,
    ),
    "scripts": (_option(int, "Documents, conversations or agents in a pass; at least one a client.", _LOAD), 2),
    "output_tokens": (_option(int, "Length of every answer.", _LOAD), 16),
    "repeats": (_option(int, "How often everything is measured.", _LOAD), 5),
    "seed": (_option(int, "What prompts and arrivals are drawn from.", _LOAD), 0),
    "scale": (_option(float, "Of a trace's lengths.", _LOAD), 0.05),
    "speed": (_option(float, "How much faster a trace's requests arrive.", _LOAD), 1.0),
    "requests": (_option(int, "How many requests of a trace.", _LOAD), 50),
    "slo": (_option(str, "What a request must meet to count for goodput, in seconds.", _LOAD), "ttft=1,tpot=0.1"),
    "timeout": (_option(float, "Seconds that one request may take.", _LOAD), 600.0),
    "url": (
        _option(
            str | None,
            "Measure this OpenAI-compatible server, not the built-in engine: http://host:port/v1.",
            _SERVER,
            show_default=False,
        ),
        None,
    ),
    "served_name": (
        _option(str | None, "The model's name there, by default the first it lists.", _SERVER, show_default=False),
        None,
    ),
    "api_key": (
        _option(
            str | None,
            "Its key; better set KVIRE_BENCH_API_KEY. It goes to --url only.",
            _SERVER,
            envvar="KVIRE_BENCH_API_KEY",
            show_default=False,
            show_envvar=False,
        ),
        None,
    ),
    "against_key": (
        _option(
            str | None,
            "The key of a URL in --against; better set KVIRE_BENCH_AGAINST_KEY.",
            _SERVER,
            envvar="KVIRE_BENCH_AGAINST_KEY",
            show_default=False,
            show_envvar=False,
        ),
        None,
    ),
    "no_reuse": (
        _option(
            str | None,
            'JSON fields with which it reuses nothing, so that answers can be compared: {"cache_prompt": false} for '
            'llama.cpp, {"cache_salt": "{unique}"} for vLLM.',
            _SERVER,
            show_default=False,
        ),
        None,
    ),
}
WRITTEN: dict[str, tuple[Any, Any]] = {
    "json_file": (
        _option(Path | None, "Write everything, raw samples included.", _OUT, "--json", show_default=False),
        None,
    ),
    "html_file": (_option(Path | None, "Write a page with charts.", _OUT, "--html", show_default=False), None),
}
