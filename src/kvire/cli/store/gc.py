"""`kvire store gc`."""

import re
import time
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer

from kvire.cli.options import Json
from kvire.cli.store import show
from kvire.cli.store.options import KeyFile, Where, Yes, go_on
from kvire.cli.store.place import OpenedStore, late_progress, opened, sessions_of
from kvire.core.errors import StoreError
from kvire.core.memory import format_size
from kvire.models.progress import Progress
from kvire.sessions.folder import FOLDER as SESSIONS
from kvire.store.disk.tier import DiskTier
from kvire.store.survey import Survey
from kvire.store.tier import Entry

YOUNG_S = 60.0  # a block so young may wait for those before it, which are still being written
TAG = re.compile("[0-9a-f]{32}")  # the name of a tenant's folder of sessions


@dataclass(frozen=True, slots=True)
class Garbage:
    """Blocks that no request can find.

    unreadable: of tenants whose key is missing here; others may have it.
    older: of older builds; others may still run one.
    """

    expired: list[Entry]
    unreadable: list[Entry]
    orphans: list[Entry]
    older: list[Entry]


def gc(
    where: Where = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the blocks to remove.")] = False,
    unreadable: Annotated[
        bool,
        typer.Option(
            "--unreadable",
            help="Also what no key in your key file opens: of forgotten tenants, but also of others who share the "
            "store with keys of their own.",
        ),
    ] = False,
    older_builds: Annotated[
        bool,
        typer.Option(
            "--older-builds",
            help="Also blocks of older builds: computed by other software than the blocks used last, with all else "
            "the same, or by a version of Kvire that did not say.",
        ),
    ] = False,
    ttl: Annotated[
        float | None,
        typer.Option(
            help="Also what was not used for so many seconds (in an object store: written longer ago).",
            min=1,
            show_default=False,
        ),
    ] = None,
    yes: Yes = False,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Remove blocks that no request can find: expired ones, orphans, leftovers of crashes.

    Orphans are blocks whose beginning was removed.

    Pinned blocks stay. A folder does not shrink: its room is used for the next blocks.
    """
    with opened(where, key_file) as place, late_progress() as report:
        if unreadable and not place.tenants:
            raise StoreError(
                f"{place.keyring.path} holds no key at all, so every block would count as unreadable: give the right "
                "--key-file, or use kvire store clear to remove everything"
            )
        garbage = _garbage(place, report, ttl, unreadable=unreadable)
        if garbage.orphans:  # a listing of a store in use may miss some: only blocks missed twice are missing
            again = {entry.id for entry in _garbage(place, report, ttl, unreadable=unreadable).orphans}
            garbage = replace(garbage, orphans=[entry for entry in garbage.orphans if entry.id in again])
        sessions = _unreadable_sessions(place)
        if unreadable and not dry_run and not yes and (garbage.unreadable or sessions):
            go_on(
                f"{len(garbage.unreadable):,} blocks and the sessions of {len(sessions):,} tenants in {place.name} "
                f"cannot be read with {place.keyring.path}. If others share this store with keys of their own, these "
                "are theirs."
            )
        leftover_bytes = _leftovers(place, free=not dry_run)
        removed = 0
        if not dry_run:
            removed += place.delete(garbage.expired, "expired", report)
            removed += place.delete(garbage.orphans, "room", report)
            if older_builds:
                removed += place.delete([entry for entry in garbage.older if not entry.pinned], "room", report)
            if unreadable:
                removed += place.delete(garbage.unreadable, "forgotten", report)
                for tag in sessions:
                    sessions_of(place).delete_tenant(tag)
    values = {
        "store": place.name,
        "dry_run": dry_run,
        "expired": show.totals(garbage.expired),
        "orphans": show.totals(garbage.orphans),
        "unreadable": show.totals(garbage.unreadable) | {"included": unreadable, "sessions_of_tenants": len(sessions)},
        "older_builds": show.totals(garbage.older) | {"included": older_builds},
        "leftover_bytes": leftover_bytes,
        "removed": removed,
    }
    (show.print_json if as_json else _print_gc)(values)


def _garbage(place: OpenedStore, report: Progress, ttl_s: float | None, *, unreadable: bool) -> Garbage:
    now, notes = time.time(), place.notes()
    expired, foreign, rest = list[Entry](), list[Entry](), list[Entry]()
    for entry in place.entries(report):
        if not entry.pinned and _is_expired(entry, now, ttl_s):
            expired.append(entry)
        elif entry.root and entry.tenant_tag not in place.tenants:
            foreign.append(entry)
        else:
            rest.append(entry)
    survey = Survey(rest if unreadable else rest + foreign, notes)
    orphans = [
        entry
        for space in survey.spaces
        for entry in space.orphans()
        if not entry.pinned and entry.created < now - YOUNG_S
    ]
    named = {entry.id for entry in orphans}
    older = [e for space in Survey(rest, notes).older_builds for e in space.entries if e.id not in named]
    return Garbage(expired, foreign, orphans, older)


def _is_expired(entry: Entry, now: float, ttl_s: float | None) -> bool:
    if entry.expires is not None and entry.expires <= now:
        return True
    return ttl_s is not None and entry.used + ttl_s <= now


def _leftovers(place: OpenedStore, *, free: bool) -> int:
    """Bytes still claimed after crashes; only folders have them."""
    tier = place.tier
    return place.patiently(lambda: tier.leftovers(free=free)) if isinstance(tier, DiskTier) else 0


def _unreadable_sessions(place: OpenedStore) -> list[bytes]:
    """Tags of tenants with sessions here whose key is missing."""
    if place.folder is None or not (place.folder / SESSIONS).is_dir():
        return []
    names = [path.name for path in (place.folder / SESSIONS).iterdir() if TAG.fullmatch(path.name)]
    return [tag for tag in map(bytes.fromhex, names) if tag not in place.tenants]


def _print_gc(values: dict[str, Any]) -> None:
    would = "would be " if values["dry_run"] else ""
    print(f"{values['store']}: {would}removed:")
    for name, meaning in (("expired", "expired"), ("orphans", "without their beginning")):
        print(f"  {values[name]['blocks']:,} blocks {meaning}, {format_size(values[name]['bytes'])}")
    unreadable = values["unreadable"]
    line = f"{unreadable['blocks']:,} blocks that no key at hand opens, {format_size(unreadable['bytes'])}"
    if unreadable["included"]:
        print(f"  {line}, and the sessions of {unreadable['sessions_of_tenants']:,} tenants")
    older = values["older_builds"]
    of_older = f"{older['blocks']:,} blocks of older builds, {format_size(older['bytes'])}"
    if older["included"]:
        print(f"  {of_older}; {older['pinned']:,} of them stay, being pinned" if older["pinned"] else f"  {of_older}")
    print(f"  leftovers of crashes, {format_size(values['leftover_bytes'])}")
    if unreadable["blocks"] and not unreadable["included"]:
        print(f"left alone: {line} (--unreadable takes them along)")
    if older["blocks"] and not older["included"]:
        print(f"left alone: {of_older} (--older-builds takes them along)")
