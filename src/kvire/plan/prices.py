"""What hosted models cost per token, cached and not, from one dated table; and what own hardware
costs.
"""

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

from kvire.core.errors import ConfigError

MILLION = 1e6
HOURS_PER_MONTH = 730.0


@dataclass(frozen=True, slots=True)
class Price:
    """One model of one provider, USD per million tokens.

    cache_write: by lifetime ("5m", "1h"); empty where writing costs no more than input.
    minimum_tokens: shorter prompts are not cached.
    step_tokens: hits count in whole steps.
    ttl_s: how long an unused prefix is kept.
    storage_per_hour: of explicit caches, per million tokens; None for none.
    read: the day or month in which the source said so.
    """

    provider: str
    model: str
    input: float
    cached_input: float
    output: float
    minimum_tokens: int
    step_tokens: int
    ttl_s: int
    source: str
    read: str
    cache_write: Mapping[str, float] = field(default_factory=dict)
    storage_per_hour: float | None = None
    note: str = ""

    def cached_tokens(self, shared_tokens: int) -> int:
        """Of a prefix that was sent before, how much counts as found: nothing below the minimum,
        then whole steps.
        """
        if shared_tokens < self.minimum_tokens:
            return 0
        return shared_tokens - shared_tokens % self.step_tokens

    def prompt_usd(self, prompt_tokens: int, cached_tokens: int = 0, written_tokens: int = 0, ttl: str = "5m") -> float:
        """Of one prompt: tokens found, tokens written (of those not found), and the rest.

        Raises ConfigError if they do not add up.
        """
        rest = prompt_tokens - cached_tokens - written_tokens
        if min(rest, cached_tokens, written_tokens) < 0:
            raise ConfigError(
                f"of {prompt_tokens} prompt tokens, {cached_tokens} found and {written_tokens} written are too many"
            )
        write = self.cache_write.get(ttl, self.input) if self.cache_write else self.input
        return (rest * self.input + cached_tokens * self.cached_input + written_tokens * write) / MILLION


@dataclass(frozen=True, slots=True)
class PriceTable:
    """The shipped prices.

    date: of the table; each price says when its source was read.
    """

    date: str
    about: str
    prices: tuple[Price, ...]

    def find(self, model: str) -> Price:
        """By model name. Raises ConfigError that names models like it."""
        by_name = {price.model: price for price in self.prices}
        if model in by_name:
            return by_name[model]
        close = difflib.get_close_matches(model, by_name, n=3) or list(by_name)
        raise ConfigError(f"there is no price for {model!r}; perhaps {', '.join(close)}")


@cache
def price_table() -> PriceTable:
    """The table shipped with this version."""
    table = json.loads((files("kvire.plan") / "prices.json").read_text(encoding="utf-8"))
    return PriceTable(table["date"], table["about"], tuple(Price(**row) for row in table["prices"]))


@dataclass(frozen=True, slots=True)
class RequestBill:
    """One request of a model: USD with everything computed, and with its prefix found.

    first_usd: of the first such request, which writes the prefix.
    """

    price: Price
    plain_usd: float
    first_usd: float
    cached_usd: float
    cached_tokens: int

    @property
    def saving(self) -> float:
        """Share of the plain price that a hit saves."""
        return 1 - self.cached_usd / self.plain_usd

    @property
    def hits_until_paid(self) -> int | None:
        """How many hits it takes until writing has paid for itself; None if never."""
        extra, gain = self.first_usd - self.plain_usd, self.plain_usd - self.cached_usd
        if gain <= 0:
            return None
        return max(0, math.ceil(extra / gain - 1e-9))


def bill(price: Price, prompt_tokens: int, shared_tokens: int, output_tokens: int, ttl: str = "5m") -> RequestBill:
    """What a prompt costs of which `shared_tokens` were sent before."""
    found = price.cached_tokens(min(shared_tokens, prompt_tokens))
    written = found if price.cache_write else 0
    output = output_tokens * price.output / MILLION
    return RequestBill(
        price=price,
        plain_usd=price.prompt_usd(prompt_tokens) + output,
        first_usd=price.prompt_usd(prompt_tokens, 0, written, ttl) + output,
        cached_usd=price.prompt_usd(prompt_tokens, found) + output,
        cached_tokens=found,
    )


def own_usd_per_million(usd_per_hour: float, seconds: float, tokens: int) -> float:
    """USD per million tokens of a machine that takes so long for so many, and does nothing else
    meanwhile.
    """
    return usd_per_hour / 3600 * seconds / tokens * MILLION


def years_until_worn(written_bytes_per_day: float, endurance_bytes: float, amplification: float = 1.1) -> float:
    """Of a disk that may be written `endurance_bytes` (its TBW).

    amplification: bytes written per byte stored.

    Infinite where nothing is written.
    """
    worn = written_bytes_per_day * amplification * 365
    return endurance_bytes / worn if worn > 0 else float("inf")


def hosted_prices(names: Sequence[str]) -> tuple[Price, ...]:
    """Of the models named, or of all. Raises ConfigError for one that is not in the table."""
    table = price_table()
    return tuple(table.find(name) for name in names) if names else table.prices
