"""Segment files: fixed slots for frames of about one size, made as a whole and reused.

A slot is a head of HEAD_BYTES and a frame behind it. The head identifies the frame's block, so that
a reader notices a slot that was given to another block meanwhile, and so that a lost index can be
rebuilt from the segments alone. It is written last and wiped first: a slot with a valid head holds
a whole frame, unless the power failed (then the frame's own checksum says so).

Head, little endian: 0 8 magic "KVSLOT" and u16 version | 8 32 key | 40 32 parent | 72 32 root | 104
16 tenant tag | 120 16 content | 136 u16 group, u16 zero | 140 u32 index | 144 u64 frame bytes | 152
f64 created | 160 f64 lifetime in seconds, 0 for none | 168 zeros | 184 u64 XXH3 of bytes 0 to 184.
"""

import errno
import struct
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock

from xxhash import xxh3_64_intdigest

from kvire.core.keys import BlockKey
from kvire.core.record import BlockId
from kvire.store.disk.files import Files

HEAD_BYTES = 192
SLOT_ALIGNMENT_BYTES = 4096
MOST_OPEN = 128  # files held open; a process has 1024 by default, and sockets to serve
SUFFIX = ".seg"
SLOT_BITS = 20  # a slot's id is its segment's id << SLOT_BITS | its place
MOST_SLOTS = 1 << SLOT_BITS
MOST_SEGMENT = MOST_BYTES = 1 << 40  # larger numbers in a name are none of ours
_MAGIC = b"KVSLOT\x01\x00"
_HEAD = struct.Struct("<8s32s32s32s16s16sHHIQdd16s")
_CHECK = struct.Struct("<Q")
_WHOSE_KEY, _WHOSE_AT, _WHOSE = 40, 136, struct.Struct("<HHIQ")
_BLANK = bytes(HEAD_BYTES)
_ZEROS = memoryview(bytes(1 << 20))


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """Address and times of the frame in a slot.

    created: seconds since the epoch.
    ttl_s: None for no end.
    """

    key: BlockKey
    group: int
    parent: BlockKey
    root: BlockKey
    tenant_tag: bytes
    content: bytes
    index: int
    frame_bytes: int
    created: float
    ttl_s: float | None

    @property
    def id(self) -> BlockId:
        """Address of the frame's block."""
        return BlockId(self.key, self.group)

    def encode(self) -> bytes:
        """HEAD_BYTES bytes."""
        fields = _HEAD.pack(
            _MAGIC, self.key, self.parent, self.root, self.tenant_tag, self.content, self.group, 0,
            self.index, self.frame_bytes, self.created, self.ttl_s or 0.0, b"",
        )  # fmt: skip
        return fields + _CHECK.pack(xxh3_64_intdigest(fields))

    @classmethod
    def decode(cls, head: bytes | bytearray | memoryview) -> "SlotHeader | None":
        """None if these bytes are no valid head."""
        if len(head) != HEAD_BYTES or xxh3_64_intdigest(head[: _HEAD.size]) != _CHECK.unpack(head[_HEAD.size :])[0]:
            return None
        magic, key, parent, root, tag, content, group, _, index, frame_bytes, created, ttl_s, _ = _HEAD.unpack(
            head[: _HEAD.size]
        )
        if magic != _MAGIC:
            return None
        return cls(key, group, parent, root, tag, content, index, frame_bytes, created, ttl_s or None)


def is_head_of(head: bytes, block_id: BlockId, frame_bytes: int) -> bool:
    """Whether these HEAD_BYTES are the head of that block's frame.

    As SlotHeader.decode tells, but faster.
    """
    group, _, _, length = _WHOSE.unpack_from(head, _WHOSE_AT)
    return (
        head[:_WHOSE_KEY] == _MAGIC + block_id.key
        and (group, length) == (block_id.group, frame_bytes)
        and xxh3_64_intdigest(head[: _HEAD.size]) == _CHECK.unpack_from(head, _HEAD.size)[0]
    )


