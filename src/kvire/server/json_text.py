"""JSON as the server writes it: plain ASCII, no NaN, nothing between the tokens."""

import json
from typing import Any

from starlette.responses import Response


def json_text(value: Any) -> str:
    """One line. Other than ASCII is escaped: some clients split streams at U+2028 and the like."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A complete answer."""
    return Response(json_text(value), status, headers, media_type="application/json")
