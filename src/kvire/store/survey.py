"""Summary of a tier's listing: namespaces, chains of blocks, and unreachable blocks.

For administration of a store; nothing here reads a frame or changes anything.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from kvire.core.errors import StoreError
from kvire.core.keys import BlockKey
from kvire.core.spec import windows_of
from kvire.store.tier import Entry

LEAST_PREFIX_DIGITS = 6  # of a key or root, as people shorten them


@dataclass(frozen=True, slots=True)
class StoredChain:
    """Blocks from the start of a prompt up to one that no stored block builds on.

    key: of the last one.
    length: places from the first to the last.
    size_bytes, pinned: of all blocks present.
    whole: whether every block that a hit needs is present.
    """

    key: BlockKey
    length: int
    size_bytes: int
    pinned: int
    created: float
    used: float
    expires: float | None
    whole: bool


@dataclass(frozen=True, slots=True)
class _Path:
    """The way from the root to one key."""

    size_bytes: int
    pinned: int
    whole: bool


@dataclass
class SpaceUse:
    """The blocks of one namespace.

    fields: its note, or None.
    blocks: by key, one entry for each group.
    """

    root: BlockKey
    tenant_tag: bytes
    fields: Mapping[str, str] | None
    blocks: dict[BlockKey, list[Entry]] = field(default_factory=lambda: defaultdict(list))

    @property
    def entries(self) -> list[Entry]:
        """Every block."""
        return [entry for entries in self.blocks.values() for entry in entries]

    @property
    def block_tokens(self) -> int | None:
        """Tokens in each block, if that is known."""
        size = (self.fields or {}).get("block_size", "")
        return int(size) if size.isdecimal() else None

    @property
    def needed_groups(self) -> frozenset[int] | None:
        """Groups of which a hit needs every block from the first on; the others have windows.

        None: not known.
        """
        windows = windows_of((self.fields or {}).get("spec", ""))
        return None if windows is None else frozenset(group for group, window in enumerate(windows) if window is None)

    @property
    def build(self) -> str | None:
        """The software that computed these blocks; None: not known, or older than such notes."""
        return None if self.fields is None else self.fields.get("build")

    @property
    def used(self) -> float:
        """When the most recently used block was used, in seconds since the epoch."""
        return max(entry.used for entry in self.entries)

    @property
    def apart_from_build(self) -> tuple[Any, ...]:
        """The part of the namespace shared with namespaces that differ in the build alone."""
        fields = (self.fields or {}).items()
        return (self.tenant_tag, *sorted((name, value) for name, value in fields if name != "build"))

    def chains(self) -> list[StoredChain]:
        """All chains, the one used last first."""
        parents = {entries[0].parent for entries in self.blocks.values()}
        chains = [self._chain_to(key) for key in self.blocks if key not in parents]
        return sorted(chains, key=lambda chain: (-chain.used, chain.key))

    def path(self, key: BlockKey) -> list[BlockKey]:
        """The keys from `key` back to the root, as far as they are present.

        key: of a present block.
        """
        found = [key]
        while (parent := self._before(found[-1])) is not None:
            found.append(parent)
        return found

    def orphans(self) -> list[Entry]:
        """Blocks that no hit can reach, since one before them is missing.

        Empty if the groups are not known.
        """
        if not self.needed_groups:
            return []
        return [entry for key, path in self._paths.items() if not path.whole for entry in self.blocks[key]]

    def _before(self, key: BlockKey) -> BlockKey | None:
        """The block that `key` builds on, if present.

        A claimed parent that is not earlier in the sequence is ignored.
        """
        entry = self.blocks[key][0]
        parent = BlockKey(entry.parent)
        return parent if parent in self.blocks and self.blocks[parent][0].index < entry.index else None

    def _chain_to(self, key: BlockKey) -> StoredChain:
        entries, path = self.blocks[key], self._paths[key]
        lives = [entry.expires for entry in entries if entry.expires is not None]
        return StoredChain(
            key=key,
            length=entries[0].index + 1,
            size_bytes=path.size_bytes,
            pinned=path.pinned,
            created=max(entry.created for entry in entries),
            used=max(entry.used for entry in entries),
            expires=min(lives, default=None),
            whole=path.whole,
        )

    @cached_property
    def _paths(self) -> dict[BlockKey, _Path]:
        needed = self.needed_groups
        paths: dict[BlockKey, _Path] = {}
        for key, entries in sorted(self.blocks.items(), key=lambda item: item[1][0].index):
            before = paths.get(BlockKey(entries[0].parent))
            follows = entries[0].parent == self.root or (before is not None and before.whole)
            complete = (needed or frozenset()) <= {entry.id.group for entry in entries}
            paths[key] = _Path(
                size_bytes=sum(entry.frame_bytes for entry in entries) + (before.size_bytes if before else 0),
                pinned=sum(entry.pinned for entry in entries) + (before.pinned if before else 0),
                whole=(follows and complete) or needed == frozenset(),
            )
        return paths


class Survey:
    """Every block of a listing, by namespace.

    notes: fields of namespaces, by root.
    strange: entries with a block's name that are no frame, in tiers that can have such.
    """

    def __init__(self, entries: Iterable[Entry], notes: Mapping[BlockKey, Mapping[str, str]]) -> None:
        self.strange: list[Entry] = []
        self._spaces: dict[BlockKey, SpaceUse] = {}
        for entry in entries:
            if not entry.root:
                self.strange.append(entry)
                continue
            root = BlockKey(entry.root)
            if (space := self._spaces.get(root)) is None:
                space = self._spaces[root] = SpaceUse(root, entry.tenant_tag, notes.get(root))
            space.blocks[entry.id.key].append(entry)

    @property
    def spaces(self) -> list[SpaceUse]:
        """All namespaces, the one used last first."""
        return sorted(self._spaces.values(), key=lambda space: -space.used)

    @property
    def older_builds(self) -> list[SpaceUse]:
        """Namespaces that no engine of a build in use reads any more.

        Of namespaces that differ in the build alone, all but the most recently used; and namespaces
        whose notes are older than the build field.
        """
        newest: dict[tuple[Any, ...], str] = {}
        older = []
        for space in self.spaces:
            if space.build is None:
                older += [space] if space.fields is not None else []
            elif newest.setdefault(space.apart_from_build, space.build) != space.build:
                older.append(space)
        return older

    @property
    def entries(self) -> list[Entry]:
        """Every block, without strange ones."""
        return [entry for space in self._spaces.values() for entry in space.entries]

    def space(self, prefix: str) -> SpaceUse:
        """The namespace whose digest begins with these hexadecimal digits. Raises StoreError."""
        return self._spaces[_only_one("namespace", prefix, self._spaces)]

    def find(self, prefix: str) -> tuple[SpaceUse, BlockKey]:
        """The block whose key begins with these hexadecimal digits. Raises StoreError."""
        owners = {key: space for space in self._spaces.values() for key in space.blocks}
        key = _only_one("block", prefix, owners)
        return owners[key], key


def _only_one(what: str, prefix: str, known: Iterable[BlockKey]) -> BlockKey:
    wanted = prefix.lower()
    if not re.fullmatch(rf"[0-9a-f]{{{LEAST_PREFIX_DIGITS},64}}", wanted):
        raise StoreError(
            f"{prefix!r} names no {what}: give at least {LEAST_PREFIX_DIGITS} hexadecimal digits, as `kvire store ls` "
            "shows them"
        )
    found = [key for key in known if key.hex().startswith(wanted)]
    if len(found) != 1:
        say = "several" if found else "no"
        raise StoreError(f"{say} {what}s here begin with {prefix}: `kvire store ls` lists them; give more digits")
    return found[0]
