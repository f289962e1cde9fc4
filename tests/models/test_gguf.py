"""Conversion of GGUFs: the same numbers as transformers' own loading, once, all or nothing."""

import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvire.core.errors import ConfigError, ModelNotFoundError, UnsupportedModelError
from kvire.models.catalog import list_models
from kvire.models.checkpoint import open_checkpoint
from kvire.models.embedded import EMBEDDED, GgufSource, find_embedded
from kvire.models.families import kv_groups
from kvire.models.gguf import convert as conversion
from kvire.models.gguf.convert import convert, converted_folder, gguf_file
from kvire.models.loader import load_model
from kvire.models.resolve import resolve

from .tiny_gguf import make_gguf


def _assert_same_model(converted: Path, original: Path) -> None:
    """Every weight bit-equal to what transformers makes of the GGUF, and the same config where it counts."""
    theirs = AutoModelForCausalLM.from_pretrained(original.parent, gguf_file=original.name, dtype=torch.float32)
    ours = load_model(converted).model
    expected, got = theirs.state_dict(), ours.state_dict()
    assert expected.keys() == got.keys()
    for name, value in expected.items():
        assert got[name].dtype == torch.float32
        assert torch.equal(value, got[name]), name
    for field in ("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings"):
        assert getattr(theirs.config, field, None) == getattr(ours.config, field, None), field
    plain = {key: value for key, value in theirs.config.to_dict().items() if key != "quantization_config"}
    assert kv_groups(plain) == kv_groups(ours.config)
    for (name, value), (_, other) in zip(theirs.named_buffers(), ours.named_buffers(), strict=True):
        assert torch.equal(value, other), name  # rotary frequencies


@pytest.mark.parametrize("arch", ["llama", "qwen2", "gemma3"])
def test_equal_to_transformers(tmp_path: Path, arch: str) -> None:
    path = make_gguf(tmp_path / "tiny.gguf", arch)
    _assert_same_model(resolve(str(path)), path)


def test_qwen3_head_width_is_the_files_own(tmp_path: Path) -> None:
    """transformers 5.24 takes its default of 128 here, whatever the GGUF says."""
    assert load_model(resolve(str(make_gguf(tmp_path / "tiny.gguf", "qwen3")))).groups[0].key_width == 16


@pytest.mark.model
def test_smollm2_equal_to_transformers(smollm2: Path) -> None:
    _assert_same_model(smollm2, find_embedded(EMBEDDED["smollm2"]).files[0])


def test_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_gguf(tmp_path / "My model (v2).gguf")
    folder = resolve(str(path))
    assert folder.name.startswith("My-model-v2-")
    assert {file.name for file in folder.iterdir()} == {
        "chat_template.jinja", "config.json", "generation_config.json", "kvire.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    monkeypatch.setattr(conversion, "_write_model", lambda *_: pytest.fail("converted again"))
    assert resolve(str(path)) == resolve(folder.name) == folder
    assert [line.name for line in list_models() if line.source == "gguf"] == [folder.name]


def test_another_content_is_another_folder(tmp_path: Path) -> None:
    first = resolve(str(make_gguf(tmp_path / "tiny.gguf", seed=1)))
    second = resolve(str(make_gguf(tmp_path / "tiny.gguf", seed=2)))
    assert first != second


def test_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr("kvire.models.gguf.weights.SHARD_BYTES", 60_000)
    folder = resolve(str(path))
    assert len(open_checkpoint(folder).shards) > 2
    _assert_same_model(folder, path)


KILLED = """
import os, signal, sys
from pathlib import Path
from types import SimpleNamespace
from kvire.models.gguf.convert import convert, gguf_file
def progress(stage, done, total):
    if "weights to float32" in stage and done == 5:
        os.kill(os.getpid(), signal.SIGKILL)
convert(gguf_file(Path(sys.argv[1])), progress)
"""


@pytest.mark.slow
def test_a_killed_conversion_leaves_nothing_that_counts(tmp_path: Path, cache: Path) -> None:
    path = make_gguf(tmp_path / "tiny.gguf")
    died = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False, timeout=120)
    assert died.returncode == -signal.SIGKILL
    target = converted_folder(gguf_file(path))
    assert not target.exists()
    assert list((cache / "models").glob(".partial-*"))
    assert all(line.source == "embedded" for line in list_models())
    assert convert(gguf_file(path)) == target
    assert not list((cache / "models").glob(".partial-*"))
    load_model(target)


def test_rubbish_of_another_model_goes_too(tmp_path: Path, cache: Path) -> None:
    rubbish = cache / "models" / ".partial-other-0123456789abcdef"
    rubbish.mkdir(parents=True)
    (rubbish / "model.safetensors").touch()
    resolve(str(make_gguf(tmp_path / "tiny.gguf")))
    assert not rubbish.exists()


