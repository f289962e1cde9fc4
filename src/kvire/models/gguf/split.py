"""A GGUF that was split into several files: finds all parts from any one of them.

llama.cpp names them NAME-00001-of-00003.gguf, and each says in its header which part it is
(`split.no`, from 0) of how many. All metadata are in the first one.
"""

import re
from pathlib import Path

from kvire.core.errors import ModelNotFoundError

_PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def gguf_parts(path: Path) -> tuple[Path, ...]:
    """All files of the GGUF that `path` is, or is a part of, in order.

    Raises ModelNotFoundError naming one missing.
    """
    if not path.is_file():
        raise ModelNotFoundError(f"there is no file {path}")
    found = _PART.fullmatch(path.name)
    if found is None or int(found["count"]) < 2:
        return (path,)
    count = int(found["count"])
    parts = tuple(path.with_name(f"{found['name']}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1))
    for i, part in enumerate(parts, start=1):
        if not part.is_file():
            raise ModelNotFoundError(
                f"{path.name} is a part of a split GGUF, and part {i} of {count} is not beside it: {part} is missing. "
                "Download all parts into one folder."
            )
    return parts


def gguf_name(path: Path) -> str:
    """The model's name in a file's name: without ending and part."""
    found = _PART.fullmatch(path.name)
    return path.stem if found is None else found["name"]


def gguf_in(folder: Path) -> Path | None:
    """The GGUF of a folder that holds one model as a GGUF and nothing else to load.

    None for any other folder.
    """
    files = sorted(folder.glob("*.gguf"))
    if (folder / "config.json").exists() or not files or set(gguf_parts(files[0])) != set(files):
        return None
    return files[0]
