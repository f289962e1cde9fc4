"""A diagnosis as a page for the browser."""

from typing import Any

from kvire.doctor import text
from kvire.report.charts import Labels, Series, bars
from kvire.report.page import Page

MOST_BARS = 6


def diagnosis_page(values: dict[str, Any]) -> Page:
    """The diagnosis as an HTML page.

    values: of `diagnosis_values`.
    """
    page = Page("What caching could save", text.headline(values)).text(text.basis(values))
    if (skipped := text.malformed(values)) is not None:
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
    page.table(*text.provider_rows(values))
    for line in text.losses(values):
        page.note(line)
    page.heading("Where prompts part that are otherwise the same")
    if not values["findings"]:
        page.text("No cause was found: where prompts part, they go on with other text.")
    else:
        page.text(
            "Tokens are what prompts would share beyond what they do, if this cause and those before it in the same "
            "prompt were mended; USD what of it each provider's rules would give back."
        )
        page.table(*text.finding_rows(values))
    for number, finding in enumerate(values["findings"], 1):
        page.heading(f"{number}. {text.causes(finding)}, {finding['where']}")
        page.text(f"{text.example_line(finding)}.\n\n{finding['advice']}")
    return page.text(f"Prices: table of {values['prices_date']}; verify before relying on it.")


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
