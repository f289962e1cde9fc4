"""JSON as the server writes it: plain ASCII, no NaN, nothing between the tokens."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

from starlette.responses import Response

WRITTEN_IN_PLACE_VALUES = 1000  # less than a millisecond


class JsonText(str):
    """JSON that is written already; json_pieces takes it as it is."""

    __slots__ = ()


def json_text(value: Any) -> str:
    """One line. Other than ASCII is escaped: some clients split streams at U+2028 and the like."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A complete answer."""
    return Response(json_text(value), status, headers, media_type="application/json")


def json_pieces(value: Any) -> Iterator[str]:
    """The text of json_text in short pieces.

    Other threads can run between the pieces; Python's json module would block them until the end.
    """
    if isinstance(value, JsonText):
        yield value
    elif isinstance(value, dict):
        for i, (name, inner) in enumerate(value.items()):
            yield ("," if i else "{") + _name(name) + ":"
            yield from json_pieces(inner)
        yield "}" if value else "{}"
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield "," if i else "["
            yield from json_pieces(inner)
        yield "]" if value else "[]"
    else:
        yield json_text(value)


def _name(name: Any) -> str:
    """A field's name as json_text writes it: numbers become text."""
    return json_text({name: None})[1 : -len(":null}")]


async def written(value: Any) -> str:
    """json_text, made beside the event loop where it takes long."""
    if not is_large(value):
        return json_text(value)
    return await asyncio.to_thread(lambda: "".join(json_pieces(value)))


def is_large(value: Any) -> bool:
    """Whether it takes long to write."""
    seen, unseen = 0, [value]
    while unseen and seen <= WRITTEN_IN_PLACE_VALUES:
        inner = unseen.pop()
        parts = inner.values() if isinstance(inner, dict) else inner if isinstance(inner, list) else ()
        seen += len(parts)
        if seen <= WRITTEN_IN_PLACE_VALUES:
            unseen.extend(parts)
    return seen > WRITTEN_IN_PLACE_VALUES
