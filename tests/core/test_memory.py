"""Sizes as people write them; free memory as the kernel and cgroups tell it."""

from pathlib import Path

import pytest

from kvire.core.errors import ConfigError
from kvire.core.memory import available_bytes, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2**31),
        ("500MB", 5 * 10**8),
        ("1.5g", 15 * 10**8),
        ("64 KiB", 65536),
        ("7", 7),
        (12, 12),
        ("1T", 10**12),
    ],
)
def test_parse_size(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2 parsecs", "1e3", "0", 0, -5, "nan", True])
def test_parse_size_refuses(text: str | int) -> None:
    with pytest.raises(ConfigError, match=r"size"):
        parse_size(text)


def test_format_size() -> None:
    assert format_size(1536) == "1.5 KiB"
    assert format_size(10) == "10 B"
    assert format_size(1000 * 2**30) == "1000 GiB" and format_size(999.7 * 2**20) == "1000 MiB"
    assert format_size(3 * 2**30) == "3 GiB"


def make_tree(tmp_path: Path, meminfo_kib: int, files: dict[str, str], own: str = "/") -> tuple[Path, Path]:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    cgroup.mkdir()
    (proc / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {meminfo_kib} kB\n")
    (proc / "self" / "cgroup").write_text(f"0::{own}\n")
    for name, text in files.items():
        path = cgroup / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return proc, cgroup


def test_free_memory_without_cgroups(tmp_path: Path) -> None:
    proc, cgroup = make_tree(tmp_path, 1000, {})
    assert available_bytes(proc, cgroup) == 1000 * 1024


def test_the_tightest_cgroup_on_the_way_to_the_root_counts(tmp_path: Path) -> None:
    files = {
        "a/memory.max": "300000",
        "a/memory.current": "100000",
        "a/memory.stat": "anon 5\ninactive_file 7000\n",
        "a/b/memory.max": "max",
        "a/b/memory.current": "50000",
    }
    proc, cgroup = make_tree(tmp_path, 10**6, files, own="/a/b")
    assert available_bytes(proc, cgroup) == 207_000


def test_cgroup_version_1(tmp_path: Path) -> None:
    files = {
        "memory/memory.limit_in_bytes": "500000",
        "memory/memory.usage_in_bytes": "400000",
        "memory/memory.stat": "total_inactive_file 1000\n",
    }
    proc, cgroup = make_tree(tmp_path, 10**6, files)
    assert available_bytes(proc, cgroup) == 101_000


def test_a_cgroup_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    proc, cgroup = make_tree(tmp_path, 10**6, {"memory.max": "100", "memory.current": "200"})
    assert available_bytes(proc, cgroup) == 0
