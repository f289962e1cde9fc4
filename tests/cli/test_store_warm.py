"""`kvire store warm`, and pinning the blocks of a prompt, with a tiny model."""

from pathlib import Path

import pytest
from models.tiny import make_tiny

from kvire.llm import LLM
from kvire.store.keyring import Keyring

PROMPT = "a text that is longer than a block or two, so that there is something to keep"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny("llama", tmp_path_factory.mktemp("tiny") / "tiny-llama"))


@pytest.mark.usefixtures("loading_pays")
def test_what_was_warmed_is_found_and_can_be_pinned(
    kvire_store, tiny: str, folder: Path, tmp_path: Path, keyring: Keyring
) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT)
    file = tmp_path / "prompt.txt"
    warm = ["warm", tiny, "--raw", "--file", file, "--store", folder, "--disk-size", "32MiB", "--json"]
    code, [first], err = kvire_store(*warm)
    assert code == 0, err
    assert first["cache"]["computed_tokens"] == len(PROMPT)
    assert f"{len(PROMPT)} tokens new" in err
    [again] = kvire_store(*warm)[1]
    assert again["cache"]["disk_tokens"] >= len(PROMPT) // 16 * 16 - 16

    with LLM(tiny, store=folder) as llm:
        result = llm.generate(PROMPT + " and more", max_tokens=1)
    assert result.cache.disk_tokens == len(PROMPT) // 16 * 16

    blocks = len(PROMPT) // 16
    args = ("--prompt", file, "--model", tiny, "--raw", "--store", folder, "--json")
    _, pinned, _ = kvire_store("pin", *args)
    assert (pinned["blocks"], pinned["prompt_blocks_missing"]) == (blocks, 0)
    assert kvire_store("stat", folder, "--json")[1]["pinned"] == blocks
    assert kvire_store("unpin", *args)[1]["blocks"] == blocks
    assert kvire_store("stat", folder, "--json")[1]["pinned"] == 0
    file.write_text("something else that nobody ever computed, at some length")
    code, _, err = kvire_store("pin", *args[:-1])
    assert code == 2 and "no block of this prompt is stored here" in err


def test_the_prompt_of_a_tenant_is_its_own(
    kvire_store, tiny: str, folder: Path, tmp_path: Path, keyring: Keyring
) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT)
    keyring.tenant("")
    code, _, err = kvire_store(
        "warm", tiny, "--raw", "--prompt", PROMPT, "--tenant", "zoe", "--store", folder, "--disk-size", "32MiB"
    )
    assert code == 0, err
    args = ("--prompt", tmp_path / "prompt.txt", "--model", tiny, "--raw", "--store", folder, "--json")
    assert kvire_store("pin", *args)[1]["blocks"] == len(PROMPT) // 16
    [tenant] = kvire_store("stat", folder, "--json")[1]["tenants"]
    assert tenant["tenant"] == "zoe"


def test_another_model_has_no_blocks_here(
    kvire_store, tiny: str, folder: Path, tmp_path: Path, keyring: Keyring
) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT)
    kvire_store("warm", tiny, "--raw", "--prompt", PROMPT, "--store", folder, "--disk-size", "32MiB")
    other = make_tiny("llama", tmp_path / "other", seed=1)
    args = ("--prompt", tmp_path / "prompt.txt", "--model", other, "--raw", "--store", folder)
    code, _, err = kvire_store("pin", *args)
    assert code == 2 and "has noted no namespace of" in err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--prompt", "x", "--no-store"], "warm needs a store"),
        (["--file", "missing.txt", "--store", "STORE"], "cannot read missing.txt"),
        (["--prompt", PROMPT, "--raw", "--store", "FILE"], "is not a folder"),
    ],
    ids=lambda part: part[-1] if isinstance(part, list) else "",
)
def test_warm_says_why_not(kvire_store, tiny: str, tmp_path: Path, keyring: Keyring, args, says: str) -> None:
    (tmp_path / "FILE").write_text("")
    names = {"STORE": tmp_path / "store", "FILE": tmp_path / "FILE"}
    code, out, err = kvire_store("warm", tiny, *[names.get(arg, arg) for arg in args])
    assert (code, out) == (2, "")
    assert says in err and "Traceback" not in err
