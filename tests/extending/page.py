"""The examples of docs/extending.md, which are the toys of these tests."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
USE = "\n# Use it\n"


def shown(defined: str) -> str:
    """The file that the page shows with this definition, without the lines that try it out."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    [block] = [block for block in blocks if defined in block]
    file, use, _ = block.partition(USE)
    assert use, "the page tries out what it shows"
    return file
