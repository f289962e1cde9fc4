"""Engines over the tiny models of tests/models, built from their files as a user's model is."""

import atexit
import tempfile
from functools import cache
from pathlib import Path

import torch
from models.tiny import make_tiny

from harness.engines import BLOCK
from kvire.core.config import EngineConfig
from kvire.engine.build import build_engine
from kvire.engine.engine import Engine
from kvire.models.loader import load_model

_folder = tempfile.TemporaryDirectory(prefix="kvire-tiny-")
atexit.register(_folder.cleanup)


@cache
def family_path(family: str) -> Path:
    """A tiny random model's files, made once."""
    return make_tiny(family, Path(_folder.name) / family)


@cache
def family_model(family: str) -> torch.nn.Module:
    """The transformers class itself."""
    return load_model(family_path(family)).model


def family_engine(family: str, **options) -> Engine:
    """An engine over a tiny model of the family.

    options: EngineConfig's; blocks of 16 tokens, and a pool that is large for tiny models.
    """
    config = EngineConfig.from_options({"block_size": BLOCK, "kv_memory": "8MiB"} | options)
    return build_engine(str(family_path(family)), config)[0]


def family_oracle(family: str, **options) -> Engine:
    """The same, nothing reused."""
    return family_engine(family, prefix_cache=False, **options)
