"""`kvire doctor`: why prompts miss the cache, from logs or from a running server."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from kvire.cli.display import LoadProgress, console
from kvire.cli.lazy import deferred
from kvire.cli.options import Json
from kvire.core.errors import ConfigError
from kvire.core.memory import parse_size
from kvire.doctor.diagnose import Doctor
from kvire.doctor.findings import counted
from kvire.doctor.live import examine_server, print_server
from kvire.doctor.reading.lines import lines_of
from kvire.doctor.reading.logs import read_log
from kvire.doctor.rules import CacheOffers
from kvire.doctor.text import diagnosis_page, print_diagnosis
from kvire.doctor.tokens import Counter, Estimate, Tokenized
from kvire.doctor.values import diagnosis_values
from kvire.models.resolve import resolve
from kvire.plan.prices import price_table

transformers = deferred("transformers")

LogFiles = Annotated[
    list[str] | None, typer.Argument(metavar="LOG...", help="JSONL or text, also gzipped; - is standard input.")
]
Url = Annotated[
    str | None,
    typer.Option("--url", help="Look at a running Kvire server instead: http://host:port.", rich_help_panel="Server"),
]
ApiKey = Annotated[
    str | None,
    typer.Option("--api-key", envvar="KVIRE_API_KEY", help="For --url, where it has keys.", rich_help_panel="Server"),
]
Prices = Annotated[
    list[str] | None, typer.Option("--price", help="Reckon with this model's price and cache rules; repeatable.")
]
PrefillTokensPerS = Annotated[
    float | None, typer.Option("--prefill-tok-s", help="Your own hardware's prefill speed in tokens per second.")
]
Tokenizer = Annotated[
    str | None, typer.Option("--tokenizer", metavar="MODEL", help="Count tokens with this model's tokenizer (slower).")
]
CompareMemory = Annotated[str, typer.Option("--memory", help="For earlier prompts to compare with.")]
ShowText = Annotated[
    bool, typer.Option("--show-text", help="Print the differing pieces of prompts, not only their shape.")
]
Html = Annotated[Path | None, typer.Option("--html", help="Write a page for the browser.")]


def doctor(
    logs: LogFiles = None,
    url: Url = None,
    api_key: ApiKey = None,
    prices: Prices = None,
    prefill_tok_s: PrefillTokensPerS = None,
    tokenizer: Tokenizer = None,
    memory: CompareMemory = "200MiB",
    show_text: ShowText = False,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Show from request logs what a prefix cache could reuse, and where similar prompts part.

    Reads JSONL or a JSON array of OpenAI (chat, completions, responses, batch files), Anthropic,
    Bedrock Converse or Gemini requests, bare or wrapped with response, usage and time; or plain
    prompts, one a line. Needs no model. Nothing leaves this machine, and no prompt text is printed
    unless --show-text asks for it.

        kvire doctor requests.jsonl.gz --html report.html

        kvire doctor --url http://127.0.0.1:8000
    """
    if url is not None:
        if logs:
            raise ConfigError("give either log files or --url, not both")
        if html is not None:
            raise ConfigError("--html is for logs; with --url, --json gives what a page would be made of")
        _look_at_server(url, api_key, as_json=as_json)
        return
    if not logs:
        raise ConfigError("give a log file (- for standard input), or --url of a running Kvire server; see --help")
    if prefill_tok_s is not None and not prefill_tok_s > 0:
        raise ConfigError(f"--prefill-tok-s is a speed above 0, got {prefill_tok_s}")
    values = _diagnose(
        logs, prices or [], prefill_tok_s, tokenizer, parse_size(memory, "--memory"), show_text=show_text
    )
    if html is not None:
        diagnosis_page(values).write(html)
    if as_json:
        print(json.dumps(values, indent=2))  # ASCII: names of models may be invalid UTF-8
        return

    print_diagnosis(values, Console())


def _diagnose(
    logs: list[str],
    prices: list[str],
    prefill_tok_s: float | None,
    tokenizer: str | None,
    memory_bytes: int,
    *,
    show_text: bool,
) -> dict[str, Any]:

    offers = CacheOffers(price_table())
    offers.check(prices)
    examined = Doctor(offers.rules, Estimate() if tokenizer is None else _tokenizer(tokenizer), memory_bytes)
    for log in logs:
        with _reading(log) as progress:
            examined.examine(read_log(lines_of(log, progress)), log if len(logs) > 1 else "")
    diagnosis = examined.diagnosis()
    totals = diagnosis.totals
    if not totals.requests and not totals.without_prompt.requests:
        raise ConfigError(_nothing(totals.malformed, totals.malformed_first, totals.incomplete))
    return diagnosis_values(diagnosis, offers, prices, prefill_tok_s=prefill_tok_s, show_text=show_text)


def _nothing(malformed: int, first: list[tuple[str, int, str]], incomplete: int) -> str:

    if incomplete:
        return f"no prompt is in the log: {counted(incomplete, 'request')}, of conversations that the provider keeps"
    if not malformed:
        return "the log is empty"
    log, line, reason = first[0]
    where = f"{line} of {log}" if log else str(line)
    return (
        f"there is no request in the log, and {counted(malformed, 'malformed line')}, first: {where} ({reason}). "
        "A log has one request per line, or is one JSON array of requests; docs/doctor.md shows what is read."
    )


def _tokenizer(name: str) -> Counter:
    with LoadProgress() as progress:
        path = resolve(name, progress=progress)
    loaded = transformers.AutoTokenizer.from_pretrained(path)
    if not loaded.is_fast:
        raise ConfigError(f"the tokenizer of {name} does not say where its tokens lie; use another model's, or none")

    def ends_of(text: str) -> list[int]:
        return [end for _, end in loaded(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]]

    return Tokenized(name, ends_of)


@contextmanager
def _reading(log: str) -> Iterator[Callable[[int], None] | None]:
    """A bar on standard error by bytes of the file."""
    total = os.path.getsize(log) if log != "-" and os.path.isfile(log) else None  # noqa: PTH113, PTH202
    columns = (TextColumn("{task.description}"), BarColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(f"reading {'standard input' if log == '-' else Path(log).name}", total=total)
        yield lambda done: bars.update(task, completed=done)


def _look_at_server(url: str, api_key: str | None, *, as_json: bool) -> None:

    values = examine_server(url, api_key)
    if as_json:
        print(json.dumps(values, indent=2))
    else:
        print_server(values, Console())
