"""`kvire`, but told that computing is so slow that every load is waited for, however long (see conftest.py)."""

from functools import partial

import torch

from kvire.cli import store_config
from kvire.cli.main import app
from kvire.engine import engine
from kvire.plan import cost

torch.set_num_threads(1)
engine.PREFILL_TOKEN_S = 10.0
store_config.StoreConfig = partial(store_config.StoreConfig, load_timeout_s=60.0)  # type: ignore[misc, assignment]
cost.PrefillSpeed.measured = lambda speed, *_: setattr(speed, "samples", 1)  # type: ignore[method-assign]
app()
