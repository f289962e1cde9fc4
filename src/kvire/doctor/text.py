"""A diagnosis in words: for the terminal, and as a page for the browser."""

from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from kvire.doctor.findings import counted
from kvire.report.charts import Labels, Series, bars
from kvire.report.page import Page

MOST_FINDINGS = 10
MOST_BARS = 6  # providers in the chart of shares
LOSSES = {
    "expired": "expired",
    "no_breakpoint": "without breakpoint",
    "below_minimum": "too short",
    "partial_step": "lost to rounding",
}

NOTHING_SAVED = "By these providers' rules none of it would be found even then."


def print_diagnosis(values: dict[str, Any], console: Console) -> None:
    """The whole report.

    values: of `diagnosis_values`.
    """
    for block in _blocks(values):
        console.print(block)


def diagnosis_page(values: dict[str, Any]) -> Page:
    """The diagnosis as an HTML page.

    values: of `diagnosis_values`.
    """
    page = Page("What caching could save", headline(values)).text(basis(values))
    if (skipped := malformed(values)) is not None:
        page.note(skipped)
    for note in values["notes"]:
        page.note(note)
    if not values["requests"]:
        return page
    page.figure(_shares(values), "Shares of all prompt tokens.")
    page.heading("Providers").text(
        "What each cache would give back of these very prompts, and what its rules cost: prefixes that expired, that "
        "no breakpoint ends, that are too short, or cut to whole steps. Tokens; USD saved against no cache, less what "
        "writing costs. A star marks models that the log does not ask for."
    )
    page.table(*provider_rows(values))
    for line in losses(values):
        page.note(line)
    page.heading("Where prompts part that are otherwise the same")
    if not values["findings"]:
        page.text("No cause was found: where prompts part, they go on with other text.")
    else:
        page.text(
            "Tokens are what prompts would share beyond what they do, if this cause and those before it in the same "
            "prompt were mended; USD what of it each provider's rules would give back."
        )
        page.table(*finding_rows(values))
    for number, finding in enumerate(values["findings"], 1):
        page.heading(f"{number}. {causes(finding)}, {finding['where']}")
        page.text(f"{example_line(finding)}.\n\n{finding['advice']}")
    return page.text(f"Prices: table of {values['prices_date']}; verify before relying on it.")


def headline(values: dict[str, Any]) -> str:
    """The result in a sentence or two."""
    counted_alone = values["without_prompt"]
    known = "" if counted_alone is None else _counted_alone(counted_alone)
    if not values["requests"]:
        return f"No prompt is in the log. {known}"
    ideal, after = values["ideal"]["share"], values["after_fixes"]["share"]
    said = f"{ideal:.1%} of the prompt tokens repeat the beginning of an earlier prompt and could come from a cache."
    if values["findings"]:
        said += f" With what is listed below mended, it would be {after:.1%}."
    if (measured := values["measured"]) is not None:
        said += f" Really cached, by the log's own usage: {measured['share']:.1%}"
        requests = counted(measured["requests"], "request")
        said += f" (of {measured['ideal_share']:.1%} possible in the {requests} with usage)."
    return f"{said} {known}".strip()


def _counted_alone(counted_alone: dict[str, Any]) -> str:
    requests, tokens = counted(counted_alone["requests"], "request"), counted(counted_alone["prompt_tokens"], "token")
    return (
        f"Counted without their prompts: {requests} of {tokens}, {counted_alone['cached_tokens']:,} of them "
        f"({counted_alone['share']:.1%}) from a cache, {counted_alone['written_tokens']:,} written."
    )


def basis(values: dict[str, Any]) -> str:
    """Basis of the figures."""
    if not values["requests"]:
        return "Nothing can be compared without prompts."
    hours = values["hours"]
    time = "" if hours is None else f" over {hours:,.1f} h" if hours >= 1 else f" over {60 * hours:.0f} min"
    tokens = counted(values["prompt_tokens"], "prompt token")
    return f"{counted(values['requests'], 'request')}{time}, {tokens} ({values['token_method']})."


