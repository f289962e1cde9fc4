"""The bodies of `kvire store gc`, `pin`, `unpin`, `forget` and `clear`."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvire.cli import store_show as show
from kvire.cli.store_place import AT_ONCE, Place, late_progress, opened
from kvire.core.errors import ConfigError, StoreError
from kvire.core.keys import BlockKey
from kvire.core.memory import format_size
from kvire.core.record import BlockId
from kvire.models.progress import Progress
from kvire.store.disk import DiskTier
from kvire.store.sessions import FOLDER as SESSIONS
from kvire.store.sessions import Sessions
from kvire.store.survey import Survey
from kvire.store.tier import Entry

WRITERS_S = 2.0  # in which running servers write what they computed before a tenant was forgotten
YOUNG_S = 60.0  # a block so young may wait for those before it, which are still being written
TAG = re.compile("[0-9a-f]{32}")  # the name of a tenant's folder of sessions

Confirm = Callable[[str], None]  # asks; raises if the answer is no


@dataclass(frozen=True, slots=True)
class Garbage:
    """Blocks that no request can find.

    unreadable: of tenants whose key is not at hand; others may have it.
    older: of older builds; others may still run one.
    """

    expired: list[Entry]
    unreadable: list[Entry]
    orphans: list[Entry]
    older: list[Entry]


def gc(
    where: str | None,
    key_file: Path | None,
    *,
    dry_run: bool,
    unreadable: bool,
    older_builds: bool,
    ttl_s: float | None,
    confirm: Confirm | None,
    as_json: bool,
) -> None:
    """See kvire.cli.store."""
    with opened(where, key_file) as place, late_progress() as report:
        if unreadable and not place.tenants:
            raise StoreError(
                f"{place.keyring.path} holds no key at all, so every block would count as unreadable: give the right "
                "--key-file, or use kvire store clear to remove everything"
            )
        garbage = _garbage(place, report, ttl_s, unreadable=unreadable)
        if garbage.orphans:  # a listing of a store in use may miss some: only what is missed twice is missing
            again = {entry.id for entry in _garbage(place, report, ttl_s, unreadable=unreadable).orphans}
            garbage = replace(garbage, orphans=[entry for entry in garbage.orphans if entry.id in again])
        sessions = _unreadable_sessions(place)
        if unreadable and not dry_run and confirm is not None and (garbage.unreadable or sessions):
            confirm(
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
                    _sessions(place).delete_tenant(tag)
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


@dataclass(frozen=True, slots=True)
class Choice:
    """Which blocks to pin: by KEY, by namespace, or those of a prompt. Exactly one of them."""

    keys: list[str]
    namespace: str | None
    prompt: Path | None
    model: str | None
    raw: bool

    def check(self) -> None:
        """Raises ConfigError."""
        if sum(map(bool, (self.keys, self.namespace, self.prompt))) != 1:
            raise ConfigError("say which blocks: KEY..., --namespace, or --prompt FILE with --model; one of them")
        if (self.prompt is None) != (self.model is None):
            raise ConfigError("--prompt FILE and --model MODEL go together: the model's tokenizer makes the keys")

    def of_prompt(self, place: Place, report: Progress) -> set[BlockKey]:
        """Keys of the prompt's blocks; none without a prompt."""
        if self.prompt is None or self.model is None:
            return set()
        from kvire.cli.store_prompt import prompt_keys, read_prompts  # noqa: PLC0415  (imports transformers)

        [text] = read_prompts([], [self.prompt]).values()
        return prompt_keys(place, self.model, text, raw=self.raw, report=report)

    def entries(self, survey: Survey, prompt_keys: set[BlockKey]) -> list[Entry]:
        """The blocks that are here. Raises StoreError."""
        if self.namespace is not None:
            return survey.space(self.namespace).entries
        if self.prompt is not None:
            found = [entry for entry in survey.entries if entry.id.key in prompt_keys]
            if not found:
                raise StoreError("no block of this prompt is stored here: kvire store warm computes and stores them")
            return found
        chains = [(space, space.path(key)) for space, key in map(survey.find, self.keys)]
        by_id = {entry.id: entry for space, path in chains for key in path for entry in space.blocks[key]}
        return list(by_id.values())


