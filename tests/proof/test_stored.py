"""G1 below the device: what any tier gives back changes no answer. Restarts, small pools, loads from both ends."""

from pathlib import Path

import pytest
from harness.differential import SMOLLM2, TINY, Tally
from harness.stored import KINDS, prove_stored

EPISODE, LIVES = 40, 2


def proven(subject, kind: str, folder: Path, requests: int, *, deterministic: bool, seed: int) -> Tally:
    tally = Tally()
    for first in range(0, requests, EPISODE):
        home = folder / str(first // (2 * EPISODE))  # every second episode finds what another crowd left
        tally.add(prove_stored(subject, kind, home, seed + first, EPISODE, lives=LIVES, deterministic=deterministic))
    return tally


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_tiny_model(kind: str, tmp_path: Path, *, deterministic: bool) -> None:
    requests = 80 if deterministic else 260
    tally = proven(TINY, kind, tmp_path, requests, deterministic=deterministic, seed=3000)
    assert not tally.faults, tally.faults[:3]
    assert tally.loaded_tokens > 0.03 * tally.prompt_tokens, "there was something that could go wrong"
    assert min(tally.evictions, tally.blocks_compared) > 0
    assert tally.harmless <= (0 if deterministic else 0.02 * tally.requests)
    if "both ends" in kind:
        assert tally.met_loads > 0, "part was loaded and part computed, in one request"


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["disk", "both ends, disk"])
def test_smollm2(kind: str, tmp_path: Path) -> None:
    tally = proven(SMOLLM2, kind, tmp_path, 40, deterministic=True, seed=4000)
    assert not tally.faults, tally.faults[:3]
    assert min(tally.loaded_tokens, tally.blocks_compared) > 0
