"""Which backend one gets."""

import logging
from collections.abc import Iterator

import pytest

from kvire.attention import cpu
from kvire.attention.cpu import best_attention, native_available
from kvire.core.errors import ConfigError


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cpu, "native_module", lambda: None)
    cpu._warn_portable.cache_clear()
    yield
    cpu._warn_portable.cache_clear()


@pytest.mark.skipif(not native_available(), reason="installed without the C++ kernels")
def test_native_where_it_was_built() -> None:
    assert best_attention().name.startswith("native-")
    assert best_attention("native").name == best_attention().name


def test_portable_on_request() -> None:
    assert best_attention("portable").name == "portable"


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="'fast' is not known"):
        best_attention("fast")


@pytest.mark.usefixtures("without_kernels")
def test_without_kernels_auto_is_portable_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert best_attention().name == "portable"
        assert best_attention().name == "portable"
    assert len(caplog.records) == 1
    assert "compiler" in caplog.records[0].message


@pytest.mark.usefixtures("without_kernels")
def test_without_kernels_native_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match="compiler"):
        best_attention("native")
