"""Differences inside a part: small pieces that change from request to request (times, ids,
counters, names), reasoning in tags, JSON, white space, paragraphs, and simply other text.
"""

import json
import re
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from kvire.doctor.findings import Cause
from kvire.doctor.prompt import SYSTEM, TOOL, USER
from kvire.doctor.structure import Sides, Spans, permuted

BEFORE_BYTES, AFTER_BYTES = 64, 140  # around the place where two prompts part, that are compared
# Two numbers are taken for one counter if they are not farther apart than this.
FARTHEST_COUNT = 1000

_MONTH = rb"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]{0,6}\.?"
_DAY = rb"(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]{0,6},?\s+)?"
_CLOCK = rb"\d{1,2}:\d\d(?::\d\d(?:[.,]\d+)?)?(?:\s?[AaPp]\.?[Mm]\b\.?)?"
_ZONE = rb"(?:\s?(?:Z\b|UTC|GMT|[+-]\d\d:?\d\d\b))?"
_DATES = (
    rb"\d{4}-\d\d-\d\d",
    rb"(?<![\d.])(?:\d{1,2}[/.]\d{1,2}[/.](?:\d{4}|\d\d)|\d{4}[/.]\d{1,2}[/.]\d{1,2})(?!\.?\d)",
    rb"\d{1,2}\.?\s[A-Za-z\x80-\xff]{3,12}\.?\s(?:19|20)\d\d",  # 1. März 2026
    r"\d{4}\s?(?:年|년)\s?\d{1,2}\s?(?:月|월)\s?\d{1,2}\s?(?:日|일)".encode(),
    _DAY + _MONTH + rb"\s+\d{1,2}(?:[a-z]{2})?(?:,?\s+\d{4})?",
    _DAY + rb"\d{1,2}(?:[a-z]{2})?\s+" + _MONTH + rb"(?:,?\s+\d{4})?",
)
_DATE = rb"(?:" + rb"|".join(_DATES) + rb")"
_EPOCH = rb"(?<![\w.])1[5-9]\d{8}(?:\.\d+|\d{3}|\d{6}|\d{9})?(?![\w])"
_WORD = rb"(?<![A-Za-z0-9_-])[A-Za-z0-9_-]{5,128}(?![A-Za-z0-9_-])"


DIGIT = re.compile(rb"\d")


class Pattern(NamedTuple):
    """Form of one kind of piece.

    group: the piece itself.
    has_blanks: whether there may be blanks in it.
    """

    cause: Cause
    regex: re.Pattern[bytes]
    group: int = 0
    has_blanks: bool = True


PATTERNS = (
    Pattern(Cause.TIME, re.compile(rb"%b(?:(?:[T ]|,\s?| at )%b)?%b|%b%b" % (_DATE, _CLOCK, _ZONE, _CLOCK, _ZONE))),
    Pattern(Cause.TIME, re.compile(_EPOCH), has_blanks=False),
    Pattern(
        Cause.USER,
        re.compile(
            rb"(?i)\b(?:user|customer|client|account|tenant|member|employee)(?:[ _-]?(?:name|id))?[\"']?\s*"
            rb"(?:is\b|[:=])\s*[\"']?([^\s\"'<>,;][^\n\"'<>,;]{0,59})"
        ),
        1,
    ),
    Pattern(
        Cause.USER,
        re.compile(rb"(?i)\b(?:name|e-?mail)[\"']?\s*(?:is\b|[:=])\s*[\"']?([^\s\"'<>,;][^\n\"'<>,;]{0,59})"),
        1,
    ),
    Pattern(Cause.USER, re.compile(rb"[\w.+-]{1,64}@[\w-]{1,64}(?:\.[\w-]{1,64})+")),
    Pattern(Cause.RANDOM_ID, re.compile(_WORD), has_blanks=False),
    Pattern(Cause.RANDOM_ID, re.compile(rb"(?<![A-Za-z0-9+/])[A-Za-z0-9+/]{16,256}={0,2}"), has_blanks=False),
    Pattern(Cause.COUNTER, re.compile(rb"(?<![\w.])\d+(?:[.,]\d+)*(?![\w])"), has_blanks=False),
)


