"""A model's chat template is a program: it ends in time, and everything else goes on."""

from contextlib import suppress
from functools import partial

import pytest
from harness.broken_builds import Cases, Claim, Mutant, each_broken_build, each_claim, must_notice
from server.serving import byte_tokenizer, running, tiny_engine

from kvire.core.errors import RequestError
from kvire.models import chat
from kvire.models.chat import encode_chat, within

HI = [{"role": "user", "content": "hi"}]
# Each takes seconds, so that a build without a limit is noticed soon.
ENDLESS = {
    "loops": "{% for a in range(300) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(20) }}",
    "filters": "{% for a in range(100) %}{% set x = range(99999) | map('string') | list %}{% endfor %}",
}


def limited(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(chat, "RENDER_TIMEOUT_S", 0.05)


def every_endless_template_is_stopped() -> None:
    with pytest.MonkeyPatch.context() as patch:
        limited(patch)
        for template in ENDLESS.values():
            tokenizer = byte_tokenizer(template)
            with pytest.raises(RequestError, match="did not finish within"):
                encode_chat(tokenizer, HI)


def the_server_s_threads_are_free_again() -> None:
    """There are two for such work, and any number of chats."""
    with running(tiny_engine(template=ENDLESS["loops"])) as served, pytest.MonkeyPatch.context() as patch:
        limited(patch)
        for _ in range(3):
            answer = served.post("/v1/chat/completions", {"messages": HI, "max_tokens": 1})
            assert answer.status == 400
            assert "did not finish" in answer.error["message"]
        assert served.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status == 200


def count(turns: int) -> int:
    counted = 0
    for _ in range(turns):
        counted += 1
    return counted


def endless() -> None:
    while True:
        pass


def nothing_is_raised_after_the_end() -> None:
    """Calls that end at the very moment: they have a result or are stopped, and what follows goes on."""
    for turns in range(0, 200_000, 1_000):
        with suppress(TimeoutError):
            assert within(0.001, partial(count, turns)) == turns
    with pytest.raises(TimeoutError):
        within(0.001, endless)


def there_is_no_limit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(chat, "within", lambda _, call: call())


CASES: Cases = [
    (every_endless_template_is_stopped, [there_is_no_limit]),
    (the_server_s_threads_are_free_again, [there_is_no_limit]),
    (nothing_is_raised_after_the_end, []),
]


@each_claim(CASES)
def test_a_template_ends_in_time(claim: Claim) -> None:
    claim()


@each_broken_build(CASES)
def test_notices_a_broken_build(claim: Claim, mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    must_notice(claim, mutant, monkeypatch)
