"""A store's options, as every engine's configuration gives them."""

from pathlib import Path
from typing import Any

import pytest

from kvire.connectors.options import store_config
from kvire.core.config import StoreConfig
from kvire.core.errors import ConfigError


def config_from(given: dict[str, Any]) -> StoreConfig:
    return store_config(given, "kv_connector_extra_config")


def test_options_have_the_names_that_serve_gives_them(tmp_path: Path) -> None:
    config = config_from(
        {
            "store": str(tmp_path / "s"),
            "disk_size": "1GiB",
            "ram": "2GB",
            "remote": "redis://h",
            "encrypt": False,
            "key_file": "/k",
            "store_ttl": 60,
            "load_timeout": 2,
        }
    )
    assert config == StoreConfig(
        path=tmp_path / "s",
        disk_bytes=1 << 30,
        ram_bytes=2 * 10**9,
        remote=("redis://h",),
        encrypt=False,
        key_file=Path("/k"),
        ttl_s=60,
        load_timeout_s=2,
    )


def test_without_a_place_it_is_the_one_of_serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVIRE_STORE", str(tmp_path / "mine"))
    assert config_from({}).path == tmp_path / "mine"
    assert config_from({}).encrypt
    assert config_from({"remote": ["redis://h"]}).path is None
    assert config_from({}).disk_bytes is None, "a store that is there keeps its limit"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"store_size": "x"}, "no option 'store_size'"),
        ({"store": 3}, "store .* is a str, got 3"),
        ({"disk_size": True}, "disk_size .* got True"),
        ({"store": "x", "disk_size": "lots"}, "disk_size is no size"),
        ({"encrypt": "no"}, "encrypt .* is a bool"),
        ({"remote": ["redis://h", 5]}, "remote .* list of URLs"),
        ({"ram": "1GB", "disk_size": "1GB"}, "disk_size .* add store"),
        ({"store_ttl": 0}, "store_ttl .* seconds above 0, got 0"),
        ({"store_ttl": -1.5}, "store_ttl .* got -1.5"),
        ({"load_timeout": 0}, "load_timeout .* seconds above 0, got 0"),
        ({"load_timeout": float("nan")}, "load_timeout .* got nan"),
        ({"load_timeout": float("inf")}, "load_timeout .* got inf"),
        ({"load_timeout": "1"}, "load_timeout .* is a int or float, got '1'"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config_from(given)
