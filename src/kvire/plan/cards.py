"""The model cards shipped with Kvire: config fields of models that one may plan for without having
them.
"""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from kvire.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Card:
    """One model.

    verified: its fields were compared with the published config.json.
    source, note: for people.
    """

    name: str
    title: str
    aliases: tuple[str, ...]
    verified: bool
    source: str
    config: Mapping[str, Any]
    note: str = ""


@cache
def cards() -> dict[str, Card]:
    """By name, in the order of the file; aliases are not names."""
    table = json.loads((files("kvire.plan") / "cards.json").read_text(encoding="utf-8"))
    return {row["name"]: Card(**{**row, "aliases": tuple(row["aliases"])}) for row in table["cards"]}


def find_card(name: str) -> Card | None:
    """The card of that name or alias, whatever the case; None if there is none."""
    wanted = name.lower()
    found = (card for card in cards().values() if wanted == card.name or wanted in card.aliases)
    return next(found, None)


def card(name: str) -> Card:
    """The same; raises ConfigError that names cards like it."""
    if (found := find_card(name)) is not None:
        return found
    close = difflib.get_close_matches(name.lower(), cards(), n=3) or list(cards())
    raise ConfigError(f"there is no card {name!r}; perhaps {', '.join(close)}. kvire plan --cards lists all")
