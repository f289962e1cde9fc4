"""A diagnosis as plain values: the JSON of `kvire doctor --json`, and the source of all tables."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvire.doctor.findings import Cause, Diagnosis, Finding, RuleTotals, Totals, counted, masked, shortened
from kvire.doctor.rules import CacheOffer, CacheOffers

SCHEMA = "kvire.doctor/1"
PER_REQUESTS = 1000


def diagnosis_values(
    diagnosis: Diagnosis,
    offers: CacheOffers,
    wanted: Sequence[str] = (),
    *,
    prefill_tok_s: float | None = None,
    show_text: bool = False,
) -> dict[str, Any]:
    """Everything, in tokens, USD and seconds.

    show_text: with the differing pieces themselves, not only their shape.
    """
    totals = diagnosis.totals
    chosen = offers.choose(totals.models, wanted)
    findings = [_finding(one, totals, chosen, prefill_tok_s, show_text=show_text) for one in diagnosis.findings]
    gained = sum(finding.tokens for finding in diagnosis.findings)
    return {
        "schema": SCHEMA,
        "requests": totals.requests,
        "prompt_tokens": totals.prompt_tokens,
        "prompt_bytes": totals.prompt_bytes,
        "token_method": diagnosis.token_method,
        "apis": totals.apis,
        "models": totals.models,
        "hours": _hours(totals),
        "malformed": {
            "lines": totals.malformed,
            "first": [{"log": log, "line": line, "reason": reason} for log, line, reason in totals.malformed_first],
        },
        "ideal": {"tokens": totals.ideal_tokens, "share": _share(totals.ideal_tokens, totals.prompt_tokens)},
        "after_fixes": {
            "tokens": totals.ideal_tokens + gained,
            "share": _share(totals.ideal_tokens + gained, totals.prompt_tokens),
        },
        "measured": _measured(totals),
        "without_prompt": _without_prompt(totals),
        "refused": [
            {"reason": reason, "requests": one.requests, "log": one.log, "line": one.line}
            for reason, one in totals.refused.items()
        ],
        "providers": [_provider(offer, diagnosis.by_rules[offer.rules], totals) for offer in chosen],
        "prices_date": offers.table.date,
        "findings": findings,
        "notes": diagnosis_notes(diagnosis),
    }


def diagnosis_notes(diagnosis: Diagnosis) -> list[str]:
    """Limits of the figures, and faults other than parting prompts."""
    totals = diagnosis.totals
    said = []
    if totals.timed < totals.requests:
        said.append(
            f"{totals.requests - totals.timed:,} of {counted(totals.requests, 'request')} without a time: for them no "
            "cached prefix expires, so their figures per provider are upper bounds."
        )
    if totals.backwards:
        said.append(
            f"{counted(totals.backwards, 'request')} older than the one before: sort the log by time for true "
            "lifetimes."
        )
    if diagnosis.forgotten_bytes:
        said.append(
            f"The index is limited to {diagnosis.memory_bytes / 2**20:g} MiB and forgot "
            f"{diagnosis.forgotten_bytes:,} bytes of prompts that nobody came back to for "
            "longest: shares are lower bounds (--memory)."
        )
    if totals.incomplete:
        said.append(
            f"{counted(totals.incomplete, 'request')} of a conversation that the provider keeps: such prompts are not "
            "in the log, and in no figure here."
        )
    if totals.media:
        media = counted(totals.media, "image or file", "images or files")
        said.append(f"{media}: compared by digest, with no tokens counted.")
    if totals.without_breakpoint:
        said.append(
            f"{totals.without_breakpoint:,} of {counted(totals.with_breakpoints_api, 'Anthropic request')} without "
            "cache_control: nothing of them is cached. Set a breakpoint behind tools and system prompt, "
            "and one at the last message."
        )
    for reason, refused in totals.refused.items():
        first = f"{refused.line} of {refused.log}" if refused.log else str(refused.line)
        said.append(
            f"{counted(refused.requests, 'request')} that the API refuses, first in line {first}: {reason}. Nothing of "
            "such a request is cached or written here."
        )
    if totals.without_prompt.requests:
        said.append(
            f"{counted(totals.without_prompt.requests, 'request')} in the log by what was counted alone (a transcript, "
            "or a log without prompts): to see where prompts part, log whole requests, at a proxy or in the gateway."
        )
    return said


def _finding(
    finding: Finding, totals: Totals, offers: Sequence[CacheOffer], prefill_tok_s: float | None, *, show_text: bool
) -> dict[str, Any]:
    example = finding.example
    shown = asdict(example)
    is_prompt_text = Cause.MODEL not in finding.causes
    for name in ("piece", "other_piece"):
        shown[name] = masked(shown[name]) if is_prompt_text and not show_text else shortened(shown[name])
    return {
        "cause": str(finding.causes[0]),
        "together_with": [str(cause) for cause in finding.causes[1:]],
        "where": finding.where,
        "requests": finding.requests,
        "tokens": finding.tokens,
        "share": _share(finding.tokens, totals.prompt_tokens),
        "first_token": finding.first_token,
        "last_token": finding.last_token,
        "advice": finding.advice,
        "example": shown,
        "saved": [_saved(offer, finding, totals) for offer in offers],
        "prefill_s_per_1000_requests": None
        if prefill_tok_s is None
        else finding.tokens / prefill_tok_s * PER_REQUESTS / totals.requests,
    }


def _saved(offer: CacheOffer, finding: Finding, totals: Totals) -> dict[str, Any]:
    tokens = finding.by_rules[offer.rules]
    usd = offer.saved_usd(tokens, finding.written[offer.rules])
    return {
        "provider": offer.price.provider,
        "model": offer.price.model,
        "tokens": tokens,
        "usd": usd,
        "usd_per_1000_requests": usd * PER_REQUESTS / totals.requests,
    }


def _provider(offer: CacheOffer, by_rules: RuleTotals, totals: Totals) -> dict[str, Any]:
    rules = by_rules.rules
    return {
        "provider": offer.price.provider,
        "model": offer.price.model,
        "in_log": offer.in_log,
        "rules": {
            "minimum_tokens": rules.min_tokens,
            "step_tokens": rules.step_tokens,
            "ttl_s": rules.ttl_s,
            "breakpoints": rules.explicit,
        },
        "cached_tokens": by_rules.cached,
        "share": _share(by_rules.cached, totals.prompt_tokens),
        "written_tokens": {"5m": by_rules.written.five_minutes, "1h": by_rules.written.hour},
        "saved_usd": offer.saved_usd(by_rules.cached, by_rules.written),
        "lost_tokens": {
            "expired": by_rules.too_old,
            "no_breakpoint": by_rules.no_breakpoint,
            "below_minimum": by_rules.too_short,
            "partial_step": by_rules.partial_step,
        },
        "marks_too_little": by_rules.marks_too_little,
    }


def _measured(totals: Totals) -> dict[str, Any] | None:
    measured = totals.measured
    if not measured.requests:
        return None
    return {
        "requests": measured.requests,
        "cached_tokens": measured.cached_tokens,
        "written_tokens": measured.written_tokens,
        "share": _share(measured.cached_tokens, measured.prompt_tokens),
        "ideal_share": _share(measured.ideal_tokens, measured.prompt_tokens),
    }


def _without_prompt(totals: Totals) -> dict[str, Any] | None:
    counted_alone = totals.without_prompt
    if not counted_alone.requests:
        return None
    return {
        "requests": counted_alone.requests,
        "prompt_tokens": counted_alone.prompt_tokens,
        "cached_tokens": counted_alone.cached_tokens,
        "written_tokens": counted_alone.written_tokens,
        "share": _share(counted_alone.cached_tokens, counted_alone.prompt_tokens),
    }


def _hours(totals: Totals) -> float | None:
    if totals.first_s is None or totals.latest_s is None:
        return None
    return (totals.latest_s - totals.first_s) / 3600


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
