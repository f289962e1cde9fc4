"""Output of `kvire store` commands: plain values for --json, tables for people."""

import json
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvire.cli.store.place import OpenedStore
from kvire.codec.frame import VERSION as FRAME_VERSION
from kvire.core.memory import format_size
from kvire.store.disk.index import FORMAT as INDEX_FORMAT
from kvire.store.disk.tier import DiskTier
from kvire.store.survey import SpaceUse, StoredChain, Survey
from kvire.store.tier import Entry

SHORT = 12  # hexadecimal digits that people see of a digest
UNITS_S = (("s", 120), ("min", 120), ("h", 48))  # and how many of each before the next one
FACTORS = (60, 60, 24)


def space_values(place: OpenedStore, space: SpaceUse) -> dict[str, Any]:
    """One namespace, without its chains."""
    return {
        "namespace": space.root.hex(),
        "tenant": place.tenants.get(space.tenant_tag),
        "tenant_tag": space.tenant_tag.hex(),
        "fields": space.fields,
        **totals(space.entries),
    }


def totals(entries: list[Entry]) -> dict[str, Any]:
    """Number, size and last use of blocks.

    used: time of the last use, in seconds since the epoch.
    """
    return {
        "blocks": len(entries),
        "bytes": sum(entry.frame_bytes for entry in entries),
        "pinned": sum(entry.pinned for entry in entries),
        "used": max((entry.used for entry in entries), default=None),
    }


def chain_values(space: SpaceUse, chain: StoredChain) -> dict[str, Any]:
    """One chain.

    tokens: None if the namespace was not noted.
    """
    return {
        "key": chain.key.hex(),
        "tokens": None if space.block_tokens is None else space.block_tokens * chain.length,
        "length": chain.length,
        "bytes": chain.size_bytes,
        "pinned": chain.pinned,
        "created": chain.created,
        "used": chain.used,
        "expires": chain.expires,
        "whole": chain.whole,
    }


def listing_values(place: OpenedStore, survey: Survey, tenant_tag: bytes | None, limit: int) -> dict[str, Any]:
    """Values of `ls`."""
    namespaces = []
    for space in survey.spaces:
        if tenant_tag in {None, space.tenant_tag}:
            chains = space.chains()
            namespaces.append(
                space_values(place, space)
                | {
                    "chains": [chain_values(space, chain) for chain in chains[:limit]],
                    "chains_left_out": max(0, len(chains) - limit),
                }
            )
    return {"store": place.name, "namespaces": namespaces}


def stat_values(place: OpenedStore, survey: Survey) -> dict[str, Any]:
    """Values of `stat`."""
    older = {space.root for space in survey.older_builds}
    tier, stats = place.tier, place.tier.stats()
    is_disk = isinstance(tier, DiskTier)
    by_tenant: dict[bytes, list[Entry]] = {}
    for entry in survey.entries:
        by_tenant.setdefault(entry.tenant_tag, []).append(entry)
    return {
        "store": place.name,
        "kind": tier.kind.name,
        "format": {"frame": FRAME_VERSION, "index": INDEX_FORMAT if is_disk else None},
        "health": (tier.degraded if isinstance(tier, DiskTier) else tier.health.error) or "ok",
        "used_bytes": stats.used_bytes if is_disk else None,
        "limit_bytes": stats.limit_bytes,
        **totals(survey.entries),
        "strange": len(survey.strange),
        "tenants": [
            {"tenant": place.tenants.get(tag), "tenant_tag": tag.hex(), "key_at_hand": tag in place.tenants}
            | totals(entries)
            for tag, entries in by_tenant.items()
        ],
        "older_builds": totals([entry for space in survey.older_builds for entry in space.entries]),
        "namespaces": [space_values(place, space) | {"older_build": space.root in older} for space in survey.spaces],
    }


def print_json(values: Any) -> None:
    """For programs."""
    print(json.dumps(values, indent=2, ensure_ascii=False))


def print_listing(values: Mapping[str, Any]) -> None:
    """For people."""
    if not values["namespaces"]:
        print(f"{values['store']}: no blocks")
    now = time.time()
    for space in values["namespaces"]:
        table = Table("key", "tokens", "blocks", "size", "used", "pinned", box=None, pad_edge=False)
        for chain in space["chains"]:
            table.add_row(
                chain["key"][:SHORT],
                "?" if chain["tokens"] is None else f"{chain['tokens']:,}",
                f"{chain['length']:,}" + ("" if chain["whole"] else " with holes"),
                format_size(chain["bytes"]),
                age(now - chain["used"]),
                f"{chain['pinned']:,}" if chain["pinned"] else "",
            )
        if space["chains_left_out"]:
            table.add_row(f"and {space['chains_left_out']:,} more", *[""] * 5)
        _print(f"[bold]namespace {space['namespace'][:SHORT]}[/]  {escape(_summary(space))}")
        Console().print(table)
        print()


def print_stat(values: Mapping[str, Any]) -> None:
    """For people."""
    limit = values["limit_bytes"]
    used = "" if values["used_bytes"] is None else f", the folder takes {format_size(values['used_bytes'])}"
    _print(
        f"{escape(values['store'])}: {values['blocks']:,} blocks, {format_size(values['bytes'])}{used}"
        + (f" of at most {format_size(limit)}" if limit else "")
    )
    _print(
        f"pinned {values['pinned']:,}, health: {escape(values['health'])}, frame version {values['format']['frame']}"
    )
    if values["strange"]:
        _print(
            f"{values['strange']:,} values under blocks' names are no frames of this version: see kvire store verify"
        )
    if (older := values["older_builds"])["blocks"]:
        _print(
            f"of older builds {older['blocks']:,} blocks, {format_size(older['bytes'])}: newer software computes them "
            "anew; kvire store gc --older-builds removes them"
        )
    for tenant in values["tenants"]:
        _print(f"{escape(tenant_name(tenant))}: {tenant['blocks']:,} blocks, {format_size(tenant['bytes'])}")
    now = time.time()
    for space in values["namespaces"]:
        _print(f"\n[bold]namespace {space['namespace'][:SHORT]}[/]  {escape(_summary(space))}")
        of_older = ", of an older build" if space["older_build"] else ""
        _print(f"  last used {age(now - space['used'])} ago{of_older}; read by an engine with exactly")
        for name, value in (space["fields"] or {"": "(its fields were not noted here)"}).items():
            if value:
                _print(f"  {name:<15}{escape(str(value))}")


def tenant_name(values: Mapping[str, Any]) -> str:
    """A tenant as people know it."""
    if values["tenant"] is None:
        return f"tenant {values['tenant_tag'][:SHORT]} (key not at hand)"
    return f"tenant {values['tenant']}" if values["tenant"] else "default tenant"


def age(seconds: float) -> str:
    """3 min, 5 h, 12 d: time since an event."""
    amount = max(0.0, seconds)
    for (unit, most), factor in zip(UNITS_S, FACTORS, strict=True):
        if amount < most:
            return f"{amount:.0f} {unit}"
        amount /= factor
    return f"{amount:.0f} d"


def _summary(space: Mapping[str, Any]) -> str:
    fields = space["fields"] or {}
    parts = [tenant_name(space), fields.get("kv_dtype")]
    if "block_size" in fields:
        parts.append(f"blocks of {fields['block_size']} tokens")
    if "weights" in fields:
        parts.append(f"weights {fields['weights'][:SHORT]}")
    parts += [f"{space['blocks']:,} blocks", format_size(space["bytes"])]
    return ", ".join(part for part in parts if part)


def _print(line: str) -> None:
    Console().print(line, soft_wrap=True, highlight=False)
