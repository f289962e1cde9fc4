"""One way to say: this claim holds, and each of these broken builds makes it fail."""

from collections.abc import Callable

import pytest

Mutant = Callable[[pytest.MonkeyPatch], None]
Claim = Callable[[], None]
Test = Callable[..., None]
Cases = list[tuple[Claim, list[Mutant]]]

# How a claim fails. A TypeError is none of them: it says that the mutant no longer fits the code
# that it breaks.
NOTICED = (AssertionError, RuntimeError, IndexError, OSError, pytest.fail.Exception)


def each_claim(cases: Cases) -> pytest.MarkDecorator:
    """One test per claim, called `claim`."""
    return pytest.mark.parametrize("claim", [claim for claim, _ in cases], ids=lambda claim: claim.__name__)


def each_broken_build(cases: Cases) -> Callable[[Test], Test]:
    """One test per claim and mutant, called `claim` and `mutant`; what the claim waits for is not
    waited for long.
    """
    pairs = [(claim, mutant) for claim, broken in cases for mutant in broken]
    each = pytest.mark.parametrize(("claim", "mutant"), pairs, ids=lambda part: part.__name__)
    return lambda test: pytest.mark.usefixtures("short_of_patience")(each(test))


def must_notice(claim: Claim, mutant: Mutant, patch: pytest.MonkeyPatch) -> None:
    """Break the build and see the claim fail."""
    mutant(patch)
    with pytest.raises(NOTICED):
        claim()
