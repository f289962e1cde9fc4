"""`kvire store ls`, `stat`, `verify` and `scrub`, on folders that real tiers filled."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cli import stores
from cli.stores import BLOCKS, fill, frame_of, held, open_tier, prompt, put

from kvire.core.record import BlockId
from kvire.store.keyring import Keyring


def damage(folder: Path, keyring: Keyring, record) -> None:
    """Flip one bit of the block's KV where it lies."""
    with open_tier(folder) as tier:
        frame = memoryview(bytearray(1 << 16))
        frame = frame[: tier.read(record.id, [frame])]
    for segment in folder.glob("*.seg"):
        content = segment.read_bytes()
        if (start := content.find(bytes(frame))) >= 0:
            with segment.open("r+b") as file:
                file.seek(start + len(frame) - 100)
                file.write(bytes([frame[-100] ^ 1]))
            return
    pytest.fail("no segment holds the block")


def test_ls_shows_chains_by_namespace(kvire_store, folder: Path, keyring: Keyring) -> None:
    prompts = fill(folder, keyring)
    code, listed, _ = kvire_store("ls", folder, "--json")
    assert code == 0
    spaces = {space["namespace"]: space for space in listed["namespaces"]}
    assert set(spaces) == {records[0].root.hex() for records in prompts.values()}
    both = spaces[prompts["long"][0].root.hex()]
    assert {chain["key"]: chain["tokens"] for chain in both["chains"]} == {
        prompts["long"][-1].id.key.hex(): 80,
        prompts["short"][-1].id.key.hex(): 64,
    }
    assert all(chain["whole"] for chain in both["chains"])
    assert (both["tenant"], both["fields"]["kv_dtype"], both["blocks"]) == ("", "float16", 6)
    assert spaces[prompts["other"][0].root.hex()]["tenant"] == "other"

    [only] = kvire_store("ls", folder, "--json", "--tenant", "other")[1]["namespaces"]
    assert only["namespace"] == prompts["other"][0].root.hex()
    first = kvire_store("ls", folder, "--json", "--limit", 1)[1]["namespaces"]
    assert {len(space["chains"]) for space in first} == {1}
    assert sum(space["chains_left_out"] for space in first) == 1
    text = kvire_store("ls", folder)[1]
    assert prompts["long"][-1].id.key.hex()[:12] in text
    assert "int8" in text


def test_stat_says_who_may_read_what(kvire_store, folder: Path, keyring: Keyring) -> None:
    prompts = fill(folder, keyring)
    _, values, _ = kvire_store("stat", folder, "--json")
    assert values["blocks"] == BLOCKS
    assert values["limit_bytes"] == stores.CAPACITY_BYTES
    assert 0 < values["bytes"] < values["used_bytes"] <= values["limit_bytes"]
    assert values["health"] == "ok"
    assert {tenant["tenant"]: tenant["blocks"] for tenant in values["tenants"]} == {"": 9, "other": 3}
    fields = {space["namespace"]: space["fields"] for space in values["namespaces"]}
    assert fields[prompts["half"][0].root.hex()]["kv_dtype"] == "int8"
    assert not any("salt" in (noted or {}) for noted in fields.values())
    text = kvire_store("stat", folder)[1]
    assert "tenant other: 3 blocks" in text
    assert "kv_dtype" in text

    keyring.forget("other")
    assert "key not at hand" in kvire_store("stat", folder)[1]


def test_verify_finds_damage_and_scrub_removes_only_that(kvire_store, folder: Path, keyring: Keyring) -> None:
    prompts = fill(folder, keyring)
    assert kvire_store("verify", folder)[0] == 0
    bad = prompts["short"][-1]
    damage(folder, keyring, bad)
    code, values, _ = kvire_store("verify", folder, "--json")
    assert code == 1
    assert (values["checked"], values["sound"], values["damaged"]) == (BLOCKS, BLOCKS - 1, 1)
    assert values["findings"] == [
        {"key": bad.id.key.hex(), "group": 0, "verdict": "damaged", "cause": "seal"},
    ]
    assert held(folder, [bad]) == [True], "verify removes nothing"
    code, out, _ = kvire_store("verify", folder)
    assert code == 1 and bad.id.key.hex() in out

    code, values, _ = kvire_store("scrub", folder, "--json")
    assert (code, values["removed"]) == (0, 1)
    everything = [record for records in prompts.values() for record in records]
    assert [r for r, here in zip(everything, held(folder, everything), strict=True) if not here] == [bad]
    assert kvire_store("verify", folder)[0] == 0


