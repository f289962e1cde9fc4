"""`kvire store warm`: prompts are computed ahead of the requests for them."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from kvire.cli import options as opt
from kvire.cli.display import LoadProgress, console, seconds
from kvire.cli.lazy import deferred
from kvire.cli.options import Json
from kvire.cli.store.options import RawPrompt, Tenant
from kvire.cli.store.show import print_json
from kvire.cli.store_config import store_config
from kvire.core.errors import ConfigError, StoreError

engine_api = deferred("kvire.llm")
results = deferred("kvire.engine.result")
prompts = deferred("kvire.cli.store.prompt")
FLUSH_S = 120.0  # for all computed prompts to reach the slowest tier


@opt.with_options(engine=opt.ENGINE, store=opt.STORE)
def warm(
    model: opt.ModelName,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be repeated.", show_default=False)] = None,
    file: Annotated[
        list[Path] | None,
        typer.Option("--file", "-f", help="A file with a prompt; may be repeated.", show_default=False),
    ] = None,
    raw: RawPrompt = False,
    tenant: Tenant = "",
    as_json: Json = False,
    *,
    engine: dict[str, Any],
    store: dict[str, Any],
) -> None:
    """Compute prompts now and store them, so that the first request with the same beginning finds
    them.

    Only an engine with the same model, KV dtype, block size, device and attention finds the blocks:
    give the options that it runs with.
    """
    if not prompt and not file:
        raise ConfigError("say what to compute: --prompt TEXT or --file FILE; both may be repeated")
    given = prompts.read_prompts(prompt or [], file or [])
    config = store_config(store, engine, default=True)
    if config is None or not (config.path or config.remote):
        raise ConfigError(
            "warm needs a store that outlives it, a folder or --remote: leave out --no-store, --no-prefix-cache, "
            "--kv-cache other than paged, and --ram alone"
        )
    with LoadProgress() as progress:
        llm = engine_api.LLM(model, progress=progress, store=replace(config, required=True), **engine)
    with llm:
        values = []
        for name, text in given.items():
            result = _compute(llm, text, raw=raw, tenant=tenant)
            values.append({"prompt": name, "cache": result.cache.as_dict(), "total_s": result.timing.total_s})
            console.print(
                f"{name}: {result.cache.computed_tokens:,} tokens new, {result.cache.reused_tokens:,} there already, "
                f"{seconds(result.timing.total_s)}",
                markup=False,
                soft_wrap=True,
            )
        _check_stored(llm)
    if as_json:
        print_json(values)


def _compute(llm: Any, text: str, *, raw: bool, tenant: str) -> Any:
    chats = not raw and getattr(llm.tokenizer, "chat_template", None)
    ids = llm.encode_chat([{"role": "user", "content": text}]) if chats else llm.encode(text)
    request = llm.request(ids, llm.params(max_tokens=1, temperature=0), tenant=tenant)
    collector = results.Collector(request)
    for output in llm.client.stream(request):
        collector.add(output)
    return collector.result()


def _check_stored(llm: Any) -> None:
    """Wait until all computed blocks are in their tiers."""
    tiers = llm.engine.reuse
    if not tiers.flush(FLUSH_S):
        raise StoreError(f"not all blocks were stored within {FLUSH_S:.0f} s: run this again to store the rest")
    for name, level in tiers.stats().handles.items():
        lost = level.counts.dropped + level.counts.refused
        if lost and not level.kind.is_in_process:
            reasons = sorted(level.tier.refused) or ["too busy, or it does not answer"]
            raise StoreError(
                f"{lost:,} blocks were not stored in {name} ({', '.join(reasons)}): kvire store stat says more"
            )
