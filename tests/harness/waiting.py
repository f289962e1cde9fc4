"""How tests wait: for what they need to have come, never for a time.

Any thread may be held up for seconds meanwhile.

What must not end before a test has looked is held (engines.held), or takes longer than PATIENCE_S
by itself.
"""

import time
from collections.abc import Callable

# What comes soon has come by then, however busy the machine: the limit of a test that waits for it.
PATIENCE_S = 30.0
# What a request takes that nobody and nothing holds up, on such a machine; others wait at least
# three times as long.
AT_ONCE_S = 10.0


def until(condition: Callable[[], object], otherwise: Callable[[], str] = str, *, every_s: float = 0.002) -> None:
    """Wait until it is so.

    otherwise: says how it is, if it does not come to that.
    every_s: between two looks.
    """
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"not within {PATIENCE_S:g} s {otherwise()}"
        time.sleep(every_s)
