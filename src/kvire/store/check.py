"""Reads frames only to verify them. Changes nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from kvire.codec.frame import Frames, Header
from kvire.codec.seal import SEALED
from kvire.core.errors import BlockMissing, FrameDamaged, FrameForeign
from kvire.store.keyring import Keyring
from kvire.store.tier import Entry, Tier

LOST = "lost"  # the tier's index led to something else
GROWTH = 4  # a frame may have been replaced by a longer one since it was listed


class CheckVerdict(StrEnum):
    """Result of reading one frame."""

    SOUND = "sound"
    UNOPENED = "unopened"  # sealed with a key that is not at hand: only its header and its length were checked
    FOREIGN = "foreign"  # of a newer version, say; nothing is known to be wrong with it
    DAMAGED = "damaged"
    GONE = "gone"  # since it was listed


@dataclass(frozen=True, slots=True)
class CheckedBlock:
    """Result for one block.

    cause: one word for the defect, else empty.
    """

    entry: Entry
    verdict: CheckVerdict
    cause: str = ""


def tenants_at_hand(keyring: Keyring) -> dict[bytes, str]:
    """Names of the tenants whose keys are in the key file, by tag. Makes no key.

    Raises StoreError.
    """
    return {keyring.tenant(name).tag: name for name in keyring.tenants()}


class Checker:
    """Checks frames of one tier with the available keys.

    tenants: from tenants_at_hand.
    """

    def __init__(self, tier: Tier, keyring: Keyring, tenants: Mapping[bytes, str]) -> None:
        self._tier = tier
        self._frames = Frames(keyring.tenant)
        self._tenants = tenants
        self._buffer = bytearray()

    def check(self, entry: Entry) -> CheckedBlock:
        """Read and verify a block.

        A damaged one is read twice, since it may have been replaced meanwhile. Raises
        TierUnavailable.
        """
        finding = self._look(entry)
        again = finding.verdict is CheckVerdict.DAMAGED and finding.cause != LOST
        return self._look(entry) if again else finding

    def _look(self, entry: Entry) -> CheckedBlock:
        damaged_before = self._tier.stats().evictions.get("damaged", 0)
        try:
            frame = self._read(entry)
            header = Header.parse(frame)
            is_sealed, tenant = header.seal == SEALED, self._tenants.get(header.tenant_tag)
            self._frames.verify(frame, tenant if is_sealed else None)
        except BlockMissing:
            # a tier that finds another block in the place of this one has removed it from its index
            # by now
            is_damage = self._tier.stats().evictions.get("damaged", 0) > damaged_before
            return (
                CheckedBlock(entry, CheckVerdict.DAMAGED, LOST) if is_damage else CheckedBlock(entry, CheckVerdict.GONE)
            )
        except FrameDamaged as error:
            return CheckedBlock(entry, CheckVerdict.DAMAGED, error.cause)
        except FrameForeign as error:
            return CheckedBlock(entry, CheckVerdict.FOREIGN, error.cause)
        if _claims(header) != (entry.id, entry.parent, entry.root, entry.tenant_tag, entry.index):
            return CheckedBlock(entry, CheckVerdict.DAMAGED, "misplaced")
        return CheckedBlock(entry, CheckVerdict.UNOPENED if is_sealed and tenant is None else CheckVerdict.SOUND)

    def _read(self, entry: Entry) -> memoryview:
        try:
            return self._fill(entry, entry.frame_bytes)
        except FrameDamaged:
            return self._fill(entry, GROWTH * entry.frame_bytes)

    def _fill(self, entry: Entry, size_bytes: int) -> memoryview:
        if len(self._buffer) < size_bytes:
            self._buffer = bytearray(size_bytes)
        buffer = memoryview(self._buffer)[:size_bytes]
        return buffer[: self._tier.read(entry.id, [buffer])]


def _claims(header: Header) -> tuple[object, ...]:
    return header.id, header.parent, header.root, header.tenant_tag, header.index
