"""`kvire store` on what other engines wrote."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

RUN = "import sys; from kvire.cli.main import app; sys.argv[0] = 'kvire'; app()"


def kvire_store(command: str, folder: Path, key_file: Path) -> Any:
    """What it says; it must end well."""
    told = subprocess.run(
        [sys.executable, "-c", RUN, "store", command, str(folder), "--json"],
        env=os.environ | {"KVIRE_KEY_FILE": str(key_file)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert told.returncode == 0, told.stdout + told.stderr
    return json.loads(told.stdout)


def sound_and_whole(folder: Path, key_file: Path, *, engine: str, least_blocks: int) -> None:
    """One namespace, which says whose it is; every block can be read, and belongs to a chain without a hole."""
    [space] = kvire_store("stat", folder, key_file)["namespaces"]
    assert space["fields"]["build"].startswith(engine)
    assert space["tenant"] == ""
    verified = kvire_store("verify", folder, key_file)
    assert verified["checked"] == verified["sound"] == space["blocks"] >= least_blocks
    [listed] = kvire_store("ls", folder, key_file)["namespaces"]
    assert listed["chains"] and all(chain["whole"] and chain["tokens"] for chain in listed["chains"])