ONE_OF_TWO = "import sys; from kvire.models.resolve import resolve; print(resolve(sys.argv[1]))"


@pytest.mark.slow
def test_two_processes_at_once(tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "tiny.gguf")
    both = [
        subprocess.Popen([sys.executable, "-c", ONE_OF_TWO, str(path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=120)[0].strip() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert said[0] == said[1]
    load_model(Path(said[0]))


def test_a_failed_conversion_cleans_up(tmp_path: Path, cache: Path) -> None:
    path = make_gguf(tmp_path / "tiny.gguf", drop="blk.1.attn_q.weight")
    with pytest.raises(UnsupportedModelError, match=r"no tensor for model.layers.1.self_attn.q_proj"):
        resolve(str(path))
    assert [path for path in (cache / "models").iterdir() if not path.name.startswith(".lock-")] == []


def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr("kvire.models.made_once.shutil.disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    with pytest.raises(ConfigError, match=r"KVIRE_CACHE_DIR"):
        resolve(str(path))


def test_a_cache_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setenv("KVIRE_CACHE_DIR", str(path))  # a file where a folder should be
    with pytest.raises(ConfigError, match="set KVIRE_CACHE_DIR"):
        resolve(str(path))


def test_a_file_in_parts_is_joined_and_checked(tmp_path: Path) -> None:
    whole = make_gguf(tmp_path / "tiny.gguf")
    content, parts = whole.read_bytes(), (tmp_path / "x.part00", tmp_path / "x.part01")
    parts[0].write_bytes(content[:1000])
    parts[1].write_bytes(content[1000:])
    source = GgufSource("joined", parts, gguf_file(whole).sha256)
    folder = convert(source)
    assert not list(folder.glob("*.gguf"))
    assert load_model(folder).weights_digest == load_model(resolve(str(whole))).weights_digest
    with pytest.raises(ModelNotFoundError, match=r"not the file it should be.*pip install again"):
        convert(GgufSource("joined", parts[::-1], "0" * 64, "pip install again"))


def test_progress_comes_late_or_not_at_all(tmp_path: Path) -> None:
    seen: list[str] = []
    convert(gguf_file(make_gguf(tmp_path / "tiny.gguf")), lambda stage, _, __: seen.append(stage))
    assert "converting the weights to float32" in seen
    seen.clear()
    resolve(str(tmp_path / "tiny.gguf"), progress=lambda stage, _, __: seen.append(stage))
    assert seen == []


REFUSED = [
    ({"arch": "llama", "fields": {"rope.scaling.type": "yarn"}}, r"llama\.rope\.scaling\.type = 'yarn'"),
    ({"arch": "llama", "fields": {"rope.scaling.factor": 8.0}}, r"states llama\.rope\.scaling\.factor"),
    ({"arch": "llama", "fields": {"expert_count": 8}}, r"llama\.expert_count = 8"),
    ({"arch": "llama", "fields": {"attention.sliding_window": 4096}}, r"attention\.sliding_window = 4096"),
    ({"arch": "llama", "fields": {"attention.key_length": 32}}, r"attention\.key_length = 32"),
    ({"arch": "llama", "fields": {"block_count": 10**9}}, "claims 1000000000 layers and has tensors of 2"),
    ({"arch": "llama", "fields": {"block_count": "many"}}, "not a positive number"),
    ({"arch": "llama", "fields": {"embedding_length": 128}}, "has shape .* expected .*damaged"),
    ({"arch": "llama", "fields": {"attention.head_count": 0}}, "not a positive number"),
    ({"arch": "llama", "pre": "unheard-of"}, "rules 'unheard-of'"),
    ({"arch": "gemma3", "fields": {"rope.scaling.factor": 8.0}}, r"gemma3\.rope\.scaling\.factor"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_what_would_be_another_model_is_refused(tmp_path: Path, options: dict, words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        resolve(str(make_gguf(tmp_path / "tiny.gguf", **options)))


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    import gguf  # noqa: PLC0415

    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=r"mamba is not supported: llama, qwen2"):
        resolve(str(tmp_path / "tiny.gguf"))


def test_llama3_rules(tmp_path: Path) -> None:
    """A BOS that old files do not mention, and whole words before merges."""
    tokenizer = load_model(resolve(str(make_gguf(tmp_path / "tiny.gguf", pre="llama-bpe")))).tokenizer
    assert tokenizer("a").input_ids[0] == tokenizer.bos_token_id
    assert tokenizer.backend_tokenizer.model.ignore_merges


def test_qwen2_rules(tmp_path: Path) -> None:
    """Its own tokenizer composes characters first (NFC)."""
    tokenizer = load_model(resolve(str(make_gguf(tmp_path / "tiny.gguf", "qwen2")))).tokenizer
    assert tokenizer("e\u0301").input_ids == tokenizer("\u00e9").input_ids
