"""Small pieces of text that change from request to request: times, ids, counters, names."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from kvire.doctor.causes import Cause
from kvire.doctor.sides import Sides

BEFORE_BYTES, AFTER_BYTES = 64, 140  # of the place where two prompts part, what is looked at
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
    """How a kind of piece looks. group: the piece itself. has_blanks: whether there may be blanks in it."""

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


class Spans(NamedTuple):
    """A differing piece: where it begins and ends in the new prompt and in the old one."""

    cause: Cause
    new_start: int
    new_end: int
    old_start: int
    old_end: int


def volatile_piece(sides: Sides) -> Spans | None:
    """The piece of a known kind that both prompts have where they part, alike up to there; None if there is none."""
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
    """Whether two words are ids: as long as each other or prefixed alike, digits and letters mixed or far apart."""
    if cause is not Cause.RANDOM_ID:
        return True
    if new.isdigit() and old.isdigit():
        return len(new) == len(old) and abs(int(new) - int(old)) > FARTHEST_COUNT
    both = new + old
    if not (DIGIT.search(both) and re.search(rb"[A-Za-z]", both)):
        return False
    prefix = re.match(rb"[A-Za-z]{2,12}[_-]", new)
    return len(new) == len(old) or bool(prefix and old.startswith(prefix[0]) and min(len(new), len(old)) >= 8)
