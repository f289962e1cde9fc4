"""The body of `kvire store warm`: prompts are computed once, so that nobody waits for them later."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from kvire.cli.display import LoadProgress, console, seconds
from kvire.cli.store_options import store_config
from kvire.cli.store_prompt import read_prompts
from kvire.cli.store_show import print_json
from kvire.core.errors import ConfigError, StoreError
from kvire.engine.result import Collector, Result
from kvire.llm import LLM
from kvire.store.tier import TierKind

FLUSH_S = 120.0  # that all prompts may take to reach the slowest tier, once they are computed


def warm(
    model: str,
    texts: list[str],
    files: list[Path],
    *,
    raw: bool,
    tenant: str,
    engine: dict[str, Any],
    store: dict[str, Any],
    as_json: bool,
) -> None:
    """See kvire.cli.store. Raises StoreError if not all of it could be stored."""
    prompts = read_prompts(texts, files)
    config = store_config(store, engine, default=True)
    if config is None or not (config.path or config.remote):
        raise ConfigError(
            "warm needs a store that outlives it, a folder or --remote: leave out --no-store, --no-prefix-cache, "
            "--kv-cache other than paged, and --ram alone"
        )
    with LoadProgress() as progress:
        llm = LLM(model, progress=progress, store=replace(config, required=True), **engine)
    with llm:
        values = []
        for name, text in prompts.items():
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


def _compute(llm: LLM, text: str, *, raw: bool, tenant: str) -> Result:
    chats = not raw and getattr(llm.tokenizer, "chat_template", None)
    ids = llm.encode_chat([{"role": "user", "content": text}]) if chats else llm.encode(text)
    request = llm.request(ids, llm.params(max_tokens=1, temperature=0), tenant=tenant)
    collector = Collector(request)
    for output in llm.client.stream(request):
        collector.add(output)
    return collector.result()


def _check_stored(llm: LLM) -> None:
    """Wait until all that was computed is in its tiers."""
    tiers = llm.engine.reuse
    if not tiers.flush(FLUSH_S):
        raise StoreError(f"not all blocks were stored within {FLUSH_S:.0f} s: run this again to store the rest")
    for name, level in tiers.stats().levels.items():
        lost = level.counts.dropped + level.counts.refused
        if lost and level.kind is not TierKind.MEMORY:
            reasons = sorted(level.tier.refused) or ["too busy, or it does not answer"]
            raise StoreError(
                f"{lost:,} blocks were not stored in {name} ({', '.join(reasons)}): kvire store stat says more"
            )
