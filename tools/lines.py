"""Lines of code and prose, by package: `python tools/lines.py`; CI prints them.

Only what git knows or would take counts, empty lines and comments included.
"""

import subprocess
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
KINDS = {".py": "Python", ".cpp": "C++", ".h": "C++", ".hpp": "C++", ".md": "prose"}
COLUMNS = ("Python", "C++", "prose")


def main() -> None:
    lines = count(files())
    packages = sorted({package for package, _ in lines})
    print(f"{'':24}" + "".join(f"{kind:>9}" for kind in COLUMNS))
    for package in [*packages, "together"]:
        counts = [sum(n for (p, k), n in lines.items() if k == kind and package in {p, "together"}) for kind in COLUMNS]
        print(f"{package:24}" + "".join(f"{n or '-':>9}" for n in counts))


def files() -> list[Path]:
    """Relative to the root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [Path(line) for line in told.splitlines() if (ROOT / line).is_file()]


def count(paths: Iterable[Path]) -> Counter[tuple[str, str]]:
    """(package, kind) -> lines."""
    lines: Counter[tuple[str, str]] = Counter()
    for path in paths:
        if (kind := KINDS.get(path.suffix)) is not None:
            lines[package_of(path), kind] += len((ROOT / path).read_text("utf-8").splitlines())
    return lines


def package_of(path: Path) -> str:
    """src/kvire by its folders, everything else by its first one."""
    parts = path.parts
    if parts[:2] == ("src", "kvire"):
        return "/".join(parts[1:3]) if len(parts) > 3 else "kvire"
    return parts[0] if len(parts) > 1 else "."


if __name__ == "__main__":
    main()
