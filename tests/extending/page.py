"""The examples of docs/extending.md, which are the toys of these tests."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
USE = "\n# Use it\n"


def shown(name: str) -> str:
    """The file that the page shows for a class, without the lines that try it out."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    [block] = [block for block in blocks if f"class {name}" in block]
    file, _, _ = block.partition(USE)
    return file
