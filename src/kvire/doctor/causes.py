"""What can make prompts part that are otherwise the same, and what to do about each."""

from enum import StrEnum


class Cause(StrEnum):
    """Why a prompt stops being the same as an earlier one though what follows is the same again."""

    TIME = "time stamp"
    RANDOM_ID = "random id"
    COUNTER = "counter"
    USER = "user name or id"
    TOOL_ORDER = "tools in another order"
    TOOL_SET = "other tools"
    JSON_FORM = "JSON written differently"
    REASONING = "reasoning dropped or changed"
    TRUNCATED = "history cut at the front"
    INSERTED = "text inserted before the history"
    MOVED_PASSAGES = "passages in another order"
    CONTEXT = "changing text before fixed text"
    SYSTEM = "changed system prompt"
    HISTORY = "changed history"
    WHITE_SPACE = "white space"
    MEDIA = "image or file"
    SETTINGS = "changed settings"
    MODEL = "another model"


ADVICE = {
    Cause.TIME: "Put the time at the end of the prompt (into the last message), or round it to the day.",
    Cause.RANDOM_ID: "Leave ids out of the prompt, or put them behind everything that stays the same; "
    "for traces there are headers and metadata fields.",
    Cause.COUNTER: "Put numbers that change per request behind everything that stays the same.",
    Cause.USER: "Put what is about the user behind the instructions that all users share.",
    Cause.TOOL_ORDER: "Send the tools in one fixed order, for example sorted by name.",
    Cause.TOOL_SET: "Send the same tools with every request and limit their use by tool_choice or by instruction; "
    "tools stand in front of everything else.",
    Cause.JSON_FORM: "Send JSON text back exactly as it came, or write it in one fixed form (sorted keys, the same "
    "separators).",
    Cause.REASONING: "Send earlier turns back as they were, reasoning included, or leave it out at once.",
    Cause.TRUNCATED: "Cut history rarely and by large steps (say, half of it), not by a message each turn; "
    "or summarise it at the end.",
    Cause.INSERTED: "Put what was looked up for this turn behind the history, beside the question.",
    Cause.MOVED_PASSAGES: "Send the same passages in one fixed order, for example by document id.",
    Cause.CONTEXT: "Put the fixed text first and what changes behind it.",
    Cause.SYSTEM: "Keep one system prompt, and put what changes into the last message.",
    Cause.HISTORY: "Append to the history; do not edit it.",
    Cause.WHITE_SPACE: "Send earlier text back byte for byte: no trimming, no change of line ends.",
    Cause.MEDIA: "Send the same image or file by the same bytes or the same URL, and put new ones at the end.",
    Cause.SETTINGS: "Keep tool_choice, thinking and the response format the same within a conversation.",
    Cause.MODEL: "Caches are per model: stay with one model within a conversation.",
}
