"""`kvire`, but told, and staying told, that computing is so slow that every load is waited for (see conftest.py)."""

import torch

from kvire.cli.main import app
from kvire.engine import engine
from kvire.plan import cost

torch.set_num_threads(1)
engine.PREFILL_TOKEN_S = 10.0
cost.PrefillSpeed.measured = lambda speed, *_: setattr(speed, "samples", 1)  # type: ignore[method-assign]
app()