def volatile_piece(sides: Sides) -> Spans | None:
    """The piece of a known kind at the place where two prompts part, in both of them; None if there
    is none.
    """
    new_part, old_part = sides.new_part, sides.old_part
    back = min(BEFORE_BYTES, sides.at - new_part.content, sides.old_at - old_part.content)
    if not sides.same_kind or back < 0:
        return None
    shift, old_shift = sides.at - back, sides.old_at - back
    new_window = sides.new[shift : min(new_part.end, sides.at + AFTER_BYTES)]
    old_window = sides.old[old_shift : min(old_part.end, sides.old_at + AFTER_BYTES)]
    has_digits = DIGIT.search(new_window) and DIGIT.search(old_window)
    for pattern in PATTERNS:
        if pattern.cause is not Cause.USER and not has_digits:
            continue
        start = 0 if pattern.has_blanks else new_window.rfind(b" ", 0, back) + 1
        for new_start, new_end in _around(pattern, new_window, start, back):
            for old_start, old_end in _around(pattern, old_window, start, back):
                pieces = new_window[new_start:new_end], old_window[old_start:old_end]
                if new_start == old_start and _fits(pattern.cause, *pieces):
                    return Spans(
                        pattern.cause, shift + new_start, shift + new_end, old_shift + old_start, old_shift + old_end
                    )
    return None


def _around(pattern: Pattern, window: bytes, begin: int, at: int) -> Iterator[tuple[int, int]]:
    for match in pattern.regex.finditer(window, begin):
        start, end = match.span(pattern.group)
        if start > at:
            return
        if at <= end:
            yield start, end


def _fits(cause: Cause, new: bytes, old: bytes) -> bool:
    """Whether two words are ids: as long as each other or prefixed alike, digits and letters mixed
    or far apart.
    """
    if cause is not Cause.RANDOM_ID:
        return True
    if new.isdigit() and old.isdigit():
        return len(new) == len(old) and abs(int(new) - int(old)) > FARTHEST_COUNT
    both = new + old
    if not (DIGIT.search(both) and re.search(rb"[A-Za-z]", both)):
        return False
    prefix = re.match(rb"[A-Za-z]{2,12}[_-]", new)
    return len(new) == len(old) or bool(prefix and old.startswith(prefix[0]) and min(len(new), len(old)) >= 8)


THINKING = re.compile(rb"<think(?:ing)?>.*?</think(?:ing)?>\s*", re.DOTALL)
LONGEST_TAG_BYTES = 12
LONGEST_JSON_BYTES = 256 << 10
MOST_BRACKETS = 4
BLANK = b" \t\r\n"
# Of text that is the same again after other text: how much must agree, and how far away it is
# looked for.
PROBE_BYTES = 48
REACH_BYTES = 16 << 10


def thinking(sides: Sides) -> Spans | None:
    """A differing <think>...</think>, or one in only one of the prompts."""
    if not sides.same_kind:
        return None
    new = _tagged(sides.new, sides.at, sides.new_part.start, sides.new_part.end)
    old = _tagged(sides.old, sides.old_at, sides.old_part.start, sides.old_part.end)
    if new is None and old is None:
        return None
    back = sides.at - new[0] if new else sides.old_at - old[0] if old else 0
    new_start, old_start = sides.at - back, sides.old_at - back
    return Spans(Cause.REASONING, new_start, new[1] if new else new_start, old_start, old[1] if old else old_start)


def _tagged(text: bytes, at: int, start: int, end: int) -> tuple[int, int] | None:
    """The tagged passage around a byte, or from it on."""
    opened = max(text.rfind(b"<think", start, min(at + LONGEST_TAG_BYTES, end)), start)
    found = THINKING.match(text, opened, end)
    return found.span() if found and found.start() <= at < found.end() else None


