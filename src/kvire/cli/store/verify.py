"""`kvire store verify` and `scrub`."""

from collections import Counter
from pathlib import Path
from secrets import SystemRandom
from typing import Annotated, Any

import typer

from kvire.cli.options import Json
from kvire.cli.store import show
from kvire.cli.store.options import KeyFile, Where
from kvire.cli.store.place import OpenedStore, late_progress, opened
from kvire.store.check import CheckedBlock, Checker, CheckVerdict

NAMED = frozenset({CheckVerdict.DAMAGED, CheckVerdict.FOREIGN})  # verdicts whose blocks are listed
MOST_NAMED = 20  # damaged blocks that people see by name


def verify(
    where: Where = None,
    sample: Annotated[
        int | None, typer.Option(help="Check only so many blocks, taken at random.", min=1, show_default=False)
    ] = None,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Read blocks and check them with the keys at hand.

    Removes nothing; the exit status is 1 if any is damaged.

    Without its tenant's key only a sealed block's header and length can be checked.
    """
    _check(where, key_file, sample=sample, remove=False, as_json=as_json)


def scrub(where: Where = None, key_file: KeyFile = None, as_json: Json = False) -> None:
    """Read every block, check it with the keys at hand, and remove the damaged ones.

    Blocks of newer versions of Kvire, or sealed by other keys, stay.
    """
    _check(where, key_file, sample=None, remove=True, as_json=as_json)


def _check(where: str | None, key_file: Path | None, *, sample: int | None, remove: bool, as_json: bool) -> None:
    """Verify or scrub. Exits with status 1 if blocks are damaged and stay."""
    with opened(where, key_file) as place:
        findings = _findings(place, sample)
        damaged = [finding for finding in findings if finding.verdict is CheckVerdict.DAMAGED]
        with late_progress() as report:
            removed = place.delete([finding.entry for finding in damaged], "damaged", report) if remove else 0
    counts = Counter(str(finding.verdict) for finding in findings)
    values = {
        "store": place.name,
        "checked": len(findings),
        **{str(verdict): counts[str(verdict)] for verdict in CheckVerdict},
        "removed": removed,
        "findings": [
            _values(finding) for finding in findings if finding.verdict in {CheckVerdict.DAMAGED, CheckVerdict.FOREIGN}
        ],
    }
    if as_json:
        show.print_json(values)
    else:
        _print(values, remove=remove)
    if damaged and not remove:
        raise typer.Exit(1)


def _findings(place: OpenedStore, sample: int | None) -> list[CheckedBlock]:
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


def _values(finding: CheckedBlock) -> dict[str, Any]:
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
    damaged = [finding for finding in values["findings"] if finding["verdict"] == str(CheckVerdict.DAMAGED)]
    for finding in damaged[:MOST_NAMED]:
        print(f"  {finding['key']} group {finding['group']}: {finding['cause']}")
    if len(damaged) > MOST_NAMED:
        print(f"  and {len(damaged) - MOST_NAMED:,} more (--json lists all)")
    if damaged and not remove:
        print("kvire store scrub removes them; a request that meets one computes it again")
