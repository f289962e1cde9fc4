"""Shapes of the shipped cards, for tests."""

from typing import Any

from kvire.plan.cards import card
from kvire.plan.read_shape import read_shape
from kvire.plan.shape import Shape

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def shape(name: str) -> Shape:
    return read_shape(card(name).config)


def changed(name: str, **fields: Any) -> dict[str, Any]:
    """The config of a card with other fields; None removes one. Of its language model, where that stands apart."""
    config = dict(card(name).config)
    inner = "text_config" in config
    text = dict(config["text_config"]) if inner else config
    for field, value in fields.items():
        text[field] = value
        if value is None:
            del text[field]
    return {**config, "text_config": text} if inner else text
