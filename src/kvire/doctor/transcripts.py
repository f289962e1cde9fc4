"""Transcripts of agents (Claude Code, Codex): they hold answers and what was counted, never a whole request."""

import json
from typing import Any

from kvire.doctor.usage import Usage, read_usage

# Fields of which one is in every line of such a file, beside `type`.
MARKS = ("sessionId", "uuid", "leafUuid", "messageId", "payload")


class Transcripts:
    """Reads the lines of one file, in order: Codex tells the session and the model once."""

    def __init__(self) -> None:
        self._session = ""

    def is_line(self, value: dict[str, Any]) -> bool:
        """Whether a line comes from a transcript."""
        return isinstance(value.get("type"), str) and any(mark in value for mark in MARKS)

    def answer(self, value: dict[str, Any]) -> tuple[str, Usage] | None:
        """What a line counts, and of which answer: several lines may tell the same one. None if it counts nothing.

        Claude Code writes a line per block of an answer, each with the usage of all of it. Codex tells its counts
        again whenever the display is refreshed, and again in the file of a session that goes on from another.
        """
        payload = value.get("payload")
        found = self._codex(value, payload) if isinstance(payload, dict) else _claude_code(value)
        return None if found is None or not found[1].prompt_tokens else found

    def _codex(self, value: dict[str, Any], payload: dict[str, Any]) -> tuple[str, Usage] | None:
        if value["type"] == "session_meta":
            self._session = str(payload.get("id", ""))
        told = payload.get("info")
        if payload.get("type") != "token_count" or not isinstance(told, dict):
            return None
        last, total = told.get("last_token_usage"), told.get("total_token_usage")
        usage = read_usage(last)
        # Totals grow with each answer, so they name it. Those of a session's first are not yet its own.
        session = self._session if last == total else ""
        return None if usage is None else (json.dumps([session, last, total], sort_keys=True), usage)


def _claude_code(value: dict[str, Any]) -> tuple[str, Usage] | None:
    message = value.get("message")
    if value["type"] != "assistant" or not isinstance(message, dict):
        return None
    usage, name = read_usage(message.get("usage")), message.get("id")
    return None if usage is None or not isinstance(name, str) else (name, usage)
