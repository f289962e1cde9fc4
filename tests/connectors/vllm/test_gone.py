"""N19: clients leave while their requests have no seat, or lost it: the engine lives, and nothing of them stays."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from connectors.vllm.engine_process import PYTHON
from connectors.vllm.test_engine import BLOCK, SMALL, options, prompts
from harness import waiting
from harness.waiting import until

import kvire

Start = Callable[..., Any]
SEATS = 4
POOL_BYTES = 1 << 20  # room for four prompts, and not for their answers
TINY = {"block_size": BLOCK, "max_num_seqs": SEATS, "max_num_batched_tokens": 256, "max_model_len": 640}


@pytest.fixture(scope="module")
def asked() -> list[list[int]]:
    return prompts(64, seed=19)


@pytest.fixture
def expected(llama: Path, start: Start, asked: list[list[int]]) -> list[list[int]]:
    """Answers to the first of them."""
    with start(llama, None, arguments=SMALL) as alone:
        answers: list[list[int]] = alone("generate", prompts=asked[:8])["tokens"]
    return answers


def test_they_are_aborted_in_every_state(
    llama: Path, tmp_path: Path, start: Start, asked: list[list[int]], expected: list[list[int]]
) -> None:
    with start(llama, options(tmp_path), arguments=TINY, kv_bytes=POOL_BYTES) as engine:
        assert engine("generate", prompts=asked[:8])["tokens"] == expected
        for moment in ("asked", "seated", "preempted", "loading"):
            assert engine("forget_device")
            left = engine("leave", prompts=asked, when=moment)
            assert not any(left.values()), (moment, left)
            assert engine("generate", prompts=asked[:8])["tokens"] == expected, moment


class Server:
    """`vllm serve` with the connector, and what it says of itself."""

    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, prompt: list[int], max_tokens: int) -> socket.socket:
        """A connection on which that was asked."""
        body = json.dumps({"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}).encode()
        connection = socket.create_connection(("127.0.0.1", self.port))
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        return connection

    def text(self, prompt: list[int]) -> str:
        """Of an answer of eight tokens."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=2 * waiting.PATIENCE_S)
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = json.load(connection.getresponse())
        connection.close()
        return str(answer["choices"][0]["text"])

    def figures(self) -> dict[str, float]:
        """Of /metrics, by name."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=2 * waiting.PATIENCE_S)
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        connection.close()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name.split("{")[0].removeprefix("vllm:"): float(value) for name, value in pairs}

    def is_idle(self) -> bool:
        """Whether no request is left, and no block in use."""
        now = self.figures()
        return now["num_requests_running"] == now["num_requests_waiting"] == now["kv_cache_usage_perc"] == 0


@pytest.fixture
def serve(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Starts a server over a folder of this test."""
    monkeypatch.setattr(waiting, "PATIENCE_S", 4 * waiting.PATIENCE_S)  # vLLM starts slowly

    @contextmanager
    def running() -> Iterator[Server]:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
        command = [
            os.environ[PYTHON], "-m", "vllm.entrypoints.openai.api_server", f"--model={llama}", f"--port={port}",
            "--host=127.0.0.1", "--dtype=float32", "--enforce-eager", f"--kv-cache-memory-bytes={POOL_BYTES}", *flags,
            f"--kv-transfer-config={json.dumps(TRANSFER | {'kv_connector_extra_config': options(tmp_path)})}",
        ]  # fmt: skip
        environment = os.environ | {"PYTHONPATH": str(Path(kvire.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
        with (tmp_path / "serve.log").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        server = Server(port)

        def is_up() -> bool:
            assert process.poll() is None, (tmp_path / "serve.log").read_text()
            try:
                return bool(server.figures())
            except OSError:
                return False

        try:
            until(is_up, every_s=0.2)
            yield server
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    return running


TRANSFER = {
    "kv_connector": "KvireConnector",
    "kv_connector_module_path": "kvire.connectors.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


@pytest.mark.usefixtures("start")  # marks it as one that needs vLLM
def test_their_connections_are_closed(serve: Callable[[], Any], asked: list[list[int]]) -> None:
    with serve() as server:
        expected = [server.text(prompt) for prompt in asked[:SEATS]]
        for waits in (1, 32, 64 - SEATS):
            connections = [server.ask(prompt, 300) for prompt in asked]
            until(lambda waits=waits: server.figures()["num_requests_waiting"] >= waits)  # type: ignore[misc]
            for connection in connections:
                connection.close()
            until(server.is_idle, lambda: str(server.figures()))
            assert [server.text(prompt) for prompt in asked[:SEATS]] == expected
