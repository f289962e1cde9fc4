"""Hits, misses and the store of a running Kvire server by its metrics, with advice."""

import http.client
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvire.core.errors import ConfigError
from kvire.core.report import MissReason

SCHEMA = "kvire.doctor.server/1"
TIMEOUT_S = 10.0
LARGEST_ANSWER_BYTES = 16 << 20
# Misses of a kind are worth advice from this share of the prompts on, a tier is full from this
# share of its limit on.
WORTH_A_WORD, FULL = 0.01, 0.95

MISS_ADVICE = {
    MissReason.OFF: "The prefix cache is switched off (prefix_cache): switch it on.",
    MissReason.PROMPT_LOGPROBS: "Prompts with prompt_logprobs are computed anew each time: ask for them where needed.",
    MissReason.SHORTER_THAN_BLOCK: "Prompts share less than a block: nothing to gain with them.",
    MissReason.DIVERGED: "Prompts part from what is remembered: the `kvire` object of each answer names the token "
    "(miss_token); run kvire doctor on a log of the requests to see what stands there.",
    MissReason.EVICTED: "Blocks were there and had to make room: give the pool (--kv-memory) or the store more room.",
    MissReason.NEVER_STORED: "Nothing begins like these prompts: normal for new ones. If clients repeat themselves, "
    "run kvire doctor on a log of the requests.",
    MissReason.OTHER_NAMESPACE: "The same text is stored under another model, dtype, block size or tenant: use the "
    "same options everywhere (miss_detail names the fields).",
    MissReason.DAMAGED: "Stored blocks were not what was written: run kvire store verify, and look at the disk.",
    MissReason.UNAVAILABLE: "A tier did not answer in time: look at the remote store and its network, or allow more.",
    MissReason.SLOWER: "Computing was faster than loading: the tier's bandwidth is below break-even for this model.",
}


@dataclass(frozen=True, slots=True)
class LiveSamples:
    """Values by metric name and labels."""

    values: dict[tuple[str, tuple[tuple[str, str], ...]], float]

    @classmethod
    def parse(cls, exposition: str) -> "LiveSamples":
        """Of Prometheus' text format. Raises ValueError."""
        found = {}
        for family in text_string_to_metric_families(exposition):
            for sample in family.samples:
                found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
        return cls(found)

    def get(self, name: str, **labels: str) -> float:
        """One value; 0 if it is missing."""
        return self.values.get((name, tuple(sorted(labels.items()))), 0.0)

    def by(self, name: str, label: str) -> dict[str, float]:
        """All values of a metric by one of its labels, added up over the others."""
        sums: dict[str, float] = {}
        for (found, labels), value in self.values.items():
            if found == name:
                key = dict(labels).get(label, "")
                sums[key] = sums.get(key, 0.0) + value
        return sums


def examine_server(url: str, api_key: str | None = None) -> dict[str, Any]:
    """Plain values: tokens by source, misses by reason, the tiers, findings.

    Raises ConfigError if the URL leads to no Kvire server, or to one that refuses its metrics.
    """
    try:
        samples = LiveSamples.parse(_fetch(url, "/metrics", api_key))
    except ValueError as error:
        raise ConfigError(f"{url}/metrics is no Prometheus text: is this a Kvire server?") from error
    sources = samples.by("kvire_prompt_tokens_total", "source")
    if not sources:
        raise ConfigError(f"{url}/metrics has no kvire_prompt_tokens_total: this is no Kvire server")
    tokens = sum(sources.values())
    tiers = sorted(samples.by("kvire_store_blocks", "tier"))
    return {
        "schema": SCHEMA,
        "url": url,
        "prompts": samples.get("kvire_prompts_total"),
        "prompt_tokens": tokens,
        "sources": {
            source: {"tokens": count, "share": count / tokens if tokens else 0.0} for source, count in sources.items()
        },
        "misses": {
            reason: count for reason, count in samples.by("kvire_cache_misses_total", "reason").items() if count
        },
        "saved_s": samples.get("kvire_saved_seconds"),
        "tiers": {tier: _tier(samples, tier) for tier in tiers},
        "findings": list(_findings(samples, tiers)),
    }


def print_server(values: dict[str, Any], console: Console) -> None:
    """For the terminal."""
    prompts, tokens = values["prompts"], values["prompt_tokens"]
    reused = sum(one["share"] for source, one in values["sources"].items() if source != "computed")
    said = f"{reused:.1%} of {tokens:,.0f} prompt tokens in {prompts:,.0f} prompts were reused."
    console.print(f"[bold]{said}[/] Saved so far: {values['saved_s']:,.1f} s of computing.")
    table = Table("source", "tokens", "share")
    for source, one in values["sources"].items():
        table.add_row(source, f"{one['tokens']:,.0f}", f"{one['share']:.1%}")
    console.print(table)
    if values["misses"]:
        misses = Table("reuse ended because", "prompts", "share")
        for reason, count in sorted(values["misses"].items(), key=lambda item: -item[1]):
            misses.add_row(reason, f"{count:,.0f}", f"{count / prompts:.1%}" if prompts else "")
        console.print(misses)
    for finding in values["findings"]:
        console.print(f"[bold]{escape(finding['what'])}[/]\n  {escape(finding['advice'])}", soft_wrap=True)
    if not values["findings"]:
        console.print("Nothing to complain of.")