def test_verify_tells_misplaced_and_newer_frames_from_damage(kvire_store, folder: Path, keyring: Keyring) -> None:
    here, other, newer = (prompt(keyring, [seed] * 16)[0] for seed in range(3))
    later = bytearray(frame_of(keyring, newer))
    later[8] = 2  # the version
    tag = keyring.tenant("").tag
    with open_tier(folder) as tier:
        put(tier, keyring, [here])
        tier.write(other, frame_of(keyring, here), tag)
        tier.write(newer, memoryview(later), tag)
    code, values, _ = kvire_store("verify", folder, "--json")
    assert code == 1
    assert {f["key"]: (f["verdict"], f["cause"]) for f in values["findings"]} == {
        other.id.key.hex(): ("damaged", "misplaced"),
        newer.id.key.hex(): ("foreign", "version"),
    }
    assert kvire_store("scrub", folder, "--json")[1]["removed"] == 1
    assert held(folder, [here, other, newer]) == [True, False, True], "what a newer version wrote is left alone"


def test_verify_without_keys_checks_headers(kvire_store, folder: Path, keyring: Keyring) -> None:
    fill(folder, keyring)
    keyring.forget("other")
    code, values, _ = kvire_store("verify", folder, "--json")
    assert (code, values["sound"], values["unopened"]) == (0, BLOCKS - 3, 3)
    assert kvire_store("verify", folder, "--json", "--sample", 2)[1]["checked"] == 2
    assert "keys that are not at hand" in kvire_store("verify", folder)[1]


def test_verify_checks_checksums_of_an_unsealed_store(kvire_store, folder: Path, keyring: Keyring) -> None:
    prompts = fill(folder, Keyring(keyring.path, encrypt=False))
    assert kvire_store("verify", folder, "--json")[1]["sound"] == BLOCKS
    damage(folder, keyring, prompts["half"][0])
    code, values, _ = kvire_store("verify", folder, "--json")
    assert (code, values["findings"][0]["cause"]) == (1, "checksum")


def test_help_teaches_and_no_command_needs_torch(kvire_store, folder: Path, keyring: Keyring) -> None:
    shown = kvire_store("--help")[1]
    for command in ("ls", "stat", "verify", "scrub", "gc", "pin", "unpin", "warm", "forget", "clear"):
        assert command in shown
        assert len(kvire_store(command, "--help")[1]) > 300, command
    prompts = fill(folder, keyring)
    key = prompts["long"][-1].id.key.hex()
    commands = [
        ["ls", folder], ["stat", folder], ["verify", folder], ["scrub", folder], ["gc", folder],
        ["pin", key, "--store", folder], ["unpin", key, "--store", folder], ["forget", folder, "--yes"],
        ["clear", folder, "--yes"],
    ]  # fmt: skip
    code = f"""
import sys
from kvire.cli.main import cli
for args in {[["store", *map(str, command)] for command in commands]!r}:
    cli(args, standalone_mode=False)
assert not {{"torch", "transformers"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_record_of_another_group_is_listed_beside_its_key(kvire_store, folder: Path, keyring: Keyring) -> None:
    """Two groups under one key are one place in a chain."""
    records = prompt(keyring, [6] * 32)
    second = [replace(record, id=BlockId(record.id.key, 1)) for record in records]
    with open_tier(folder) as tier:
        put(tier, keyring, records + second)
    [space] = kvire_store("ls", folder, "--json")[1]["namespaces"]
    assert space["blocks"] == 4
    assert [chain["length"] for chain in space["chains"]] == [2]
    assert kvire_store("pin", records[-1].id.key.hex(), "--store", folder, "--json")[1]["blocks"] == 4