def json_form(sides: Sides) -> Spans | None:
    """The same JSON value, written in another way: order of keys, white space."""
    new, old = sides.new_part, sides.old_part
    if not sides.same_kind or max(len(new.text), len(old.text)) > LONGEST_JSON_BYTES:
        return None
    opened = [found.start() for found in re.finditer(rb"[{\[]", sides.new[new.start : sides.at])]
    for offset in dict.fromkeys(opened[:MOST_BRACKETS] + opened[-MOST_BRACKETS:]):
        start, old_start = new.start + offset, sides.old_at - (sides.at - new.start - offset)
        a, b = _value(sides.new[start : new.end]), _value(sides.old[old_start : old.end])
        if a is not None and b is not None and a[0] == b[0] and start + a[1] > sides.at:
            return Spans(Cause.JSON_FORM, start, start + a[1], old_start, old_start + b[1])
    return None


def _value(text: bytes) -> tuple[object, int] | None:
    """A JSON value at the front of a text, and its length in bytes."""
    characters = text.decode("utf-8", "replace")
    try:
        value, end = json.JSONDecoder().raw_decode(characters)
    except (ValueError, RecursionError):
        return None
    return value, len(characters[:end].encode())


def white_space(sides: Sides) -> Spans | None:
    """More, less or other white space, with the same text after it."""
    back = 0
    while back < min(sides.at, sides.old_at) and sides.new[sides.at - back - 1] in BLANK:
        back += 1
    start, old_start = sides.at - back, sides.old_at - back
    new_end, old_end = _after_blank(sides.new, start), _after_blank(sides.old, old_start)
    differs = sides.new[start:new_end] != sides.old[old_start:old_end]
    goes_on = _word(sides.new, new_end) == _word(sides.old, old_end)
    return Spans(Cause.WHITE_SPACE, start, new_end, old_start, old_end) if differs and goes_on else None


def _word(text: bytes, at: int) -> list[bytes]:
    return text[at : at + 8].split(None, 1)[:1]


def _after_blank(text: bytes, at: int) -> int:
    while at < len(text) and text[at] in BLANK:
        at += 1
    return at


def moved(sides: Sides) -> Spans | None:
    """The same paragraphs (or lines) in another order."""
    if not sides.same_kind:
        return None
    for separator in (b"\n\n", b"\n"):
        found = sides.new.rfind(separator, sides.new_part.start, sides.at)
        start = found + len(separator) if found >= 0 else sides.new_part.content
        old_start = sides.old_at - (sides.at - start)
        new, old = sides.new[start : sides.new_part.end], sides.old[old_start : sides.old_part.end]
        passages, old_passages = new.split(separator), old.split(separator)
        if count := permuted(passages, old_passages):
            sizes = [list(accumulate(len(one) + len(separator) for one in each)) for each in (passages, old_passages)]
            ends = [size[count - 1] - len(separator) for size in sizes]
            return Spans(Cause.MOVED_PASSAGES, start, start + ends[0], old_start, old_start + ends[1])
    return None


def other_text(sides: Sides) -> Spans | None:
    """Other text, up to where the prompts are the same again; None if they are not."""
    new, old, at, old_at = sides.new, sides.old, sides.at, sides.old_at
    ahead = 0
    while at + ahead + PROBE_BYTES <= len(new) and ahead <= REACH_BYTES:
        probe = at + ahead
        found = old.find(new[probe : probe + PROBE_BYTES], old_at, old_at + REACH_BYTES)
        if found >= 0:
            while probe > at and found > old_at and new[probe - 1] == old[found - 1]:
                probe, found = probe - 1, found - 1
            return Spans(_place_cause(sides), at, probe, old_at, found)
        ahead = ahead * 2 if ahead else 16
    return None


def _place_cause(sides: Sides) -> Cause:
    part = sides.new_part
    if part.kind == SYSTEM:
        return Cause.SYSTEM
    if part.kind == TOOL:
        return Cause.TOOL_SET
    is_last = part.number == sides.new_parts[-1].number
    return Cause.CONTEXT if not part.kind or (part.kind == USER and is_last) else Cause.HISTORY