def pin(where: str | None, key_file: Path | None, chosen: Choice, *, pinned: bool, as_json: bool) -> None:
    """Pin or unpin, see kvire.cli.store."""
    chosen.check()
    with opened(where, key_file) as place, late_progress() as report:
        of_prompt = chosen.of_prompt(place, report)
        survey = place.survey(report)
        entries = chosen.entries(survey, of_prompt)
        kept = set() if pinned else _needed_by_pinned(survey, entries)
        changed = place.pin([entry for entry in entries if entry.id not in kept], report, pinned=pinned)
    values = {
        "store": place.name,
        "blocks": changed,
        "bytes": sum(entry.frame_bytes for entry in entries),
        "still_pinned": len(kept),
        "prompt_blocks_missing": len(of_prompt - {entry.id.key for entry in entries}),
    }
    if as_json:
        show.print_json(values)
        return
    print(f"{place.name}: {changed:,} blocks {'pinned' if pinned else 'unpinned'}")
    if kept:
        print(f"{len(kept):,} stay pinned: other pinned blocks build on them")
    if pinned and values["prompt_blocks_missing"]:
        print(
            f"{values['prompt_blocks_missing']:,} blocks of the prompt are not stored here: kvire store warm adds them"
        )


def forget(where: str | None, key_file: Path | None, tenant: str, *, confirm: Confirm | None, as_json: bool) -> None:
    """See kvire.cli.store."""
    with opened(where, key_file) as place, late_progress() as report:
        tag = place.tag_of(tenant)
        theirs = [entry for entry in place.entries(report) if entry.tenant_tag == tag]
        if confirm is not None:
            confirm(
                f"This destroys the key of the {show.tenant_name({'tenant': tenant})} in {place.keyring.path}, and "
                f"removes its {len(theirs):,} blocks and all its sessions from {place.name}. There is no way back."
            )
        place.keyring.forget(tenant)
        sessions = _sessions(place).delete_tenant(tag) if place.folder is not None else 0
        removed = place.patiently(lambda: place.tier.delete_tenant(tag))
        time.sleep(WRITERS_S)
        roots = {entry.root for entry in theirs}
        late = [entry for entry in place.entries(report) if entry.tenant_tag == tag or entry.root in roots]
        removed += place.delete(late, "forgotten", report)
        left = sum(entry.tenant_tag == tag for entry in place.entries(report))
    if left:
        raise StoreError(
            f"the key is destroyed, but {left:,} of its blocks are still in {place.name}, unreadable: "
            "kvire store gc --unreadable removes them"
        )
    values = {"store": place.name, "tenant": tenant, "blocks": removed, "sessions": sessions}
    if as_json:
        show.print_json(values)
        return
    print(f"{place.name}: key destroyed, {removed:,} blocks and {sessions:,} sessions removed")
    print("not covered: the memory of running servers, and backups or snapshots of the key file or of unsealed blocks")


def clear(where: str | None, key_file: Path | None, *, confirm: Confirm | None, as_json: bool) -> None:
    """See kvire.cli.store."""
    with opened(where, key_file) as place, late_progress() as report:
        ids = [entry.id for entry in place.entries(report)]
        if confirm is not None:
            confirm(f"This removes all {len(ids):,} blocks from {place.name}, of every tenant and whoever stored them.")
        removed = place.patiently(place.tier.clear)
        left = 0
        for start in range(0, len(ids), AT_ONCE):
            left += sum(place.tier.held(ids[start : start + AT_ONCE]))
            report("looking for what is left", min(start + AT_ONCE, len(ids)), len(ids))
    if left:
        raise StoreError(
            f"{left:,} blocks are in {place.name} again: somebody who is running stores them; end that, and clear again"
        )
    values = {"store": place.name, "removed": removed, "left": left}
    if as_json:
        show.print_json(values)
    else:
        print(f"{place.name}: {removed:,} blocks removed, and none of them is found any more")


def _garbage(place: Place, report: Progress, ttl_s: float | None, *, unreadable: bool) -> Garbage:
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


def _needed_by_pinned(survey: Survey, chosen: list[Entry]) -> set[BlockId]:
    """Those of the chosen blocks that lie before pinned ones that were not chosen."""
    ids = {entry.id for entry in chosen}
    needed = {
        key
        for space in survey.spaces
        for entry in space.entries
        if entry.pinned and entry.id not in ids
        for key in space.path(entry.id.key)
    }
    return {block_id for block_id in ids if block_id.key in needed}


def _leftovers(place: Place, *, free: bool) -> int:
    """Bytes that crashes left claimed; only a folder's tier has such."""
    tier = place.tier
    return place.patiently(lambda: tier.leftovers(free=free)) if isinstance(tier, DiskTier) else 0


def _sessions(place: Place) -> Sessions:
    assert place.folder is not None
    return Sessions(place.folder, place.keyring, 0)


def _unreadable_sessions(place: Place) -> list[bytes]:
    """Tags of tenants whose key is not at hand and that have sessions here."""
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
