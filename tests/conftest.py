"""Shared by all tests."""
# ruff: noqa: I001

import kvire  # noqa: F401  (before torch: it sets how OpenMP threads wait)

from collections.abc import Iterator
from itertools import count

import pytest
import torch

from harness.sanitizer import load_library_under_test

load_library_under_test()


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """One thread for tiny models, where waking a second one costs more than it computes; all for real ones."""
    before = torch.get_num_threads()
    if request.node.get_closest_marker("model") is None:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def own_store(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores and keys that a test does not name are its own, and never the user's."""
    folder = tmp_path_factory.getbasetemp() / "own" / str(next(_tests))
    monkeypatch.setenv("KVIRE_STORE", str(folder / "store"))
    monkeypatch.setenv("KVIRE_KEY_FILE", str(folder / "keys" / "keyring.json"))


_tests = count()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole folders that take long: `make check` leaves them to `make test`."""
    for item in items:
        if {"server", "cases", "proof", "store"} & set(item.path.parts[-2:]):
            item.add_marker(pytest.mark.slow)
        if getattr(item, "originalname", "") == "test_notices_a_broken_build":
            item.add_marker(pytest.mark.mutant)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many of the broken builds that were tried were noticed."""
    stats = terminalreporter.stats
    killed, survived = (
        [report for report in stats.get(outcome, []) if "mutant" in report.keywords] for outcome in ("passed", "failed")
    )
    if killed or survived:
        terminalreporter.write_line(f"mutants killed: {len(killed)} of {len(killed) + len(survived)}")
