"""How many threads a step takes, when other processes want the cores too.

A thread that waits for another one beyond a short spin has nearly always lost it to another
process. If much of a step is waited away so, the next steps run with one thread less, and more are
tried again later. Bits do not depend on it.
"""

WAITED_SHARE = 0.2  # of a step, above which a thread less is faster
FIRST_PAUSE_STEPS, LONGEST_PAUSE_STEPS = 32, 1024  # until the next try; doubled while it fails


class StepThreads:
    """most: threads without foreign load."""

    def __init__(self, most: int) -> None:
        self.count = most
        self._most = most
        self._pause = FIRST_PAUSE_STEPS
        self._left = 0  # steps before the next try

    def note(self, seconds: float, waited_s: float) -> None:
        """A step took so long, of which a thread waited so long for others."""
        if self.count > 1 and waited_s > WAITED_SHARE * seconds:
            self.count -= 1
            self._left = self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE_STEPS)
        elif self.count < self._most:
            self._left -= 1
            if self._left <= 0:
                self.count += 1
        else:
            self._pause = max(FIRST_PAUSE_STEPS, self._pause - 1)
