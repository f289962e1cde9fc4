"""Another process, another version: same tokens, from the store."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from connectors.store_commands import sound_and_whole
from harness.plain_generate import greedy, prompt
from harness.waiting import PATIENCE_S

from kvire.connectors.transformers import StoredCache
from kvire.models.resolve import resolve

LOWEST = "KVIRE_TRANSFORMERS_LOW_PYTHON"
HERE = Path(__file__).parent

ONE_ANSWER = """
import sys
import torch
from transformers import AutoModelForCausalLM
from kvire.connectors.transformers import StoredCache
from kvire.core.config import StoreConfig
from pathlib import Path

model, folder, length = AutoModelForCausalLM.from_pretrained(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
ids = torch.randint(1000, 40000, (1, length), generator=torch.Generator().manual_seed(0))
ids %= model.config.vocab_size
config = StoreConfig(path=folder / "store", disk_bytes=1 << 30, key_file=folder / "keys" / "keyring.json")
with StoredCache.open(model, config) as stored:
    out = stored.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
    print(stored.report.reused_tokens, *out[0, length:].tolist())
plain = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
assert torch.equal(out, plain)
"""


def _answer(model: Path, folder: Path, length: int, *, python: str = sys.executable) -> tuple[int, list[str]]:
    done = subprocess.run(
        [python, "-c", ONE_ANSWER, str(model), str(folder), str(length)],
        capture_output=True, text=True, timeout=10 * PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    reused, *tokens = done.stdout.split()
    return int(reused), tokens


def test_the_next_process_loads(checkpoint, tmp_path) -> None:
    (cold, answer), (warm, again) = (_answer(checkpoint, tmp_path, 100) for _ in range(2))
    assert (cold, warm) == (0, 96)
    assert answer == again


def test_kvire_store_reads_what_was_written(model, config) -> None:
    pytest.importorskip("kvire.cli.main", reason="the command line is not installed here", exc_type=ImportError)
    with StoredCache.open(model, config) as stored:
        stored.generate(prompt(100), **greedy(16))
    sound_and_whole(config.path, config.key_file, engine=f"torch {torch.__version__} code ", least_blocks=7)


@pytest.mark.model
@pytest.mark.slow
def test_a_real_model(tmp_path, monkeypatch) -> None:
    """SmolLM2: 500 tokens of a document."""
    monkeypatch.setenv("KVIRE_CACHE_DIR", str(tmp_path / "cache"))
    model = resolve("smollm2")
    (cold, answer), (warm, again) = (_answer(model, tmp_path, 500) for _ in range(2))
    assert (cold, warm) == (0, 496)
    assert answer == again


@pytest.fixture
def lowest() -> str:
    """The interpreter with the lowest supported version of transformers."""
    python = os.environ.get(LOWEST)
    if not python:
        pytest.skip(f"${LOWEST} names no interpreter that has an older transformers")
    return python


@pytest.mark.engine
def test_another_version_is_another_namespace(checkpoint, tmp_path, lowest) -> None:
    """Neither reads the other's blocks, and each finds its own again."""
    for python, reused in ((lowest, 0), (sys.executable, 0), (lowest, 96), (sys.executable, 96)):
        assert _answer(checkpoint, tmp_path, 100, python=python)[0] == reused, python


@pytest.mark.slow
@pytest.mark.engine
def test_all_of_this_folder_on_the_lowest_version(lowest) -> None:
    environment = {name: value for name, value in os.environ.items() if name != LOWEST}
    command = [lowest, "-m", "pytest", str(HERE), "-q", "-m", "not slow"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=HERE.parents[2], check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
