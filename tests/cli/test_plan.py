"""`kvire plan` as people and programs run it; calibration on the small real model."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness.commands import command
from models.tiny import make_tiny

from kvire.cli.plan.calibrate import calibration_record
from kvire.core.cache_folder import write_json
from kvire.plan.calibration import (
    Asked,
    CalibrationSamples,
    CalibrationTimes,
    calibration_file,
    measured_machine,
    measured_tiers,
    record,
)
from kvire.plan.cards import card
from kvire.plan.hardware import Machine
from kvire.plan.read_shape import read_shape
from kvire.plan.shape import Storage

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Runs `kvire plan ...` with a cache folder of its own; gives exit status, standard output and standard error."""
    monkeypatch.setenv("KVIRE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("COLUMNS", "200")

    return command(monkeypatch, capsys, "plan")


def saved(path: Path, value: object) -> Path:
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def test_the_numbers_that_people_ask_for(plan: Run) -> None:
    code, out, _ = plan("llama-2-7b", "--context", 4000, "--users", 200, "--memory", "80GB")
    assert code == 0
    assert "524,288 bytes per token" in out and "1.95 GiB at 4,000 tokens" in out
    assert "391 GiB" in out  # 200 users
    assert "--hardware" in out and "verify before relying" in out


def test_json_for_programs(plan: Run) -> None:
    options = ("--hardware", "h100", "--devices", 8, "--context", 32768, "--reuse", 0.6, "--tier", "nvme5=30TB")
    code, out, _ = plan(
        "deepseek-v3", "--json", *options, "--usd-per-hour", 20, "--requests-per-hour", 2000, "--tbw", "60PB"
    )
    assert code == 2  # PB is no unit here: said, not guessed
    code, out, _ = plan("deepseek-v3", "--json", *options, "--usd-per-hour", 20, "--requests-per-hour", 2000)
    assert code == 0
    found = json.loads(out)
    assert found["schema"] == "kvire.plan/1"
    assert found["kv"]["growing_bytes_per_token"] == 8 * 70_272  # a latent is kept by every rank
    assert found["model"]["weights_bytes"] == found["model"]["parameters"]  # the checkpoint is fp8
    assert [row["state"] for row in found["ttft"]] == ["E", "G", "D"]
    assert found["verdict"]["sentence"].startswith("Buy ")
    assert found["money"]["disk_wear"]["bytes_per_day"] > 0
    assert any("estimates" in note for note in found["notes"]) and any("num_nextn" in note for note in found["notes"])


def test_whose_allocation_it_is(plan: Run) -> None:
    options = ("--context", 8192, "--users", 32, "--kv-dtype", "bfloat16", "--block-size", 1)
    out = plan("gpt-oss-20b", *options)[1]
    assert "6.09 GiB for all users; an engine without groups for windows reserves 12 GiB" in out
    assert json.loads(plan("gpt-oss-20b", *options, "--json")[1])["kv"]["without_window_groups"] == {
        "sequence_bytes": 384 << 20, "all_users_bytes": 12 << 30,
    }  # fmt: skip
    assert "reserves" not in plan("llama-3.1-8b", *options)[1]


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors", "bitsandbytes"])
def test_kv_of_quantised_checkpoints(plan: Run, tmp_path: Path, method: str) -> None:
    """No weights are needed for KV, and --weights-dtype is enough for the rest."""
    config = dict(card("llama-3.1-8b").config) | {"quantization_config": {"quant_method": method}}
    path = saved(tmp_path / "config.json", config)
    assert "131,072 bytes per token" in plan(path)[1]
    found = json.loads(plan(path, "--json", "--weights-dtype", "int4", "--memory", "24GB")[1])
    assert found["model"]["weights_bytes"] == round(8_030_261_248 * 0.5625)
    assert found["capacity"]["users"][0]["users"] > 0


def test_all_cards_are_listed(plan: Run) -> None:
    code, out, _ = plan("--cards", "--json")
    assert code == 0 and len(json.loads(out)) >= 25
    assert "deepseek-v3" in plan("--cards")[1]


def test_a_directory_with_weights_is_counted(plan: Run, tmp_path: Path) -> None:
    folder = make_tiny("qwen2", tmp_path / "tiny")
    found = json.loads(plan(folder, "--json", "--kv-dtype", "float32")[1])
    assert found["model"]["parameters_counted"]
    assert found["kv"]["growing_bytes_per_token"] == 3 * 2 * 2 * 16 * 4
    other = make_tiny("cohere", tmp_path / "engine-only")  # a family that only the engine knows
    assert json.loads(plan(other, "--json")[1])["model"]["parameters_counted"]
    assert plan(saved(tmp_path / "config.json", card("gpt-oss-20b").config), "--json")[0] == 0


def test_weights_that_do_not_belong_to_the_config_are_noticed(plan: Run, tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    saved(folder / "config.json", config | {"num_hidden_layers": 30})
    code, _, err = plan(folder)
    assert code == 2 and "do not belong together" in err
    saved(folder / "config.json", config | {"kv_compression_ratio": 4})
    code, _, err = plan(folder)  # the engine, which knows this family, does not get around the refusal
    assert code == 2 and "kv_compression_ratio" in err


def test_a_model_of_the_hub(plan: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    code, _, err = plan("org/model")
    assert code == 2 and err.startswith("asking the hub for the config of org/model")
    assert "cannot be reached" in err and "--cards" in err
    (snapshot := cache / "models--org--model" / "snapshots" / ("0" * 40)).mkdir(parents=True)
    saved(snapshot / "config.json", dict(card("llama-2-7b").config))
    (refs := cache / "models--org--model" / "refs").mkdir()
    (refs / "main").write_text("0" * 40)
    code, out, err = plan("org/model")
    assert code == 0 and "524,288 bytes per token" in out and not err


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ((), "kvire plan MODEL"),
        (("lama-2-7b",), "llama-2-7b"),
        (("deepseek-v4",), "deepseek-v3"),
        (("org/model",), "org/model"),
        (("llama-2-7b", "--hardware", "abacus"), "abacus"),
        (("llama-2-7b", "--hardware", "measured"), "--calibrate"),
        (("llama-2-7b", "--hardware", "h100", "--calibrate"), "leave --hardware out"),
        (("llama-2-7b", "--kv-dtype", "int3"), "int3"),
        (("llama-2-7b", "--weights-dtype", "int3"), "int3"),
        (("llama-2-7b", "--tp", "3"), "--tp"),
        (("llama-2-7b", "--tier", "mine"), "--tier mine"),
        (("llama-2-7b", "--memory", "much"), "--memory"),
        (("llama-2-7b", "--reserve", "1.5", "--memory", "1GB"), "--reserve"),
        (("llama-2-7b", "--reuse", "1.5"), "--reuse"),
        (("llama-2-7b", "--hit-curve", "/nowhere", "--reuse", "0.5"), "either"),
        (("llama-2-7b", "--hit-curve", "/nowhere"), "/nowhere"),
        (("llama-2-7b", "--context", "10"), "--new-tokens"),
        (("llama-2-7b", "--check", "/nowhere"), "machine"),
        (("llama-2-7b", "--price", "gpt-0"), "gpt-0"),
        (("llama-2-7b", "--policy", "lru"), "--hit-curve"),
        (("llama-2-7b", "--mfu", "0.3"), "--hardware"),
        (("llama-2-7b", "--hardware", "measured", "--devices", "8"), "--devices"),
        (("llama-2-7b", "--usd-per-hour", "-3"), "--usd-per-hour"),
        (("llama-2-7b", "--requests-per-hour", "nan"), "--requests-per-hour"),
        (("llama-2-7b", "--check", "a.json", "--picture", "a.svg"), "no picture"),
        (("llama-2-7b", "--picture", "plan.doc"), ".svg"),
    ],
)
def test_what_is_wrong_is_named(plan: Run, args: tuple[str, ...], named: str) -> None:
    code, out, err = plan(*args)
    assert code == 2 and not out
    assert named in err


def test_unknown_architectures_fail_closed(plan: Run, tmp_path: Path) -> None:
    code, _, err = plan(saved(tmp_path / "config.json", {"model_type": "deepseek_v4", "num_hidden_layers": 61}))
    assert code == 2 and "deepseek_v4" in err
    code, _, err = plan(saved(tmp_path / "list.json", [1]))
    assert code == 2 and "no JSON object" in err


def test_a_hit_curve_decides_what_to_buy(plan: Run, tmp_path: Path) -> None:
    points = [{"capacity_tokens": 10**n, "hit_rate": rate} for n, rate in ((6, 0.05), (7, 0.2), (8, 0.36))]
    curve = {"schema": "kvire.replay/1", "ideal_hit_rate": 0.374, "curves": [{"policy": "lru", "points": points}]}
    options = ("--hit-curve", saved(tmp_path / "curve.json", curve), "--hardware", "h100", "--context", 12_000)
    assert "Buy 9.09 TiB of NVMe Gen5 x4" in plan("llama-3.1-8b", *options, "--tier", "nvme5=10TB")[1]
    assert "Buy nothing" in plan("llama-3.1-8b", *options, "--tier", "s3=10TB")[1]


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_a_picture(plan: Run, tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"plan.{ending}"
    assert plan("gpt-oss-20b", "--picture", path, "--memory", "24GB", "--json")[0] == 0
    assert path.read_bytes().startswith(b"<svg" if ending == "svg" else b"\x89PNG")
    if ending == "svg":
        assert b">weights</text>" in path.read_bytes() and b">memory</text>" in path.read_bytes()


def test_help_needs_neither_torch_nor_matplotlib() -> None:
    code = (
        "import sys, kvire.cli.main, kvire.plan.report, kvire.plan.calibration\n"
        "assert not {'torch', 'transformers', 'matplotlib'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


SMOLLM2 = read_shape(card("smollm2").config)
MADE = Machine("made", "made", 1.6e11, 0.8e11, 0.03)
TIERS = {"R": (0.002, 5e9), "D": (0.02, 1e9)}  # latency, bytes per second


def made_record() -> dict[str, Any]:
    """The record of a machine whose constants are known."""
    samples = CalibrationSamples()
    for tokens in (256, 1024, 3072):
        times = {
            Asked(state, tokens, new): MADE.prefill_s(SMOLLM2, tokens - new, tokens)
            for state, new in (("E", tokens), ("G", 1), ("G", 32))
        }
        size = SMOLLM2.sequence_bytes(tokens - 16, Storage("float16", 16))
        rest_s = MADE.prefill_s(SMOLLM2, tokens - 16, tokens)  # one token must be computed, and blocks come whole
        for state, (latency_s, rate) in TIERS.items():
            times[Asked(state, tokens, 1)] = rest_s + latency_s + size / rate
        for asked, seconds in times.items():
            samples.ttft_s[asked] += [seconds, 9 * seconds, seconds]  # one outlier
    samples.decode_s.append(0.05)
    return record(CalibrationTimes("smollm2", "float16", "a processor", 2, 8 << 30), SMOLLM2, samples)


def test_a_record_gives_back_the_machine_that_made_it() -> None:
    found = made_record()
    who = measured_machine(found)
    for tokens in (512, 2048, 4096):
        assert who.prefill_s(SMOLLM2, 0, tokens) == pytest.approx(MADE.prefill_s(SMOLLM2, 0, tokens), rel=1e-6)
    tiers = {tier.state: tier for tier in measured_tiers(found)}
    for state, (latency_s, rate) in TIERS.items():
        assert (tiers[state].latency_s, tiers[state].bytes_per_s) == pytest.approx((latency_s, rate), rel=1e-6)


def test_a_tier_that_noise_hides_gets_a_rate_that_can_be() -> None:
    """Answers from the tier that came sooner than from the pool, as on a busy machine."""
    samples = CalibrationSamples()
    for tokens in (256, 1024):
        for state, seconds in (("E", tokens * 1e-3), ("G", 0.05), ("R", 0.01), ("D", 0.01)):
            samples.ttft_s[Asked(state, tokens, tokens if state == "E" else 1)].append(seconds)
    samples.decode_s.append(0.05)
    found = record(CalibrationTimes("smollm2", "float16", "a processor", 2, 8 << 30), SMOLLM2, samples)
    assert all(0 <= tier.latency_s < 1e-3 and tier.bytes_per_s <= 1.01e11 for tier in measured_tiers(found))


def test_a_measured_machine_is_remembered_and_checked_against_a_report(plan: Run, tmp_path: Path) -> None:
    write_json(calibration_file(), made_record())
    found = json.loads(plan("smollm2", "--hardware", "measured", "--context", 2048, "--json")[1])
    assert found["model"]["weights_dtype"] == "float32"  # as the engine computes
    assert [row["tier"] for row in found["ttft"]] == ["none", "device", "memory", "disk"]
    times = {row["state"]: row["seconds"] for row in found["ttft"]}
    assert times["G"] < times["R"] < times["D"] < times["E"]
    sample = {
        "repeat": 0, "sent_s": 0.0, "e2e_s": 9.0, "tpot_s": None, "gaps_s": [], "prompt_tokens": 2048,
        "cached_tokens": 1984, "by_tier": None, "ideal_tokens": 0, "output_tokens": 1, "pieces": 1, "server": {},
        "error": None,
    }  # fmt: skip
    rows = [
        {
            "arm": "A", "workload": "docqa", "state": state, "asked": state, "context_tokens": 2048, "concurrency": 1,
            "proof": {}, "rate_per_s": None, "passes": [], "samples": [sample | {"ttft_s": seconds}], "summary": {},
        }
        for state, seconds in (("E", times["E"]), ("D", 2 * times["D"]), ("N", 1.0))
    ]  # fmt: skip
    model = {"layers": 30, "kv_dtype": "float16"}
    arms = [{"name": "A", "kind": "kvire", "model": model, "ideal_by": "token ids"}]
    whole = {"machine": {}, "model": model, "settings": {}, "arms": arms}
    report = saved(tmp_path / "report.json", {"schema": "kvire.bench/1", "rows": rows, **whole})
    code, out, err = plan("smollm2", "--hardware", "measured", "--check", report, "--json")
    assert code == 0, err
    assert [row["within"] for row in json.loads(out)] == [True, False, None]
    assert "1 of 2 predictions" in plan("smollm2", "--hardware", "measured", "--check", report)[1]
    other = plan("smollm2", "--hardware", "measured", "--kv-dtype", "float32", "--check", report, "--json")[1]
    assert all("kv_dtype float16" in row["why"] for row in json.loads(other))
    code, _, err = plan("smollm2", "--hardware", "measured", "--check", saved(tmp_path / "bad.json", {"rows": None}))
    assert code == 2 and "kvire.bench/1" in err
    larger = json.loads(plan("llama-3.1-8b", "--hardware", "measured", "--json")[1])
    assert larger["machine"]["span"] == [0.6, 1.3] and any("scaled to this model" in note for note in larger["notes"])


@pytest.mark.model
def test_this_machine_can_be_measured() -> None:
    """Short prompts, once: the times are this moment's, but every state must have come from where it says."""
    found = calibration_record("smollm2", "float16", lengths=(96, 256), repeats=1)
    asked = {(row["state"], row["tokens"]) for row in found["samples"]}
    assert asked == {(state, tokens) for state in "EGRD" for tokens in (96, 256)}
    who = measured_machine(found)
    assert 1e9 < who.linear_flops_per_s < 1e14
    assert {tier.name for tier in measured_tiers(found)} == {"memory", "disk"}
