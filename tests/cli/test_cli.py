"""The `kvire` command on a tiny model, as people and programs run it."""

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness.commands import in_process
from models.tiny import make_tiny


@dataclass
class Done:
    """What a command left behind."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def kvire(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs the command in this process."""

    def run(*args: str, stdin: str = "") -> Done:
        return Done(*in_process(monkeypatch, capsys, args, stdin))

    return run


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny("llama", tmp_path_factory.mktemp("tiny") / "tiny-llama"))


def test_help_teaches_without_loading_torch(kvire) -> None:
    shown = kvire("--help")
    assert shown.returncode == 0
    for command in ("generate", "chat", "serve", "models"):
        assert command in shown.stdout
        assert kvire(command, "--help").returncode == 0
    code = "import sys, kvire.cli.main; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    version = subprocess.run([sys.executable, "-m", "kvire.cli.main", "--version"], capture_output=True, check=False)
    assert version.stdout.strip()


def test_generate_prints_the_text_and_a_status_line(kvire, tiny: str) -> None:
    done = kvire("generate", tiny, "hello there", "--max-tokens", "40", "--raw")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "11 prompt tokens, 0 reused" in done.stderr


def test_generate_json_is_for_programs(kvire, tiny: str) -> None:
    done = kvire("generate", tiny, "--json", "--max-tokens", "6", "--raw", "--seed", "3", stdin="from standard input")
    answer = json.loads(done.stdout)
    assert answer["usage"]["prompt_tokens"] == len("from standard input")
    assert answer["usage"]["cached_tokens"] == 0
    assert answer["cache"]["reused_tokens"] + answer["cache"]["computed_tokens"] == answer["usage"]["prompt_tokens"]
    assert len(answer["token_ids"]) == answer["usage"]["completion_tokens"] <= 6


def test_generate_reads_a_file(kvire, tiny: str, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("0123456789")
    done = kvire("generate", tiny, "--json", "--raw", "--max-tokens", "1", "--file", str(tmp_path / "prompt.txt"))
    assert json.loads(done.stdout)["usage"]["prompt_tokens"] == 10


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["generate", "no-such-model", "hi"], "no-such-model"),
        (["generate", "TINY", "hi", "--kv-dtype", "int3"], "float32, float16, bfloat16"),
        (["generate", "TINY", "hi", "--kv-memory", "plenty"], "kv_memory"),
        (["generate", "TINY", "hi", "--kv-memory", "900TiB"], "are free"),
        (["generate", "TINY", "hi", "--kv-memory", "1KB"], "kv_memory"),
        (["generate", "TINY", "hi", "--max-model-len", "999999"], "2048"),
        (["generate", "TINY", "hi", "--temperature", "-1"], "temperature"),
        (["generate", "TINY", "x" * 3000, "--raw"], "2048"),
        (["generate", "TINY", "hi", "--file", "x"], "not both"),
        (["generate", "TINY", "--file", "missing.txt"], "missing.txt"),
        (["serve", "TINY", "--host", "0.0.0.0"], "API key"),
        (["serve", "TINY", "--port", "99999"], "65535"),
        (["serve", "TINY", "--no-store", "--ram", "1GB"], "contradict"),
        (["serve", "TINY", "--disk-size", "1MB"], "at least 5 MiB"),
        (["generate", "TINY", "hi", "--store-ttl", "0", "--ram", "1GB"], "above 0"),
        (["generate", "TINY", "hi", "--store-ttl", "5"], "add --store DIR"),
        (["generate", "TINY", "hi", "--store", "s", "--no-prefix-cache"], "prefix cache"),
        (["generate", "TINY", "hi", "--remote", "ftp://x"], "redis://"),
    ],
    ids=lambda part: " ".join(part)[:50] if isinstance(part, list) else "",
)
def test_errors_say_what_is_wrong(kvire, args: list[str], says: str, tiny: str) -> None:
    done = kvire(*[tiny if arg == "TINY" else arg for arg in args])
    assert done.returncode == 2
    assert says in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert not done.stdout


def test_an_unsupported_architecture_is_refused_by_name(kvire, tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": "mamba2"}))
    done = kvire("generate", str(path), "hi")
    assert done.returncode == 2
    assert "mamba2" in done.stderr
    assert "llama" in done.stderr, "it says which families are supported"


def test_chat_streams_and_says_what_was_reused(kvire, tiny: str) -> None:
    done = kvire(
        "chat",
        tiny,
        "--max-tokens",
        "4",
        stdin="hello, this is a line of text\nand again\n/compare\n/nonsense\n/help\n/new\nx\n/exit\n",
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if re.match(r"context \d", line)]
    assert len(lines) == 3
    assert "reused 0 of" in lines[0]
    assert "reused 51 of" in lines[1]
    assert "KV is kept in" in done.stderr and "sealed" in done.stderr and "--no-store keeps nothing" in done.stderr
    assert "this chat" in done.stderr
    assert "fresh chat" in done.stderr
    assert "no command /nonsense" in done.stderr


@pytest.mark.parametrize("choice", ["drop", "new", "stop"])
def test_chat_at_the_end_of_the_context(kvire, choice: str, tiny: str) -> None:
    """At 80 % a warning; at the limit a choice, with its price in cached tokens."""
    turns = "one turn\n" * 12
    done = kvire("chat", tiny, "--max-tokens", "16", "--max-model-len", "256", stdin=f"{turns}{choice}\n")
    assert done.returncode == 0, done.stderr
    assert "of the context is used" in done.stderr
    assert "is full" in done.stderr
    assert "oldest turns would cost" in done.stderr
    before, after = done.stderr.split("is full", 1)
    if choice == "stop":
        assert "context " not in after
    else:
        used = int(re.search(r"context (\d+)/256", after)[1])
        assert used <= (200 if choice == "drop" else 80), "room for more than one answer"
    assert before.count("context ") >= 3


def test_models_ls_and_show(kvire, tiny: str) -> None:
    listed = json.loads(kvire("models", "ls", "--json").stdout)
    assert {"smollm2", "gemma3-270m"} <= {model["name"] for model in listed}
    shown = kvire("models", "show", tiny)
    assert "llama" in shown.stdout
    assert "KV per token" in shown.stdout
    assert json.loads(kvire("models", "show", tiny, "--json").stdout)["context_tokens"] == 2048
