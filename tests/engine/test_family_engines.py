"""Every family through the whole engine: what a warm prefix answers is what a cold engine answers."""

from pathlib import Path

import pytest
from harness.engines import ask, drive, request, words
from models.tiny import EACH_FAMILY, WINDOW, make_tiny

from kvire.core.config import EngineConfig
from kvire.engine.build import build_engine
from kvire.engine.engine import Engine

PREFIX = words(7, 80)  # five blocks, and more than three windows
TAILS = (words(8, 9), words(9, 21), [])


def _engine(path: Path, **options: object) -> Engine:
    config = EngineConfig(block_size=16, kv_memory="4MiB", max_model_len=160, device="cpu", **options)
    engine, _ = build_engine(str(path), config)
    return engine


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_warm_answers_are_cold_answers(family: str, tmp_path: Path) -> None:
    """One prompt alone, then two at once that begin with it, and it again."""
    path = make_tiny(family, tmp_path / family)
    cold = _engine(path, prefix_cache=False)
    prompts = [PREFIX + tail for tail in TAILS]
    expected = [ask(cold, prompt, max_tokens=12).token_ids for prompt in prompts]
    assert len({tuple(answer) for answer in expected}) == len(prompts)

    warm = _engine(path)
    assert ask(warm, prompts[0], max_tokens=12).token_ids == expected[0]
    requests = [request(prompt, max_tokens=12) for prompt in prompts[1:]]
    answered = drive(warm, requests)
    answers = [answered[one.request_id, 0] for one in requests]
    assert [answer.token_ids for answer in answers] == expected[1:]
    assert all(answer.cache.device_tokens >= 64 for answer in answers)
    assert ask(warm, prompts[0], max_tokens=12).token_ids == expected[0]
    assert len(PREFIX) > 3 * WINDOW
