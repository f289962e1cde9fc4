"""Run a diagnosis over lines."""

from collections.abc import Sequence

from kvire.doctor.diagnose import MEMORY_BYTES, Doctor
from kvire.doctor.findings import Diagnosis
from kvire.doctor.reading.logs import read_log
from kvire.doctor.rules import CacheOffers, CacheRules
from kvire.doctor.tokens import Estimate
from kvire.plan.prices import Price, PriceTable

OFFERS = CacheOffers(
    PriceTable(
        "2026-01-01",
        "made up",
        (
            Price("steps", "stepwise-1", 2.0, 0.5, 8.0, 1024, 128, 300, "made up", "2026"),
            Price("marks", "claude-x", 3.0, 0.3, 15.0, 1024, 1, 300, "made up", "2026", {"5m": 3.75, "1h": 6.0}),
        ),
    )
)


def examine(
    lines: Sequence[bytes], rules: Sequence[CacheRules] = tuple(OFFERS.rules), memory_bytes: int = MEMORY_BYTES
) -> Diagnosis:
    return Doctor(rules, Estimate(), memory_bytes).examine(read_log(lines)).diagnosis()
