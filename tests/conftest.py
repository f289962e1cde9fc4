"""Shared by all tests. Imports nothing that takes long: see pytest_configure."""
# ruff: noqa: PLC0415

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from harness import full_disk
from harness.waiting import PATIENCE_S

import kvire  # noqa: F401  (before torch: it sets how OpenMP threads wait)

SLOW = tuple(
    line for line in Path(__file__).with_name("slow.txt").read_text("utf-8").splitlines() if line and line[0] != "#"
)
ROOT = Path(__file__).parents[1]
FAST_EXAMPLES = 25  # of a property, where slow tests are left out


def pytest_configure(config: pytest.Config) -> None:
    """Import what all tests need, but not in the process that only hands them out: the others would wait for it."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return
    import hypothesis
    from harness.sanitizer import load_library_under_test

    load_library_under_test()
    examples = FAST_EXAMPLES if leaves_slow_out(config) else hypothesis.settings.default.max_examples
    # deadline: any example may be held up.
    hypothesis.settings.register_profile("kvire", deadline=None, max_examples=examples)
    hypothesis.settings.load_profile("kvire")


def leaves_slow_out(config: pytest.Config) -> bool:
    """As `make check` does."""
    return "not slow" in config.option.markexpr


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """One thread for tiny models, where waking a second one costs more than it computes; all for real ones."""
    import torch

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


@pytest.fixture(autouse=True)
def patient_stores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a store has still to write when it closes is written, however busy the machine."""
    if "store" not in request.path.parts[-2:]:  # there, the limit is what some tests are about
        monkeypatch.setattr("kvire.store.tiered.FLUSH_S", PATIENCE_S)


@pytest.fixture(autouse=True)
def patient_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a tier has is known however busy the machine; tests of late answers say what is late."""
    monkeypatch.setattr("kvire.store.threads.ANSWER_S", PATIENCE_S)


@pytest.fixture
def small_file_system(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MB; the test is skipped where mounting is not allowed."""
    with full_disk.small_file_system(tmp_path / "small") as folder:
        yield folder


@pytest.fixture
def loading_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines are told, and stay told, that computing is so slow that every load is waited for."""
    monkeypatch.setattr("kvire.engine.engine.PREFILL_TOKEN_S", 10.0)
    monkeypatch.setattr("kvire.plan.cost.PrefillSpeed.measured", lambda speed, *_: setattr(speed, "samples", 1))


@pytest.fixture
def short_of_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """For claims that are to fail, which leave stores in the middle of something: nobody waits long for either."""
    monkeypatch.setattr("harness.waiting.PATIENCE_S", 2.0)
    monkeypatch.setattr("kvire.store.tiered.FLUSH_S", 0.2)
    monkeypatch.setattr("kvire.store.tiered.JOIN_S", 0.2)


_tests = count()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Folders of slow tests are not even read where slow tests are left out."""
    left_out = leaves_slow_out(config) and collection_path.is_relative_to(ROOT)
    return True if left_out and f"{collection_path.relative_to(ROOT).as_posix()}/" in SLOW else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long, by tests/slow.txt: `make check` leaves it to `make test`."""
    for item in items:
        if item.nodeid.startswith(SLOW):
            item.add_marker(pytest.mark.slow)
        if getattr(item, "originalname", "") == "test_notices_a_broken_build":
            item.add_marker(pytest.mark.mutant)
            item.add_marker(pytest.mark.slow)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many of the broken builds that were tried were noticed."""
    stats = terminalreporter.stats
    killed, survived = (
        [report for report in stats.get(outcome, []) if "mutant" in report.keywords] for outcome in ("passed", "failed")
    )
    if killed or survived:
        terminalreporter.write_line(f"mutants killed: {len(killed)} of {len(killed) + len(survived)}")
