"""A server that somebody else runs: its cache cannot be emptied or flushed, so new prompts stand
for an empty one.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from kvire.bench.arm import Judge, MeasuredPass, Say, loop, turned
from kvire.bench.client import ApiMessage, Endpoint, ask_completion
from kvire.bench.load import send_all
from kvire.bench.settings import GridCell, Settings
from kvire.bench.states import SLACK_TOKENS, Around, TierState
from kvire.bench.work.ideal import characters
from kvire.bench.work.prompts import BenchPrompt, Script, TokenScale, Writer, message
from kvire.bench.work.workloads import BenchWork
from kvire.core.errors import ConfigError

POSSIBLE = (TierState.E, TierState.W, TierState.Z)


class UrlArm:
    """A server that runs already, of any kind.

    endpoint: its address and model.
    no_reuse: more fields for a request that must reuse nothing, "{unique}" standing for a new text
        each time; None: such a request gets a mark before its text, and answers are not compared.

    The states of `settings` have passed `check_states`.
    """

    def __init__(self, endpoint: Endpoint, settings: Settings, no_reuse: Mapping[str, Any] | None = None) -> None:
        self._endpoint = endpoint
        self._settings = settings
        self._no_reuse = no_reuse

    def describe(self) -> dict[str, Any]:
        """See Arm. What the server runs on, and in which dtype, is not known."""
        return {"kind": "url", "url": self._endpoint.url, "model": {"name": self._endpoint.model}, "options": []}

    @cached_property
    def scale(self) -> TokenScale:
        """See Arm; two short requests, which also warm the server up."""
        return TokenScale.measure(self._count)

    @property
    def judge(self) -> Judge:
        """Tokens are known as far as characters show them."""
        return Judge(characters, SLACK_TOKENS, "characters")

    def steps(self) -> int:
        """See Arm."""
        return len(self._settings.states) * len(list(self._settings.cells()))

    def measure(self, repeat: int, scale: TokenScale, say: Say) -> Iterator[MeasuredPass]:
        """See Arm.

        Passes without reuse come first and last in turn, unless they send the very texts of the
        others and may leave KV behind that those would find.
        """
        settings = self._settings
        write = Writer(scale, settings.seed, settings.nonce)
        for cell in turned(list(settings.cells()), repeat):
            work = settings.work(cell, write, repeat)
            states = [state for state in POSSIBLE if state in {*settings.states_of(work), TierState.E}]
            if TierState.Z in states and self._no_reuse is None and repeat % 2 == 0:
                states = [TierState.Z, *states[:-1]]
            for state in states:
                say(f"{cell}: {state}")
                measured = self._pass(cell, repeat, state, work)
                if state in settings.states:
                    yield measured

    def _pass(self, cell: GridCell, repeat: int, state: TierState, work: BenchWork) -> MeasuredPass:
        scripts = {TierState.E: work.fill, TierState.W: work.probe, TierState.Z: work.baseline}[state]
        salt = f"{self._settings.nonce}-{cell}-{repeat}"
        extra = None
        if state is TierState.Z and self._no_reuse is not None:
            extra = _with_unique(self._no_reuse, salt)
        elif state is TierState.Z:
            scripts = marked(scripts, salt)
        done = send_all(self._endpoint, scripts, loop(self._settings, cell, repeat), extra)
        marks = state is TierState.Z and extra is None
        return self.judge.measured(cell, repeat, state, work, done, Around(), marked=marks)

    def _count(self, messages: Sequence[ApiMessage]) -> int:
        answer = ask_completion(self._endpoint, messages, 1)
        if answer.error is not None:
            raise ConfigError(f"{self._endpoint.url} answered {answer.error}: {answer.detail}")
        if answer.prompt_tokens is None:
            raise ConfigError(
                f"{self._endpoint.url} does not count prompt tokens (usage in streams): nothing to measure by"
            )
        return answer.prompt_tokens


def check_states(states: Sequence[TierState]) -> None:
    """Raises ConfigError for one that would have to be taken on trust."""
    for state in states:
        if state not in POSSIBLE:
            raise ConfigError(
                f"state {state} cannot be proved of a server behind a URL, which nobody here can restart or ask for "
                f"its tiers: choose from {', '.join(POSSIBLE)}"
            )


def marked(scripts: tuple[Script, ...], salt: str) -> tuple[Script, ...]:
    """The same with a mark of its own before each prompt."""
    return tuple(
        replace(
            script, prompts=tuple(_marked(prompt, f"{salt}-{i}-{turn}") for turn, prompt in enumerate(script.prompts))
        )
        for i, script in enumerate(scripts)
    )


def _marked(prompt: BenchPrompt, mark: str) -> BenchPrompt:
    first, *others = prompt.messages
    mark = Writer(TokenScale(1.0, 0.0), 0, mark).document(0, mark)
    return replace(prompt, messages=(message(first["role"], f"{mark} {first['content']}"), *others))


def _with_unique(fields: Mapping[str, Any], salt: str) -> Callable[[int, int], Mapping[str, Any]]:
    text = json.dumps(fields)

    def extra(script: int, turn: int) -> Mapping[str, Any]:
        filled: dict[str, Any] = json.loads(text.replace("{unique}", f"{salt}-{script}-{turn}"))
        return filled

    return extra
