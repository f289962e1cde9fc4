"""What a figure depends on besides the program: the machine it was taken on, and the versions."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = ("kvire", "torch", "transformers")


def machine_facts() -> dict[str, Any]:
    """Of this machine, which a server behind a URL may not share."""
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES if _installed(name)},
    }


def commit() -> str | None:
    """Of the working tree that this package runs from, "+" behind it if that was changed; None if
    it is installed.
    """
    folder = Path(__file__).parent
    found = _git(folder, "rev-parse", "--short=12", "HEAD")
    tracked = _git(folder, "ls-files", "--error-unmatch", str(folder / "__init__.py"))
    if not found or not tracked:
        return None
    return found + ("+" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def cpu_name() -> str:
    """As the kernel knows it; what Python says elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _git(folder: Path, *args: str) -> str:
    try:
        done = subprocess.run(  # noqa: S603
            ["git", "-C", str(folder), *args],  # noqa: S607
            capture_output=True, text=True, check=False, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
