"""Models as transformers runs them by itself, and calls of generate() that end where a
test says.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from models.tiny import make_tiny
from transformers import AutoModelForCausalLM, PreTrainedModel


def load(path: Path, **options: object) -> PreTrainedModel:
    """A model in memory, without Kvire."""
    return AutoModelForCausalLM.from_pretrained(path, **options)


def tiny(family: str, path: Path, **overrides: Any) -> PreTrainedModel:
    """A tiny model of a family; skips the test where this version of transformers has none, or
    cannot load it.
    """
    try:
        return load(make_tiny(family, path, tokenizer=False, **overrides))
    except (ValueError, NotImplementedError) as error:
        pytest.skip(f"this version of transformers has no {family}: {error}")


def prompt(length: int, seed: int = 0) -> torch.Tensor:
    """[1, length] token ids, none of them special in a tiny model."""
    return torch.randint(0, 256, (1, length), generator=torch.Generator().manual_seed(seed))


def greedy(tokens: int) -> dict[str, Any]:
    """Arguments of generate() for exactly so many tokens."""
    return {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": None}
