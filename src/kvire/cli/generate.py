"""`kvire generate`: one prompt to one answer."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvire.cli import options as opt
from kvire.cli.display import LoadProgress, console, seconds
from kvire.cli.lazy import deferred
from kvire.cli.store_config import store_config
from kvire.core.errors import ConfigError
from kvire.engine.result import Collector

engine_api = deferred("kvire.llm")


@opt.with_options(engine=opt.ENGINE, sampling=opt.SAMPLING, store=opt.STORE)
def generate(
    model: opt.ModelName,
    prompt: Annotated[
        str | None,
        typer.Argument(help="The prompt; left out or -, it is read from standard input.", show_default=False),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Read the prompt from a file.", show_default=False)
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it is, without the model's chat template.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print text, token ids, usage, cache and times as JSON.")
    ] = False,
    stop: Annotated[
        list[str] | None, typer.Option(help="End the answer before this text; may be repeated.", show_default=False)
    ] = None,
    *,
    engine: dict[str, Any],
    sampling: dict[str, Any],
    store: dict[str, Any],
) -> None:
    """Answer one prompt, from the command line, a file or standard input.

    The text is printed as it comes; a line on standard error shows reuse and speed.
    """
    text = _read_prompt(prompt, file)
    sampling["stop"] = tuple(stop or ())

    with LoadProgress() as progress:
        llm = engine_api.LLM(model, progress=progress, store=store_config(store, engine, default=False), **engine)
    with llm:
        chat = not raw and getattr(llm.tokenizer, "chat_template", None)
        ids = llm.encode_chat([{"role": "user", "content": text}]) if chat else llm.encode(text)
        request = llm.request(ids, llm.params(**sampling))
        collector = Collector(request)
        for output in llm.client.stream(request):
            collector.add(output)
            if not as_json:
                print(output.text, end="", flush=True)
        result = collector.result()
    if as_json:
        print(json.dumps(_as_dict(result), ensure_ascii=False))
        return
    print(flush=True)
    usage, timing = result.usage, result.timing
    speed = f", then {1 / timing.tpot_s:.1f} tok/s" if timing.tpot_s else ""
    console.print(
        f"[dim]{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} reused; "
        f"first token after {seconds(timing.ttft_s)}{speed}; "
        f"{usage.completion_tokens} tokens, {result.finish_reason}[/]",
        soft_wrap=True,
    )


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    if file is not None:
        if prompt is not None:
            raise ConfigError("give the prompt either as an argument or with --file, not both")
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {file}: {error}") from error
    if prompt is not None and prompt != "-":
        return prompt
    if sys.stdin.isatty() and prompt is None:
        raise ConfigError('give a prompt: kvire generate MODEL "text", --file FILE, or text on standard input')
    return sys.stdin.read()


def _as_dict(result: Any) -> dict[str, Any]:
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "usage": {
            "prompt_tokens": result.usage.prompt_tokens,
            "completion_tokens": result.usage.completion_tokens,
            "total_tokens": result.usage.total_tokens,
            "cached_tokens": result.usage.cached_tokens,
        },
        "cache": result.cache.as_dict(),
        "timing": asdict(result.timing),
    }
