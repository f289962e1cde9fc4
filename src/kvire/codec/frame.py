"""A frame: one block as bytes. Only this file knows the offsets (docs/format.md).

header (HEADER_BYTES) | token ids, zeros, tag | payload, tag. Nothing follows, so a frame has
exactly one length. Parsing trusts nothing: every length is checked against the bytes present before
anything is allocated for it.
"""

import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from kvire.codec.buffers import ALIGNMENT_BYTES, BytesLike, aligned_buffer, checksums, copied_checksums
from kvire.codec.codec import RAW, Codec, codecs
from kvire.codec.seal import (
    CHECKSUMMED,
    SEALED,
    SESSION,
    SESSION_BYTES,
    TAG_BYTES,
    Checksum,
    Guard,
    Seal,
    TenantKey,
    cipher,
)
from kvire.core.errors import FrameDamaged, FrameForeign
from kvire.core.keys import BlockKey
from kvire.core.record import BlockId, BlockRecord

MAGIC = b"KVIRE\x01FR"
VERSION = 1
TOKEN_IDS, PAYLOAD = 1, 2  # sections
MAX_TOKENS = 1 << 20
MAX_KV_BYTES = 1 << 40

_LAYOUT = struct.Struct("<8sHBBHH32s32s32sIIQQ16s16sQ16s")
HEADER_BYTES = _LAYOUT.size
assert HEADER_BYTES == 192

NO_SESSION = bytes(SESSION_BYTES), 0  # and no counter: of frames that are not sealed

_CHECKSUM = Checksum()


@dataclass(frozen=True, slots=True)
class Header:
    """A header whose fields are in range; only the sections' tags can prove them true.

    stored_bytes: of the payload, its tag not included.
    session, counter: of the seal; zero without one.
    """

    version: int
    codec: int
    seal: int
    group: int
    key: bytes
    parent: bytes
    root: bytes
    index: int
    token_count: int
    kv_bytes: int
    stored_bytes: int
    content: bytes
    session: bytes
    counter: int
    tenant_tag: bytes

    @classmethod
    def parse(cls, frame: BytesLike) -> Self:
        """Header of a frame, or of its first HEADER_BYTES.

        Raises FrameDamaged; FrameForeign for a newer version.
        """
        if len(frame) < HEADER_BYTES:
            raise FrameDamaged("length")
        magic, version, codec, seal, group, zero, *rest = _LAYOUT.unpack_from(frame)
        if magic != MAGIC:
            raise FrameDamaged("magic")
        if version > VERSION:
            raise FrameForeign("version")
        header = cls(version, codec, seal, group, *rest)
        if codec not in codecs() or seal > SEALED:  # a newer version may have added one
            raise FrameForeign("codec" if codec not in codecs() else "seal")
        if zero or not header._in_range():
            raise FrameDamaged("header")
        return header

    def _in_range(self) -> bool:
        shorter = self.stored_bytes < self.kv_bytes
        return (
            self.version == VERSION
            and 0 < self.token_count <= MAX_TOKENS
            and 0 < self.kv_bytes <= MAX_KV_BYTES
            and (shorter if codecs()[self.codec].shortens else self.stored_bytes == self.kv_bytes)
            and (self.seal == SEALED or (self.counter == 0 and not any(self.session)))
        )

    @property
    def id(self) -> BlockId:
        """The block's address."""
        return BlockId(BlockKey(self.key), self.group)

    @property
    def prefix_bytes(self) -> int:
        """Offset of the payload."""
        return prefix_bytes(self.token_count)

    @property
    def frame_bytes(self) -> int:
        """Length that the whole frame has."""
        return self.prefix_bytes + self.stored_bytes + TAG_BYTES

    def stands_for(self, record: BlockRecord, tenant: TenantKey) -> bool:
        """Whether every field matches a frame of this block."""
        return (
            self.key == record.id.key
            and self.tenant_tag == tenant.tag
            and (self.group, self.index, self.token_count, self.kv_bytes, self.parent, self.root, self.content)
            == (
                record.id.group,
                record.index,
                len(record.token_ids),
                record.kv_bytes,
                record.parent,
                record.root,
                record.content,
            )
        )


