"""What tests of `kvire bench` share: a tiny model in a folder, and `kvire serve` for it."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from models.tiny import make_tiny
from server.serving import listening

from kvire.bench.arms.server import RunningServer
from kvire.bench.client import Endpoint
from kvire.cli.main import cli
from kvire.llm import LLM

PROGRAM = (sys.executable, str(Path(__file__).with_name("eager_serve.py")))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One token is a byte; loading it takes no time."""
    return make_tiny("llama", tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=8192)


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch, loading_pays: None) -> None:
    """Servers run in this process: importing torch anew for each takes longer than everything else together."""
    given: dict[str, Any] = {}
    monkeypatch.setattr("kvire.server.run.serve", lambda model, options, **more: given.update(more, model=model))

    @contextmanager
    def serving(model: str, options: Sequence[str], endpoint: Endpoint, _: Sequence[str]) -> Iterator[RunningServer]:
        cli(["serve", model, "--port", "0", *options], standalone_mode=False)
        more = {name: value for name, value in given.items() if name not in {"progress", "say", "model"}}
        with LLM(given["model"], **more) as llm, listening(llm.client, model) as served:
            yield RunningServer(replace(endpoint, url=f"{served.url}/v1", model=model), os.getpid())

    monkeypatch.setattr("kvire.bench.arms.kvire_repeat.serving", serving)
