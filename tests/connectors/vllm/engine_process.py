"""A real vLLM engine for tests, as a process of its own."""

import json
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import pytest
from connectors.vllm.driver import ANSWER

import kvire

DRIVER = Path(__file__).parent / "driver.py"
PYTHON = "KVIRE_VLLM_PYTHON"
NEEDS_VLLM = pytest.mark.skipif(
    PYTHON not in os.environ, reason=f"needs vLLM: set {PYTHON} to a Python that can import it (docs/vllm.md)"
)


class EngineGoneError(Exception):
    """The engine ended; what it wrote to stderr."""


class Vllm:
    """One engine. spawns: whether vLLM makes processes of its own for scheduler and worker, as `vllm serve` does.
    environment: more of it. python: another one than PYTHON names.
    """

    def __init__(
        self,
        model: Path,
        options: dict[str, Any] | None,
        log: Path,
        *,
        spawns: bool = False,
        environment: Mapping[str, str] = MappingProxyType({}),
        python: str | None = None,
        **start: Any,
    ) -> None:
        wanted = {"model": str(model), "options": options, **start}
        self._log = log.open("w")
        self.log = log
        self.process = subprocess.Popen(
            [python or os.environ[PYTHON], str(DRIVER), json.dumps(wanted)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
            env=os.environ
            | {
                "PYTHONPATH": str(Path(kvire.__file__).parents[1]),
                "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(spawns)),
                "OMP_NUM_THREADS": "1",
            }
            | environment,
        )
        self.answer()

    def send(self, do: str, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do} | command) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        raise EngineGoneError(self.log.read_text())

    def __call__(self, do: str, **command: Any) -> Any:
        self.send(do, **command)
        return self.answer()

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()
        self._log.close()
