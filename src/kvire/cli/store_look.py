"""The bodies of `kvire store ls`, `stat`, `verify` and `scrub`."""

from collections import Counter
from pathlib import Path
from secrets import SystemRandom
from typing import Any

import typer

from kvire.cli import store_show as show
from kvire.cli.store_place import Place, late_progress, opened
from kvire.store.check import Checker, Finding, Verdict

MOST_NAMED = 20  # damaged blocks that people see by name


def ls(where: str | None, key_file: Path | None, *, tenant: str | None, limit: int, as_json: bool) -> None:
    """See kvire.cli.store."""
    with opened(where, key_file) as place, late_progress() as report:
        tag = None if tenant is None else place.tag_of(tenant)
        values = show.listing_values(place, place.survey(report), tag, limit)
    (show.print_json if as_json else show.print_listing)(values)


def stat(where: str | None, key_file: Path | None, *, as_json: bool) -> None:
    """See kvire.cli.store."""
    with opened(where, key_file) as place, late_progress() as report:
        values = show.stat_values(place, place.survey(report))
    (show.print_json if as_json else show.print_stat)(values)


def check(where: str | None, key_file: Path | None, *, sample: int | None, remove: bool, as_json: bool) -> None:
    """Verify or scrub, see kvire.cli.store. Exits with status 1 if blocks are damaged and stay."""
    with opened(where, key_file) as place:
        findings = _findings(place, sample)
        damaged = [finding for finding in findings if finding.verdict is Verdict.DAMAGED]
        with late_progress() as report:
            removed = place.delete([finding.entry for finding in damaged], "damaged", report) if remove else 0
    counts = Counter(str(finding.verdict) for finding in findings)
    values = {
        "store": place.name,
        "checked": len(findings),
        **{str(verdict): counts[str(verdict)] for verdict in Verdict},
        "removed": removed,
        "findings": [_values(finding) for finding in findings if finding.verdict in {Verdict.DAMAGED, Verdict.FOREIGN}],
    }
    if as_json:
        show.print_json(values)
    else:
        _print(values, remove=remove)
    if damaged and not remove:
        raise typer.Exit(1)


def _findings(place: Place, sample: int | None) -> list[Finding]:
    with late_progress() as report:
        entries = list(place.entries(report))
        if sample is not None and sample < len(entries):
            entries = SystemRandom().sample(entries, sample)
        checker = Checker(place.tier, place.keyring, place.tenants)
        findings = []
        for number, entry in enumerate(entries, 1):
            findings.append(checker.check(entry))
            report("reading the blocks", number, len(entries))
    return findings


def _values(finding: Finding) -> dict[str, Any]:
    return {
        "key": finding.entry.id.key.hex(),
        "group": finding.entry.id.group,
        "verdict": str(finding.verdict),
        "cause": finding.cause,
    }


def _print(values: dict[str, Any], *, remove: bool) -> None:
    parts = [f"{values['sound']:,} sound"]
    if values["unopened"]:
        parts.append(f"{values['unopened']:,} sealed with keys that are not at hand (headers checked)")
    if values["foreign"]:
        parts.append(f"{values['foreign']:,} of another version (left alone)")
    if values["gone"]:
        parts.append(f"{values['gone']:,} gone meanwhile")
    parts.append(f"{values['damaged']:,} damaged" + (f", {values['removed']:,} removed" if remove else ""))
    print(f"{values['store']}: {values['checked']:,} blocks read: {', '.join(parts)}")
    damaged = [finding for finding in values["findings"] if finding["verdict"] == str(Verdict.DAMAGED)]
    for finding in damaged[:MOST_NAMED]:
        print(f"  {finding['key']} group {finding['group']}: {finding['cause']}")
    if len(damaged) > MOST_NAMED:
        print(f"  and {len(damaged) - MOST_NAMED:,} more (--json lists all)")
    if damaged and not remove:
        print("kvire store scrub removes them; a request that meets one computes it again")
