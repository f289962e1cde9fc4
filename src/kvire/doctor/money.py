"""Tokens as money: whose prices a log is reckoned with, and what reused tokens save there."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvire.core.errors import ConfigError
from kvire.doctor.rules import CacheRules, Written
from kvire.plan.prices import MILLION, Price, PriceTable


@dataclass(frozen=True, slots=True)
class Offer:
    """A model's price, and which of the rules of a diagnosis are its cache's. in_log: whether the log asks for it."""

    price: Price
    rules: int
    in_log: bool

    def saved_usd(self, found_tokens: int, written: Written) -> float:
        """Against no cache: what tokens found cost less than input, less what tokens written cost more. Below 0 where
        too little of what is written is found again.
        """
        price = self.price
        found = found_tokens * (price.input - price.cached_input)
        short, hour = (price.cache_write.get(ttl, price.input) - price.input for ttl in ("5m", "1h"))
        return (found - written.five_minutes * short - written.hour * hour) / MILLION


class Offers:
    """All prices of a table with their distinct cache rules."""

    def __init__(self, table: PriceTable) -> None:
        self.table = table
        self.rules = list(dict.fromkeys(map(rules_of, table.prices)))

    def choose(self, models: Iterable[str], wanted: Sequence[str] = ()) -> list[Offer]:
        """The priced models among those of a log, then the first of each other provider; or those that are wanted, by
        name. Raises ConfigError if a wanted one has no price.
        """
        asked = [price for price in self.table.prices if any(_is_named(price.model, model) for model in models)]
        if wanted:
            chosen = [self.table.find(name) for name in wanted]
        else:
            chosen = list(asked)
            for price in self.table.prices:
                if price.provider not in {one.provider for one in chosen}:
                    chosen.append(price)
        return [Offer(price, self.rules.index(rules_of(price)), price in asked) for price in chosen]

    def check(self, wanted: Sequence[str]) -> None:
        """Raise ConfigError, before any work, if there is no price for a name."""
        for name in wanted:
            try:
                self.table.find(name)
            except ConfigError as error:
                raise ConfigError(f"--price: {error}") from error


def rules_of(price: Price) -> CacheRules:
    """The rules of a model's cache. Where writing is priced, it happens only where a breakpoint asks for it."""
    return CacheRules(price.minimum_tokens, price.step_tokens, price.ttl_s, explicit=bool(price.cache_write))


def _is_named(priced: str, logged: str) -> bool:
    """Whether a log's model name means a priced model: with a vendor's and a region's prefix, a date, dashes for dots,
    Bedrock's version.
    """
    plain = re.sub(r"^(?:[a-z-]+\.)?(?:anthropic|amazon|meta)\.", "", logged.rsplit("/", 1)[-1].lower())
    plain = re.sub(r"-v\d+(?::\d+)*$", "", plain)
    plain = re.sub(r"[-@](?:20\d{6}|20\d\d-\d\d-\d\d|latest)$", "", plain)
    return plain.replace(".", "-") == priced.replace(".", "-")
