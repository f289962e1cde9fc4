"""Makes store.tar.xz beside it: folders as the version of today leaves them, for tests/store/test_golden_store.py.

    python tests/golden/make_store.py

Run it for a new version of the folder only, under another name: those of older versions stay as they were. `plain` was
left by a process that ended without closing it, `sealed` was closed. Their keys protect nothing else.
"""

import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from store.blocks import chain, kv_of, namespace

from kvire.core.config import StoreConfig
from kvire.store.open import open_store

HERE = Path(__file__).parent
CAPACITY_BYTES = 8 << 20
KV_BYTES = 300
LENGTHS = {"": 6, "another tenant": 3}  # blocks of each tenant's chain, of which the first two are pinned


def make(folder: Path, *, encrypt: bool, closed: bool) -> None:
    """A store folder and its key file in `folder`."""
    used = folder / "used"
    config = StoreConfig(path=used, disk_bytes=CAPACITY_BYTES, key_file=folder / "keyring.json", encrypt=encrypt)
    store = open_store(config)
    for number, (tenant, length) in enumerate(LENGTHS.items()):
        salt = store.tenant(tenant).salt
        records = chain(length, number, tenant=tenant, salt=salt, kv_bytes=KV_BYTES)
        for record in records:
            store.save(record, kv_of(record))
        root = namespace(salt).root
        store.note_namespace(root, {"weights": "w", "block_size": "16"})
        assert store.flush(10)
        store.pin([record.id for record in records[:2]], pinned=True)
    if not closed:
        shutil.copytree(used, folder / "store")
    store.close()
    if closed:
        shutil.copytree(used, folder / "store")
    shutil.rmtree(used)


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        for name, encrypt, closed in (("plain", False, False), ("sealed", True, True)):
            (Path(place) / name).mkdir()
            make(Path(place) / name, encrypt=encrypt, closed=closed)
        with tarfile.open(HERE / "store.tar.xz", "w:xz") as archive:
            for name in ("plain", "sealed"):
                archive.add(Path(place) / name, name)


if __name__ == "__main__":
    main()