def _tier(samples: LiveSamples, tier: str) -> dict[str, float]:
    names = ("used_bytes", "limit_bytes", "blocks", "bytes_per_second", "latency_seconds", "queue_blocks")
    totals = ("loaded_blocks", "saved_blocks", "dropped_blocks", "damaged_blocks", "unavailable")
    values = {name: samples.get(f"kvire_store_{name}", tier=tier) for name in names}
    values |= {name: samples.get(f"kvire_store_{name}_total", tier=tier) for name in totals}
    for name in ("evictions", "refused"):
        values[name] = sum(
            value
            for (found, labels), value in samples.values.items()
            if found == f"kvire_store_{name}_total" and ("tier", tier) in labels
        )
    return values


def _findings(samples: LiveSamples, tiers: list[str]) -> Iterator[dict[str, str]]:
    prompts = samples.get("kvire_prompts_total")
    if not prompts:
        yield _found("No prompt was computed yet.", "Come back when the server has had traffic.")
        return
    misses = samples.by("kvire_cache_misses_total", "reason")
    for reason, count in sorted(misses.items(), key=lambda item: -item[1]):
        if count >= WORTH_A_WORD * prompts and reason in set(MissReason):
            yield _found(f"{count:,.0f} prompts ({count / prompts:.0%}): {reason}", MISS_ADVICE[MissReason(reason)])
    if preempted := samples.get("kvire_preemptions_total"):
        again = samples.get("kvire_recomputed_tokens_total")
        yield _found(
            f"{preempted:,.0f} answers had to make room, and {again:,.0f} tokens were computed again.",
            "The pool is small for this load: raise --kv-memory, or lower --max-num-seqs.",
        )
    if not tiers:
        yield _found(
            "There is no store below the pool.",
            "What the pool forgets, and everything at a restart, is computed again.",
        )
    for tier in tiers:
        yield from _tier_findings(tier, _tier(samples, tier))


def _tier_findings(tier: str, values: dict[str, float]) -> Iterator[dict[str, str]]:
    if dropped := values["dropped_blocks"]:
        yield _found(
            f"{tier}: {dropped:,.0f} blocks were not written because the write-behind buffer was full.",
            "The tier takes blocks slower than they are made: use a faster disk, or admission by turn.",
        )
    if damaged := values["damaged_blocks"]:
        yield _found(
            f"{tier}: {damaged:,.0f} blocks were not what was written, and were removed.",
            "Nothing wrong was served. Run kvire store verify, and look at the disk's own health.",
        )
    if unavailable := values["unavailable"]:
        yield _found(
            f"{tier}: could not answer {unavailable:,.0f} times, or not in time.",
            "Requests went on without it. Look at the service and the network behind it.",
        )
    if refused := values["refused"]:
        yield _found(
            f"{tier}: {refused:,.0f} blocks were not kept.", "kvire_store_refused_total says why, reason by reason."
        )
    full = values["limit_bytes"] and values["used_bytes"] >= FULL * values["limit_bytes"]
    if full and values["evictions"]:
        yield _found(
            f"{tier}: is full, and {values['evictions']:,.0f} blocks had to go.",
            "If prompts are missed as evicted, a larger limit helps; kvire replay says how much.",
        )


def _found(what: str, advice: str) -> dict[str, str]:
    return {"what": what, "advice": advice}


def _fetch(url: str, path: str, api_key: str | None) -> str:
    parts = urlsplit(url if "//" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"--url has no valid port: {url}") from error
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ConfigError(f"--url is http://host:port or https://host:port, got {url!r}")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, port, timeout=TIMEOUT_S)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        connection.request("GET", parts.path.rstrip("/").removesuffix("/v1") + path, headers=headers)
        answer = connection.getresponse()
        body = answer.read(LARGEST_ANSWER_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise ConfigError(f"nothing answers at {url} ({error}): is kvire serve running there?") from error
    finally:
        connection.close()
    if answer.status in {401, 403}:
        raise ConfigError(f"{url} wants an API key for its metrics: pass --api-key, or set KVIRE_API_KEY")
    if answer.status != http.client.OK:
        raise ConfigError(f"{url}{path} answered {answer.status}: this is no Kvire server")
    return body.decode("utf-8", "replace")
