"""A chat to keep, and where."""

from pathlib import Path

from kvire.sessions.folder import Sessions
from kvire.sessions.session_file import Session
from kvire.store.keyring import Keyring

MIB = 1 << 20
SAID = "the password of the vault is xyzzy-4711"
CHAT = Session(
    "work", ({"role": "user", "content": SAID}, {"role": "assistant", "content": "noted"}), (40123, 40456), "weights"
)


def opened(store: Path, keys: Path, *, encrypt: bool = True, limit: int = MIB) -> Sessions:
    return Sessions(store, Keyring(keys, encrypt=encrypt), limit)


def files(store: Path) -> list[Path]:
    return sorted(path for path in store.rglob("*") if not path.is_dir())