def malformed(values: dict[str, Any]) -> str | None:
    """The skipped lines; None if there are none."""
    if not values["malformed"]["lines"]:
        return None
    first = ", ".join(
        f"{_place(one['line'], one['log'])} ({one['reason']})" for one in values["malformed"]["first"][:3]
    )
    return f"{counted(values['malformed']['lines'], 'malformed line')} skipped, first: {first}."


def losses(values: dict[str, Any]) -> list[str]:
    """A sentence for each provider whose cache costs more than it saves here, or does nothing."""
    lost = [_loss(one) for one in values["providers"] if one["saved_usd"] < 0]
    return lost + [_marks_too_little(one) for one in values["providers"] if one["marks_too_little"]]


def provider_rows(values: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Results by each provider's rules: headers, rows."""
    headers = ["as if sent to", "rules", "cached", "saves", *LOSSES.values()]
    rows = []
    for one in values["providers"]:
        rules = one["rules"]
        shown = f"from {rules['minimum_tokens']:,}, steps of {rules['step_tokens']}, {_span(rules['ttl_s'])}"
        shown += ", breakpoints" if rules["breakpoints"] else ""
        lost = [f"{one['lost_tokens'][name]:,}" for name in LOSSES]
        rows.append([_offer(one), shown, f"{one['share']:.1%}", usd(one["saved_usd"]), *lost])
    return headers, rows


def finding_rows(values: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Savings from mending each cause: headers, rows."""
    offers = values["providers"]
    headers = ["", "cause", "where", "requests", "tokens", "share", *(f"USD, {one['model']}" for one in offers)]
    own = bool(values["findings"]) and values["findings"][0]["prefill_s_per_1000_requests"] is not None
    headers += ["prefill s per 1,000 requests"] if own else []
    rows = []
    for number, one in enumerate(values["findings"], 1):
        row = [
            str(number),
            causes(one),
            one["where"],
            f"{one['requests']:,}",
            f"{one['tokens']:,}",
            f"{one['share']:.1%}",
        ]
        row += [usd(saved["usd"]) for saved in one["saved"]]
        row += [f"{one['prefill_s_per_1000_requests']:,.1f}"] if own else []
        rows.append(row)
    return headers, rows


def causes(finding: dict[str, Any]) -> str:
    """One cause, or several at one place."""
    return " + ".join([finding["cause"], *finding["together_with"]])


def example_line(finding: dict[str, Any]) -> str:
    """First place of a finding, and the text there."""
    example = finding["example"]
    return (
        f"line {_place(example['line'], example['log'])} against line "
        f"{_place(example['other_line'], example['other_log'])}: {example['place']}, character "
        f"{example['character']:,}, token {example['token']:,}: {_quoted(example['piece'])} "
        f"where the other has {_quoted(example['other_piece'])}"
    )


def usd(amount: float) -> str:
    """An amount; with parts of a cent if it is small."""
    return f"{amount:,.2f}" if abs(amount) >= 1 else f"{amount:.4f}" if amount else "0"


def _blocks(values: dict[str, Any]) -> list[RenderableType]:
    blocks: list[RenderableType] = [f"[bold]{escape(headline(values))}[/]", escape(basis(values))]
    if (skipped := malformed(values)) is not None:
        blocks.append(f"[yellow]{escape(skipped)}[/]")
    blocks += [f"[yellow]{escape(note)}[/]" for note in values["notes"]]
    if not values["requests"]:
        return blocks
    blocks.append(_providers(values))
    blocks += [f"[yellow]{escape(line)}[/]" for line in losses(values)]
    if values["findings"]:
        blocks.append("\n[bold]Where prompts part that are otherwise the same[/]")
        blocks += [_shown(number, one) for number, one in enumerate(values["findings"][:MOST_FINDINGS], 1)]
        if len(values["findings"]) > MOST_FINDINGS:
            blocks.append(f"and {len(values['findings']) - MOST_FINDINGS} more (--json lists all)")
    else:
        blocks.append("\nNo cause was found: where prompts part, they go on with other text.")
    if not all(one["in_log"] for one in values["providers"]):
        blocks.append("\n[dim]* The log does not ask for this model.[/]")
    blocks.append(f"[dim]USD by the price table of {values['prices_date']}: verify before relying on it.[/]")
    return blocks


def _providers(values: dict[str, Any]) -> RenderableType:
    table = Table(title="\nOf these prompts, a cache would give back", title_justify="left", title_style="bold")
    for header in ("as if sent to", "cached", "saves USD", "tokens it could not"):
        table.add_column(header, justify="right" if header in {"cached", "saves USD"} else "left")
    for one in values["providers"]:
        lost = [f"{count:,} {LOSSES[name]}" for name, count in one["lost_tokens"].items() if count]
        table.add_row(_offer(one), f"{one['share']:.1%}", usd(one["saved_usd"]), ", ".join(lost))
    return table


def _shown(number: int, finding: dict[str, Any]) -> RenderableType:
    saved = [f"USD {usd(one['usd_per_1000_requests'])} ({one['model']})" for one in finding["saved"] if one["usd"]]
    if (own := finding["prefill_s_per_1000_requests"]) is not None:
        saved.append(f"{own:,.1f} s of prefill on your hardware")
    requests, tokens = counted(finding["requests"], "request"), counted(finding["tokens"], "token")
    worth = f"{requests}, {tokens} ({finding['share']:.1%}). "
    worth += f"Mending it saves, per 1,000 requests: {', '.join(saved)}." if saved else NOTHING_SAVED
    lines = (worth, example_line(finding), finding["advice"])
    return Group(
        f"\n[bold]{number}. {escape(causes(finding))}: {escape(finding['where'])}[/]",
        *(Padding(escape(line), (0, 0, 0, 3)) for line in lines),
    )


def _offer(provider: dict[str, Any]) -> str:
    return f"{provider['provider']} {provider['model']}" + ("" if provider["in_log"] else " *")


def _loss(provider: dict[str, Any]) -> str:
    written = counted(sum(provider["written_tokens"].values()), "token")
    return (
        f"Caching costs more than it saves as sent to {provider['provider']} {provider['model']}: "
        f"USD {usd(-provider['saved_usd'])} more than without a cache. {written} would be written, dearer than "
        f"input, and only {provider['cached_tokens']:,} found: set breakpoints only behind what comes back."
    )


def _marks_too_little(provider: dict[str, Any]) -> str:
    requests = counted(provider["marks_too_little"], "request")
    return (
        f"As sent to {provider['provider']} {provider['model']}: {requests} with breakpoints that all end before the "
        f"minimum of {provider['rules']['minimum_tokens']:,} tokens, and without a word nothing is cached. Put one "
        "behind more text, or none."
    )


def _place(line: int, log: str) -> str:
    return f"{line} of {log}" if log else str(line)


def _quoted(piece: str) -> str:
    return f'"{piece}"' if piece else "nothing"


def _span(seconds: float) -> str:
    return f"{seconds / 3600:g} h" if seconds >= 3600 else f"{seconds / 60:g} min"


def _shares(values: dict[str, Any]) -> str:
    names, shares = ["could be cached"], [values["ideal"]["share"]]
    if values["measured"] is not None:
        names.append("really cached")
        shares.append(values["measured"]["share"])
    for one in values["providers"][:MOST_BARS]:
        names.append(one["provider"])
        shares.append(one["share"])
    if values["findings"]:
        names.append("after mending")
        shares.append(values["after_fixes"]["share"])
    labels = Labels(
        "Prompt tokens that a cache gives back",
        ", ".join(f"{name} {share:.1%}" for name, share in zip(names, shares, strict=True)),
        "",
        "% of prompt tokens",
    )
    return bars(names, [Series("share", [100 * share for share in shares])], labels)
