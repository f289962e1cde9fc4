"""Recorded steps: the same operations as transformers', family by family, and what may not serve."""

import logging
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness.families import family_path
from models.tiny import EACH_FAMILY, FAMILIES, make_tiny
from torch import Tensor

from kvire.core.spec import KVGroup, KVSpec, LayerKind
from kvire.models.loader import LoadedModel, load_model
from kvire.step.fuse import fuse
from kvire.step.lower import Lowered, lower
from kvire.step.model import recorded
from kvire.step.oracle import compute
from kvire.step.prove import prove
from kvire.step.record import NotRecordableError, record
from kvire.step.rows import Op

pytest.importorskip("kvire._native")

# The beginning of the reason why a family keeps transformers' forward.
REASONS = {
    "apertus": "aten.gt",
    "gemma4_text": "aten.mul_",
    "gpt2": "it embeds something else",
    "ministral3": "aten.floor",
    **dict.fromkeys(
        ("dots1", "ernie4_5_moe", "glm4_moe", "gpt_oss", "granitemoe", "granitemoeshared", "hunyuan_v1_moe"),
        "it is a mix",
    ),
    **dict.fromkeys(("minimax_m2", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"), "it is a mix"),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), "it is a mix"),
}
NATIVE = [case for case in EACH_FAMILY if case.values[0] not in REASONS]
IDS, ROWS = torch.arange(3, 43), torch.tensor([5, 39])


FOLDER = tempfile.TemporaryDirectory(prefix="kvire-packed-")


@pytest.fixture(autouse=True)
def cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVIRE_CACHE_DIR", FOLDER.name)


def loaded(family: str) -> LoadedModel:
    return load_model(family_path(family), weights="file")


def windows(model: LoadedModel) -> dict[int, int | None]:
    return {layer: group.window for group in model.groups for layer in group.layers}


def logits_of(lowered: Lowered, groups: tuple[KVGroup, ...]) -> Tensor:
    """By the oracle, with attention over the whole text in plain torch."""

    def attend(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        call = lowered.recording.calls[number]
        [group] = [group for group in groups if call.layer in group.layers]
        heads = q.shape[-1] // group.key_width
        q = q.reshape(len(IDS), heads, -1).transpose(0, 1)
        k, v = (
            each.reshape(len(IDS), group.kv_heads, -1).transpose(0, 1).repeat_interleave(heads // group.kv_heads, 0)
            for each in (k, v)
        )
        scores = q @ k.transpose(1, 2) * call.params.scale
        if (cap := call.params.softcap) is not None:
            scores = cap * torch.tanh(scores / cap)
        distance = torch.arange(len(IDS))[:, None] - torch.arange(len(IDS))[None]
        hidden = (distance < 0) | (distance >= (call.params.window or len(IDS)))
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return (weights @ v).transpose(0, 1).reshape(len(IDS), -1)

    with torch.inference_mode():
        return compute(lowered, IDS, torch.arange(len(IDS)), ROWS, attend)


@pytest.mark.parametrize("family", NATIVE)
def test_operations_on_rows_are_the_model(family: str) -> None:
    model = loaded(family)
    with torch.inference_mode():
        expected = load_model(family_path(family)).model(input_ids=IDS[None]).logits[0, ROWS]
    plain = lower(record(model.model, windows(model)))
    torch.testing.assert_close(logits_of(plain, model.groups), expected, rtol=1e-3, atol=1e-4)
    fused = fuse(plain)
    torch.testing.assert_close(logits_of(fused, model.groups), expected, rtol=1e-3, atol=1e-4)
    assert len(fused.ops) <= len(plain.ops)
    prove(fused, model.model, KVSpec(model.groups, "float16"), model.config.vocab_size)


@pytest.mark.parametrize("family", [case for case in EACH_FAMILY if case.values[0] in REASONS])
def test_a_family_that_keeps_transformers_forward_says_why(family: str) -> None:
    model = loaded(family)
    with pytest.raises(NotRecordableError, match=f"^{REASONS[family]}"):
        recorded(model.model, windows(model))


def test_most_dense_families_are_native() -> None:
    assert set(REASONS) <= set(FAMILIES) and len(NATIVE) == 31
    wanted = {
        "llama",
        "smollm3",
        "mistral",
        "qwen2",
        "qwen3",
        "gemma2",
        "gemma3_text",
        "phi3",
        "granite",
        "olmo3",
        "glm4",
    }
    assert not wanted & set(REASONS)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "phi3", "granite"])
def test_norms_positions_and_gates_are_one_operation_each(family: str) -> None:
    model = loaded(family)
    kinds = Counter(op.kind for op in recorded(model.model, windows(model)).ops)
    assert not {"square", "mean", "inverse_root", "negative", "silu", "gelu_tanh"} & set(kinds)
    layers = model.config.num_hidden_layers
    assert kinds["rotary"] == 2 * layers and kinds["silu_times"] + kinds["gelu_tanh_times"] == layers
    assert kinds["cosine"] <= 2, "angles are computed once a step, not once a layer"


def test_behind_the_last_attention_only_wanted_rows_are_computed() -> None:
    lowered = recorded(loaded("llama").model, {0: None, 1: None, 2: None})
    last = max(i for i, op in enumerate(lowered.ops) if op.kind == "attend")
    assert all(op.is_wanted for op in lowered.ops[last + 1 :])
    assert sum(op.kind == "linear" and op.is_wanted for op in lowered.ops) == 5  # o, gate, up, down, head


def wrong_programs(lowered: Lowered) -> dict[str, list[Op]]:
    """What likely faults of lowering or fusing would leave."""

    def changed(kind: str, change, which: int = 0) -> list[Op]:
        ops = list(lowered.ops)
        at = [i for i, op in enumerate(ops) if op.kind == kind][which]
        ops[at] = change(ops[at])
        return ops

    return {
        "sine for cosine": changed(
            "rotary", lambda op: replace(op, sources=(op.sources[0], op.sources[2], op.sources[1]))
        ),
        "a norm without its weight": changed("rms_norm", lambda op: replace(op, sources=op.sources[:1])),
        "another epsilon": changed("rms_norm", lambda op: replace(op, numbers=(0.5, 0.0))),
        "gate and up in the wrong order": changed("silu_times", lambda op: replace(op, sources=op.sources[::-1])),
        "another matrix": changed("linear", lambda op: replace(op, number=op.number + 7)),
        "a residual left out": changed("add", lambda op: replace(op, kind="copy", sources=op.sources[:1])),
        "another layer's scale": changed(
            "multiply", lambda op: replace(op, sources=(op.sources[0], op.sources[0])), which=0
        ),
    }


def test_a_wrong_program_may_not_serve() -> None:
    model = loaded("llama")
    lowered = recorded(model.model, windows(model))
    spec = KVSpec(model.groups, "float16")
    prove(lowered, model.model, spec, 320)
    for ops in wrong_programs(lowered).values():
        with pytest.raises(NotRecordableError, match="answers otherwise"):
            prove(replace(lowered, ops=ops), model.model, spec, 320)


def test_another_config_is_another_program(tmp_path: Path) -> None:
    """Nothing of a recording outlives a start: a changed config is recorded anew."""
    base = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    other = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    found = []
    for name, options in (("a", base), ("b", other)):
        model = load_model(make_tiny("llama", tmp_path / name, **options), weights="file")
        found.append(logits_of(recorded(model.model, windows(model)), model.groups))
    assert not torch.allclose(found[0], found[1], atol=1e-3)


def test_a_window_is_the_pool_s(tmp_path: Path) -> None:
    """The recording takes windows from the groups, as the pool and the planner do."""
    model = load_model(make_tiny("mistral", tmp_path / "model"), weights="file")
    assert model.groups[0].kind is LayerKind.SLIDING
    lowered = recorded(model.model, windows(model))
    assert all(call.params.window == model.groups[0].window for call in lowered.recording.calls)


def test_recording_does_not_write_torch_s_tracing_into_a_log(caplog: pytest.LogCaptureFixture) -> None:
    model = loaded("llama")
    with caplog.at_level(logging.DEBUG):
        before = logging.getLogger("torch").level
        recorded(model.model, windows(model))
    assert not [each for each in caplog.records if each.name.startswith("torch") and each.levelno < logging.WARNING]
    assert logging.getLogger("torch").level == before
