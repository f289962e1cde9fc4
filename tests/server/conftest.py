"""Servers that tests share."""

from collections.abc import Iterator

import pytest
from server.serving import ScriptedModel, Served, running, tiny_engine


@pytest.fixture(scope="session")
def shared() -> Iterator[Served]:
    """A random llama with room; other tests leave things in its cache."""
    with running(tiny_engine()) as served:
        yield served


@pytest.fixture
def fresh() -> Iterator[Served]:
    """The same with an empty cache."""
    with running(tiny_engine()) as served:
        yield served


class Scripted:
    def __init__(self, served: Served, model: ScriptedModel) -> None:
        self.served = served
        self.model = model
        self.say = model.say


@pytest.fixture(scope="session")
def scripted() -> Iterator[Scripted]:
    """A server whose model says what `say` told it."""
    model = ScriptedModel()
    with running(tiny_engine(model=model)) as served:
        yield Scripted(served, model)