class Frames:
    """One tier's way of writing frames; any tier reads frames of any other. Thread-safe.

    keys: a tenant's key by its name, asked anew for every frame or run of frames.
    codec: for writing, where it pays.

    Frames are sealed iff the tenant has a secret, and then only sealed ones are read: write access
    to the store must not be enough to inject frames without a seal.
    """

    def __init__(self, keys: Callable[[str], TenantKey], codec: Codec = RAW) -> None:
        self._keys = keys
        self.codec = codec
        self._scratch: deque[memoryview] = deque(maxlen=24)  # as many as are usually read at once

    def frame_bytes(self, record: BlockRecord) -> int:
        """Upper limit of `encode`'s result; exact without compression."""
        return prefix_bytes(len(record.token_ids)) + record.kv_bytes + TAG_BYTES

    def encode(self, record: BlockRecord, kv: memoryview, out: memoryview) -> int:
        """Write the block's frame into `out`, at least frame_bytes(record) long; returns its
        length.
        """
        assert len(kv) == record.kv_bytes and len(out) >= self.frame_bytes(record)
        assert 0 < len(record.token_ids) <= MAX_TOKENS and 0 < len(kv) <= MAX_KV_BYTES
        tenant = self._keys(record.tenant)
        encoded = self.codec.encode(kv)
        codec, payload = (RAW.id, kv) if encoded is None else (self.codec.id, encoded)
        session, counter = NO_SESSION if tenant.secret is None else SESSION.next()
        header = _header(record, tenant, codec, len(payload), session, counter)
        guard: Guard = _CHECKSUM if tenant.secret is None else Seal(cipher(tenant.secret, session), counter)
        start = prefix_bytes(len(record.token_ids))
        end = start + len(payload) + TAG_BYTES
        out[:HEADER_BYTES] = header
        guard.protect(header, TOKEN_IDS, _pack_ids(record.token_ids), out[HEADER_BYTES:start])
        guard.protect(header, PAYLOAD, payload, out[start:end])
        return end

    def reading(self, record: BlockRecord, kv_out: memoryview) -> "Reading":
        """Begin to read one block into `kv_out`, writable and record.kv_bytes long. See Reading."""
        return self.readings([(record, kv_out)])[0]

    def readings(self, wanted: Iterable[tuple[BlockRecord, memoryview]]) -> list["Reading"]:
        """As `reading`, of several blocks at once; a tenant's key is asked for once."""
        keys: dict[str, TenantKey] = {}
        readings = []
        for record, kv_out in wanted:
            assert len(kv_out) == record.kv_bytes and not kv_out.readonly
            if (tenant := keys.get(record.tenant)) is None:
                tenant = keys[record.tenant] = self._keys(record.tenant)
            readings.append(Reading(self, record, tenant, kv_out))
        return readings

    def copy_out(
        self, wanted: Sequence[tuple[BlockRecord, memoryview]], frames: Sequence[memoryview | None]
    ) -> list[bool]:
        """Copy verified KV from whole frames in memory into each block's buffer; whether, per
        block.

        Only frames that are raw and checksummed, as most in memory are; use `reading` for the
        others.
        """
        readings = self.readings(wanted)
        pieces: dict[int, tuple[bytes, memoryview, memoryview]] = {}
        for i, (reading, (record, kv_out), frame) in enumerate(zip(readings, wanted, frames, strict=True)):
            start, end = prefix_bytes(len(record.token_ids)), self.frame_bytes(record)
            if frame is not None and (head := reading.payload_head(frame[:start], len(frame))) is not None:
                pieces[i] = head, frame[start : end - TAG_BYTES], kv_out
        tags = dict(zip(pieces, copied_checksums(list(pieces.values())), strict=True))
        return [i in tags and frame is not None and frame[-TAG_BYTES:] == tags[i] for i, frame in enumerate(frames)]

    def token_ids(self, prefix: BytesLike, tenant: str) -> tuple[Header, tuple[int, ...]]:
        """Header and token ids from a frame's first bytes; no KV needed.

        At least prefix_bytes(of its token count) are needed. Raises FrameDamaged, also for too few
        bytes, and FrameForeign for a frame that is not the tenant's.
        """
        header = Header.parse(prefix)
        if len(prefix) < header.prefix_bytes:
            raise FrameDamaged("length")
        ids = _token_ids(header, memoryview(prefix), _guard(header, self._keys(tenant)))
        return header, struct.unpack_from(f"<{header.token_count}i", ids)

    def verify(self, frame: memoryview, tenant: str | None) -> Header:
        """Check a whole frame as far as possible.

        With the tenant's key everything is checked; with None, everything that needs no key. Raises
        FrameDamaged, and FrameForeign for a frame that is not the tenant's.
        """
        header = Header.parse(frame)
        if len(frame) != header.frame_bytes:
            raise FrameDamaged("length")
        if header.seal == CHECKSUMMED:
            _check_sections(header, frame, _CHECKSUM)
        if tenant is not None:
            guard = _guard(header, self._keys(tenant))
            if header.seal == SEALED:
                _check_sections(header, frame, guard)
        return header

    def take_scratch(self, size_bytes: int) -> memoryview:
        """Memory for at least one frame of that length.

        Call `give_scratch` once no writer is left.
        """
        try:
            scratch = self._scratch.pop()
        except IndexError:
            return aligned_buffer(size_bytes)
        return scratch if len(scratch) >= size_bytes else aligned_buffer(size_bytes)

    def give_scratch(self, scratch: memoryview) -> None:
        """Return scratch memory for another read."""
        self._scratch.append(scratch)


