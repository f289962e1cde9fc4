"""Proof that a section of a frame is unchanged: a checksum, or a seal that also hides it.

A seal also authenticates: without the tenant's secret no valid section can be made. A checksum
finds accidents only. Both cover the frame's whole header, so a section belongs to one frame and one
place in it.
"""

import os
import threading
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kvire.codec.buffers import DIGEST_BYTES, BytesLike, checksum
from kvire.core.errors import FrameDamaged

TAG_BYTES = DIGEST_BYTES  # AES-GCM's tag is as long
SECRET_BYTES = 32
SESSION_BYTES = 16
CHECKSUMMED, SEALED = 0, 1  # how a frame is protected, as its header says it


@dataclass(frozen=True, slots=True)
class TenantKey:
    """Key material for the frames of one tenant. Only its name and tag may be shown.

    salt: 64 hex digits, random; it joins every key, so that two tenants have none in common.
    secret: SECRET_BYTES, or None in a store that does not seal.
    tag: TAG_BYTES that identify the tenant in names and headers.
    """

    name: str
    salt: str = field(repr=False)
    secret: bytes | None = field(repr=False)
    tag: bytes


class Guard(Protocol):
    """Protects the sections of one frame. header: its HEADER_BYTES; section: 1 or 2."""

    def protect(self, header: bytes, section: int, plain: BytesLike, out: memoryview) -> None:
        """Write the section and its tag: out is TAG_BYTES longer than plain."""

    def plain(self, header: bytes, section: int, protected: memoryview, out: memoryview | None = None) -> BytesLike:
        """The protected bytes, in `out` if given.

        Raises FrameDamaged; `out` may then hold anything.
        """


class Checksum:
    """XXH3-128 (canonical, big-endian) of header, section number as u32, and section."""

    def tag(self, header: bytes, section: int, plain: BytesLike) -> bytes:
        """TAG_BYTES that follow the section."""
        return checksum(self.head(header, section), plain)

    @staticmethod
    def head(header: bytes, section: int) -> bytes:
        """Bytes that the tag covers before the section."""
        return header + section.to_bytes(4, "little")

    def check(self, header: bytes, section: int, plain: BytesLike, tag: BytesLike) -> None:
        """Raise FrameDamaged unless the tag is the section's."""
        if self.tag(header, section, plain) != tag:
            raise FrameDamaged("checksum")

    def protect(self, header: bytes, section: int, plain: BytesLike, out: memoryview) -> None:
        """As Guard. The tag is that of the copy, which no other thread can have changed in
        between.
        """
        out[:-TAG_BYTES] = plain
        out[-TAG_BYTES:] = self.tag(header, section, out[:-TAG_BYTES])

    def plain(self, header: bytes, section: int, protected: memoryview, out: memoryview | None = None) -> BytesLike:
        """As Guard; without `out` a view of the section."""
        plain = protected[:-TAG_BYTES]
        self.check(header, section, plain, protected[-TAG_BYTES:])
        if out is None:
            return plain
        out[:] = plain
        return out


@dataclass(frozen=True, slots=True)
class Seal:
    """AES-256-GCM with the header as associated data.

    Nonce: section number as u32, then the frame's counter as u64.
    """

    cipher: AESGCM
    counter: int

    def _nonce(self, section: int) -> bytes:
        return section.to_bytes(4, "little") + self.counter.to_bytes(8, "little")

    def protect(self, header: bytes, section: int, plain: BytesLike, out: memoryview) -> None:
        """As Guard."""
        self.cipher.encrypt_into(self._nonce(section), plain, header, out)

    def plain(self, header: bytes, section: int, protected: memoryview, out: memoryview | None = None) -> BytesLike:
        """As Guard."""
        try:
            if out is None:
                return self.cipher.decrypt(self._nonce(section), protected, header)
            self.cipher.decrypt_into(self._nonce(section), protected, header, out)
        except InvalidTag:
            raise FrameDamaged("seal") from None
        return out


@lru_cache(maxsize=1024)  # a store is read with one key per tenant and process that wrote to it
def cipher(secret: bytes, session: bytes) -> AESGCM:
    """The cipher of all frames that one process sealed for one tenant."""
    return AESGCM(HKDF(SHA256(), 32, salt=session, info=b"kvire frame 1").derive(secret))


def forget_ciphers() -> None:
    """Drop the derived keys of this process; they are derived again from the secret."""
    cipher.cache_clear()


class SealSession:
    """Gives each frame that this process seals a unique (session, counter).

    The session is random, and new in every process and after a fork, so that counting from 0 never
    repeats a nonce under a derived key. (A process that is restored twice from one memory image
    would: docs/adr/0012.)
    """

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Begin a new session. Replaces the lock, too: a fork may have copied it while it was
        held.
        """
        self._lock = threading.Lock()
        self._id = os.urandom(SESSION_BYTES)
        self._count = 0

    def next(self) -> tuple[bytes, int]:
        """Session and counter of one frame. Thread-safe."""
        with self._lock:
            self._count += 1
            return self._id, self._count


SESSION = SealSession()  # one per process: nonces must be unique across all objects that seal
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=SESSION.renew)