def slot_bytes_for(frame_bytes: int) -> int:
    """Size of the slots that hold frames of this length."""
    return -(-(HEAD_BYTES + frame_bytes) // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES


def segment_of(slot: int) -> int:
    """The segment that a slot's id names."""
    return slot >> SLOT_BITS


def place_of(slot: int) -> int:
    """The place in its segment that a slot's id names."""
    return slot & (MOST_SLOTS - 1)


def slots_of(segment: int) -> tuple[int, int]:
    """Lowest and highest id that a slot of the segment can have."""
    return segment << SLOT_BITS, (segment << SLOT_BITS) + MOST_SLOTS - 1


@dataclass(slots=True)
class _Open:
    fd: int
    slot_bytes: int
    users: int = 0
    dropped: bool = False


class IndexDamagedError(Exception):
    """The index cannot be read as one: it must be rebuilt from the segments."""


class SegmentFiles:
    """The segment files of one folder. Thread-safe.

    folder: its open handle.

    A file's name gives its layout: two hexadecimal numbers, the segment's id and the slots' size.
    """

    def __init__(self, files: Files, folder: int) -> None:
        self._files = files
        self._folder = folder
        self._open: OrderedDict[int, _Open] = OrderedDict()
        self._lock = Lock()

    @staticmethod
    def name(segment: int, slot_bytes: int) -> str:
        """Name of a segment's file."""
        return f"{segment:011x}-{slot_bytes:x}{SUFFIX}"

    def found(self) -> list[tuple[int, int]]:
        """(segment, slot_bytes) of every plain file with a segment's name."""
        segments = []
        for name in self._files.names(self._folder):
            try:
                segment, slot_bytes = (int(part, 16) for part in name.removesuffix(SUFFIX).split("-"))
            except ValueError:
                continue
            sound = slot_bytes % SLOT_ALIGNMENT_BYTES == 0 and 0 < slot_bytes < MOST_BYTES and segment < MOST_SEGMENT
            if sound and self.name(segment, slot_bytes) == name and self._files.is_regular(self._folder, name):
                segments.append((segment, slot_bytes))
        return segments

    def make(self, segment: int, slot_bytes: int, slots: int) -> None:
        """Make a segment's file at its full size.

        Anything else of that name, such as a link, is removed first.
        """
        name = self.name(segment, slot_bytes)
        try:
            fd = self._files.create(self._folder, name)
        except FileExistsError:
            self._files.unlink(self._folder, name)
            fd = self._files.create(self._folder, name)
        try:
            self._files.allocate(fd, slot_bytes * slots)
        finally:
            self._files.close(fd)

    def remove(self, segment: int, slot_bytes: int) -> None:
        """Remove a segment's file; its space is free at once."""
        self.drop(segment)
        name = self.name(segment, slot_bytes)
        if self.exists(segment, slot_bytes):
            fd = self._files.open(self._folder, name)
            try:
                self._files.empty(fd)
            finally:
                self._files.close(fd)
        self._files.unlink(self._folder, name)

    def exists(self, segment: int, slot_bytes: int) -> bool:
        """Whether the segment's file is present, as a plain file."""
        return bool(self._files.is_regular(self._folder, self.name(segment, slot_bytes)))

    def slots(self, segment: int, slot_bytes: int) -> int:
        """How many slots the segment's file has."""
        with self._borrow(segment, slot_bytes) as fd:
            return min(MOST_SLOTS, self._files.length(fd) // slot_bytes)

    def drop(self, segment: int) -> None:
        """Close a removed segment's file here, as soon as it is unused."""
        with self._lock:
            if (entry := self._open.pop(segment, None)) is not None:
                entry.dropped = True
                self._close_unused([entry])

    def head(self, slot: int, slot_bytes: int) -> SlotHeader | None:
        """The slot's head; None if it has no valid one, or the disk cannot read it."""
        try:
            head, _ = self.read(slot, slot_bytes, ())
            return None if head is None else SlotHeader.decode(head)
        except OSError as error:
            if error.errno == errno.EIO:
                return None
            raise

    def read(self, slot: int, slot_bytes: int, buffers: Sequence[memoryview]) -> tuple[bytes | None, int]:
        """Fill `buffers` with the slot's frame; returns its head and the number of bytes.

        None instead of the head: it changed during the read. The head is checked again at the end:
        a writer wipes it first, so a frame is of one piece.
        """
        head, got = self.read_run(slot, slot_bytes, [buffers])[0]
        again = bytearray(HEAD_BYTES)
        with self._borrow(segment_of(slot), slot_bytes) as fd:
            self._files.read(fd, [memoryview(again)], place_of(slot) * slot_bytes)
        return (head, got) if head == bytes(again) else (None, 0)

    def read_run(
        self, slot: int, slot_bytes: int, buffers: Sequence[Sequence[memoryview]]
    ) -> list[tuple[bytes | None, int]]:
        """Fill each slot's buffers, of neighbouring slots from `slot` on, by one system call.

        Returns heads and lengths. A slot that is being written may come in parts: for callers that
        verify frames.
        """
        heads = [bytearray(HEAD_BYTES) for _ in buffers]
        filled: list[memoryview] = []
        ends: list[int] = []  # where each slot's bytes end among all that are read
        for i, (head, targets) in enumerate(zip(heads, buffers, strict=True)):
            if (gap_bytes := i * slot_bytes - (ends[-1] if ends else 0)) > 0:
                filled.append(memoryview(bytearray(gap_bytes)))
            filled += [memoryview(head), *targets]
            ends.append(i * slot_bytes + HEAD_BYTES + sum(map(len, targets)))
        got, offset = 0, place_of(slot) * slot_bytes
        with self._borrow(segment_of(slot), slot_bytes) as fd:
            while got < ends[-1] and (count := self._files.read(fd, _after(filled, got), offset + got)):
                got += count
        here = [min(end, got) - i * slot_bytes - HEAD_BYTES for i, end in enumerate(ends)]
        return [(bytes(head), count) if count >= 0 else (None, 0) for head, count in zip(heads, here, strict=True)]

    def write(self, slot: int, slot_bytes: int, head: SlotHeader, frame: memoryview) -> None:
        """Put a frame into a slot that no other caller uses.

        Raises IndexDamagedError for a slot beyond the file's end: no write makes a file longer.
        """
        offset = place_of(slot) * slot_bytes
        with self._borrow(segment_of(slot), slot_bytes) as fd:
            self._must_be_within(fd, offset + slot_bytes)
            self._files.write(fd, memoryview(_BLANK), offset)
            self._files.write(fd, frame, offset + HEAD_BYTES)
            self._files.write(fd, memoryview(head.encode()), offset)

    def wipe(self, slot: int, slot_bytes: int, frame_bytes: int) -> None:
        """Overwrite the slot's head and the first `frame_bytes` of its frame, so that it reads as
        empty.

        Raises IndexDamagedError as `write` does.
        """
        offset = place_of(slot) * slot_bytes
        end = offset + HEAD_BYTES + frame_bytes
        with self._borrow(segment_of(slot), slot_bytes) as fd:
            self._must_be_within(fd, end)
            for start in range(offset, end, len(_ZEROS)):
                self._files.write(fd, _ZEROS[: end - start], start)

    def _must_be_within(self, fd: int, end: int) -> None:
        if end > self._files.length(fd):
            raise IndexDamagedError("a slot is beyond the end of its segment's file")

    def read_ahead(self, slot: int, slot_bytes: int, length: int) -> None:
        """Bring the slot's head and the next `length` bytes into memory, unless first and last are
        there.
        """
        offset, length = place_of(slot) * slot_bytes, HEAD_BYTES + length
        with self._borrow(segment_of(slot), slot_bytes) as fd:
            if not (self._files.is_cached(fd, offset) and self._files.is_cached(fd, offset + length - 1)):
                self._files.read_ahead(fd, offset, length)

    def sync(self, segment: int, slot_bytes: int) -> None:
        """Return when all bytes written to the segment are on the disk."""
        with self._borrow(segment, slot_bytes) as fd:
            self._files.sync(fd)

    def close(self) -> None:
        """Close every file. They must not be used any more."""
        with self._lock:
            while self._open:
                self._files.close(self._open.popitem()[1].fd)

    @contextmanager
    def _borrow(self, segment: int, slot_bytes: int) -> Iterator[int]:
        """The segment's open file; it stays open until the context ends."""
        with self._lock:
            if (entry := self._open.get(segment)) is None:
                entry = _Open(self._files.open(self._folder, self.name(segment, slot_bytes)), slot_bytes)
                self._open[segment] = entry
            if entry.slot_bytes != slot_bytes:
                raise FileNotFoundError(errno.ENOENT, f"segment {segment} has slots of another size")
            self._open.move_to_end(segment)
            entry.users += 1
        try:
            yield entry.fd
        finally:
            with self._lock:
                entry.users -= 1
                surplus = [entry] if entry.dropped else []
                while len(self._open) > MOST_OPEN:
                    _, oldest = self._open.popitem(last=False)
                    oldest.dropped = True
                    surplus.append(oldest)
                self._close_unused(surplus)

    def _close_unused(self, entries: list[_Open]) -> None:
        for entry in entries:
            if entry.users == 0:
                self._files.close(entry.fd)


def _after(buffers: list[memoryview], done: int) -> list[memoryview]:
    """The rest of the buffers after their first `done` bytes."""
    if done == 0:
        return buffers
    left = []
    for buffer in buffers:
        if done < len(buffer):
            left.append(buffer[done:])
        done = max(0, done - len(buffer))
    return left