class Reading:
    """One read of one block: a tier fills `buffers` in order, then `finish` verifies them.

    An unsealed raw frame is read straight into kv_out; anything else into scratch memory, which
    only `finish` returns: after a failed read, the tier may still be writing.
    """

    def __init__(self, frames: Frames, record: BlockRecord, tenant: TenantKey, kv_out: memoryview) -> None:
        self._frames = frames
        self._record = record
        self._tenant = tenant
        self._kv_out = kv_out
        self._scratch: memoryview | None = None
        start = prefix_bytes(len(record.token_ids))
        if tenant.secret is None and frames.codec == RAW:
            around = memoryview(bytearray(start + TAG_BYTES))
            self.buffers = [around[:start], kv_out, around[start:]]
        else:
            self._scratch = frames.take_scratch(frames.frame_bytes(record))
            self.buffers = [self._scratch[: frames.frame_bytes(record)]]

    def finish(self, length: int) -> None:
        """Verify the first `length` bytes of the buffers and leave the KV in kv_out.

        Raises FrameDamaged, or FrameForeign for an intact frame of another block; kv_out is
        undefined then. To be called at most once.
        """
        try:
            self._finish(length)
        finally:
            scratch, self._scratch = self._scratch, None
            if scratch is not None:
                self._frames.give_scratch(scratch)

    def succeeds(self, length: int) -> bool:
        """As `finish`, but returns whether the block is in kv_out now."""
        try:
            self.finish(length)
        except (FrameDamaged, FrameForeign):
            return False
        return True

    def payload_head(self, prefix: memoryview, length: int) -> bytes | None:
        """Bytes that the payload's checksum covers before the payload.

        None unless the frame is raw, checksummed, of the right length, and begins as this block's
        does.
        """
        if self._tenant.secret is not None or length != self._frames.frame_bytes(self._record):
            return None
        header = _header(self._record, self._tenant, RAW.id, self._record.kv_bytes, *NO_SESSION)
        ids = _pack_ids(self._record.token_ids)
        if prefix.tobytes() != header + ids + _CHECKSUM.tag(header, TOKEN_IDS, ids):
            return None
        return _CHECKSUM.head(header, PAYLOAD)

    def _finish(self, length: int) -> None:
        header = Header.parse(self.buffers[0][:length])
        if length != header.frame_bytes:
            raise FrameDamaged("length")
        if not header.stands_for(self._record, self._tenant):
            self._frames.verify(self._joined(length), self._record.tenant)
            raise FrameForeign("block")
        guard = _guard(header, self._tenant)
        in_place = len(self.buffers) > 1 and header.codec == RAW.id
        frame = self.buffers[0] if in_place else self._joined(length)
        if _token_ids(header, frame, guard) != _pack_ids(self._record.token_ids):
            raise FrameForeign("block")
        raw_header = bytes(frame[:HEADER_BYTES])
        if in_place:
            _CHECKSUM.check(raw_header, PAYLOAD, self._kv_out, self.buffers[2])
        elif header.codec == RAW.id:
            guard.plain(raw_header, PAYLOAD, frame[header.prefix_bytes :], self._kv_out)
        else:
            payload = guard.plain(raw_header, PAYLOAD, frame[header.prefix_bytes :])
            codecs()[header.codec].decode(payload, self._kv_out)

    def _joined(self, length: int) -> memoryview:
        """The frame in one piece."""
        whole = self.buffers[0] if len(self.buffers) == 1 else memoryview(b"".join(self.buffers))
        return whole[:length]


