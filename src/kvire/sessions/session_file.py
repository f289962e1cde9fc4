r"""A session as the bytes of a file.

Two lines of JSON: a head (format, name, revision, model), and the messages and token ids; then
XXH3-128 of the file's name and both lines, in hex. A store that seals puts these lines behind

    0 8 magic b"KVIRE\x01SE" | 8 u16 version, little endian | 10 32 salt
    42 the lines under AES-256-GCM, tag last

The key is HKDF-SHA256(the tenant's secret, salt, info=b"kvire session 1"). All bytes before the
lines, and the file's name, are associated data: a file moved to another name does not open.
"""

import hmac
import json
import os
import re
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Self

import xxhash
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kvire.codec.seal import TenantKey
from kvire.core.errors import StoreError
from kvire.core.keys import field

VERSION = 1
MAGIC = b"KVIRE\x01SE"
SALT_BYTES = 32
HEADER_BYTES = len(MAGIC) + 2 + SALT_BYTES
TITLE = "kvire session"
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
# The salt differs for every content, and for every file that is written, so every key seals one
# message and the nonce need not differ. It is random and depends on the content, too: a machine
# that is restored from a snapshot, twice, may draw the same random bytes again.
NONCE = bytes(12)
CHECKSUM_BYTES = 32


class SessionError(StoreError):
    """One session cannot be read or kept.

    The message names no file: clients of a server may see it.
    """


@dataclass(frozen=True, slots=True)
class Session:
    """A saved chat. It is not changed, but replaced.

    messages: in the format of the OpenAI API, oldest first.
    token_ids: exact ids of the model's last prompt and answer.
    model: digest of the weights that they belong to.
    revision: random, new at every save; "" for one that was never saved.
    """

    name: str
    messages: tuple[dict[str, Any], ...] = ()
    token_ids: tuple[int, ...] = ()
    model: str = ""
    revision: str = ""

    def __post_init__(self) -> None:
        check_name(self.name)

    def known_ids(self, model: str) -> tuple[int, ...]:
        """Token ids that this model can continue; another model's ids mean nothing to it."""
        return self.token_ids if model == self.model else ()


@dataclass(frozen=True, slots=True)
class SessionHeader:
    """The first line: enough to list sessions and to detect changes."""

    name: str
    revision: str
    model: str

    @classmethod
    def parse(cls, line: bytes) -> Self:
        """Raises the errors of parsing, and SessionError for a newer version."""
        document = json.loads(line)
        version = document.pop(TITLE)
        if type(version) is int and version > VERSION:
            raise newer(version)
        head = cls(**document)
        if version != VERSION or not all(isinstance(text, str) for text in (head.name, head.revision, head.model)):
            raise ValueError
        return head


def check_name(name: str) -> None:
    """Raise SessionError for a name that a session cannot have."""
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        raise SessionError("a session's name has 1 to 64 of the characters A-Z, a-z, 0-9, dot, underscore and dash")


def file_name(key: TenantKey, name: str) -> str:
    """Name of a session's file, which hides the session's name from readers without the tenant's
    key.
    """
    secret = key.secret if key.secret is not None else key.salt.encode()
    return hmac.new(secret, field("kvire", b"session") + field("name", name.encode()), sha256).hexdigest()


def pack(session: Session, key: TenantKey) -> bytes:
    """The file's content."""
    head = {TITLE: VERSION, "name": session.name, "revision": session.revision, "model": session.model}
    body = {"messages": session.messages, "token_ids": session.token_ids}
    lines = b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in (head, body))
    file = file_name(key, session.name)
    lines += _checksum(file, lines)
    if key.secret is None:
        return lines
    salt = hmac.new(key.secret, os.urandom(SALT_BYTES) + file.encode() + lines, sha256).digest()
    header = MAGIC + VERSION.to_bytes(2, "little") + salt
    return header + _cipher(key.secret, salt).encrypt(NONCE, lines, header + file.encode())


def unpack_head(data: bytes, key: TenantKey, file: str) -> SessionHeader:
    """The head of a file called `file`.

    Raises SessionError where it is damaged, foreign or newer.
    """
    head = _head(_opened(data, key, file))
    if file != file_name(key, head.name):
        raise damaged()
    return head


def unpack(data: bytes, key: TenantKey, name: str) -> Session:
    """The session in the content of a file.

    Raises SessionError where it is damaged, foreign or newer.
    """
    file = file_name(key, name)
    lines = _opened(data, key, file)
    head = _head(lines)
    try:
        _, body, _ = lines.split(b"\n")
        if head.name != name or lines[-CHECKSUM_BYTES:] != _checksum(file, lines[:-CHECKSUM_BYTES]):
            raise ValueError
        content = json.loads(body)
        messages, token_ids = content["messages"], content["token_ids"]
        if not all(isinstance(message, dict) and isinstance(message["role"], str) for message in messages):
            raise ValueError
        if not all(type(token_id) is int and token_id >= 0 for token_id in token_ids):
            raise ValueError
        return Session(name, tuple(messages), tuple(token_ids), head.model, head.revision)
    except (ValueError, TypeError, KeyError, RecursionError):
        raise damaged() from None  # the cause may quote the conversation


def damaged() -> SessionError:
    """The file differs from what was written."""
    return SessionError("this session's file is damaged; remove the session, or go on under another name")


def newer(version: int) -> SessionError:
    """The file has a newer format."""
    return SessionError(
        f"this session was written by a newer Kvire (version {version}); use that, or go on under another name"
    )


def _head(lines: bytes) -> SessionHeader:
    try:
        return SessionHeader.parse(lines.partition(b"\n")[0])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise damaged() from None


def _opened(data: bytes, key: TenantKey, file: str) -> bytes:
    """The lines."""
    if key.secret is None:
        return data
    if len(data) < HEADER_BYTES or not data.startswith(MAGIC):
        raise damaged()
    if (version := int.from_bytes(data[len(MAGIC) : len(MAGIC) + 2], "little")) > VERSION:
        raise newer(version)
    header = data[:HEADER_BYTES]
    try:
        return _cipher(key.secret, header[-SALT_BYTES:]).decrypt(NONCE, data[HEADER_BYTES:], header + file.encode())
    except InvalidTag:
        raise damaged() from None


def _cipher(secret: bytes, salt: bytes) -> AESGCM:
    return AESGCM(HKDF(SHA256(), 32, salt=salt, info=b"kvire session 1").derive(secret))


def _checksum(file: str, lines: bytes) -> bytes:
    return xxhash.xxh3_128_hexdigest(file.encode() + lines).encode()