def finish_all(readings: Sequence[Reading], lengths: Sequence[int | None]) -> list[bool]:
    """Reading.succeeds for each with a length, False for the others; all checksums at once."""
    done = [False] * len(readings)
    pieces: dict[int, tuple[bytes, memoryview]] = {}
    for i, (reading, length) in enumerate(zip(readings, lengths, strict=True)):
        if length is None:
            continue
        in_place = len(reading.buffers) > 1
        if in_place and (head := reading.payload_head(reading.buffers[0], length)) is not None:
            pieces[i] = head, reading.buffers[1]
        else:
            done[i] = reading.succeeds(length)
    for i, tag in zip(pieces, checksums(list(pieces.values())), strict=True):
        done[i] = readings[i].buffers[2] == tag
    return done


def prefix_bytes(token_count: int) -> int:
    """How much of a frame comes before its payload: header, token ids, and their tag."""
    return -(-(HEADER_BYTES + 4 * token_count + TAG_BYTES) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _header(
    record: BlockRecord, tenant: TenantKey, codec: int, stored_bytes: int, session: bytes, counter: int
) -> bytes:
    """HEADER_BYTES of a frame of this block."""
    return _LAYOUT.pack(
        MAGIC, VERSION, codec, CHECKSUMMED if tenant.secret is None else SEALED, record.id.group, 0, record.id.key,
        record.parent, record.root, record.index, len(record.token_ids), record.kv_bytes, stored_bytes, record.content,
        session, counter, tenant.tag,
    )  # fmt: skip


def _pack_ids(token_ids: Sequence[int]) -> bytes:
    """Section 1: its length is given by `prefix_bytes`, padded with zeros."""
    ids = struct.pack(f"<{len(token_ids)}i", *token_ids)
    return ids.ljust(prefix_bytes(len(token_ids)) - HEADER_BYTES - TAG_BYTES, b"\0")


def _guard(header: Header, tenant: TenantKey) -> Guard:
    """The guard of the frame's sections.

    Raises FrameForeign if this tenant must not, or cannot, read them.
    """
    if header.tenant_tag != tenant.tag:
        raise FrameForeign("sealed" if header.seal == SEALED else "tenant")
    if header.seal == CHECKSUMMED:
        if tenant.secret is not None:
            raise FrameForeign("unsealed")
        return _CHECKSUM
    if tenant.secret is None:
        raise FrameForeign("sealed")
    return Seal(cipher(tenant.secret, header.session), header.counter)


def _token_ids(header: Header, frame: memoryview, guard: Guard) -> BytesLike:
    """Bytes of the token ids, verified.

    frame: prefix_bytes or more of it.
    """
    return guard.plain(bytes(frame[:HEADER_BYTES]), TOKEN_IDS, frame[HEADER_BYTES : header.prefix_bytes])


def _check_sections(header: Header, frame: memoryview, guard: Guard) -> None:
    _token_ids(header, frame, guard)
    guard.plain(bytes(frame[:HEADER_BYTES]), PAYLOAD, frame[header.prefix_bytes :])
