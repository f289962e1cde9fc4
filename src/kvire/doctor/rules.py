"""Tokens that a provider's cache gives back by its rules (lengths, steps, times to live,
breakpoints), and the money that saves.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from kvire.core.errors import ConfigError
from kvire.doctor.prompt import CALL, PART, RESULT, SETTINGS, LoggedPrompt
from kvire.doctor.tokens import Ruler
from kvire.doctor.tree import TreeStep
from kvire.plan.prices import MILLION, Price, PriceTable

# Anthropic looks at so many positions for an earlier entry, the breakpoint itself first; a run of
# tool calls is one position, and so is a run of their results (its prompt caching guide).
LOOKBACK_POSITIONS = 20
MARKS = re.compile(PART + rb"(.)", re.DOTALL)
RUNS = (CALL, RESULT)
HOUR_S = 3600


@dataclass(frozen=True, slots=True)
class CacheRules:
    """When a cache gives back a prefix.

    min_tokens: a shorter prefix is not cached.
    step_tokens: a hit is a multiple of this.
    ttl_s: life of an entry after its last use.
    explicit: only prefixes that end at a breakpoint are cached.
    """

    min_tokens: int
    step_tokens: int
    ttl_s: float
    explicit: bool = False

    def whole_steps(self, tokens: int) -> int:
        """Length of a prefix, cut to whole steps; 0 if it is too short."""
        return tokens - tokens % self.step_tokens if tokens >= self.min_tokens else 0


class Written(NamedTuple):
    """Tokens written into a cache, by how long they live there.

    Changes by a mended cause: so many more.
    """

    five_minutes: int = 0
    hour: int = 0

    def plus(self, other: "Written") -> "Written":
        """Both together."""
        return Written(self.five_minutes + other.five_minutes, self.hour + other.hour)


class ReuseRules(NamedTuple):
    """Tokens of one prompt: given back by a cache, and lost, by the reason.

    written: where writing is priced; where breakpoints are assumed, by the earlier prompt that this
        one finds.
    marks_too_little: whether it has breakpoints, but none ends enough for a cache.
    """

    tokens: int
    too_old: int
    no_breakpoint: int
    too_short: int
    partial_step: int
    written: Written
    marks_too_little: bool = False


def reuse(
    rules: CacheRules, steps: Sequence[TreeStep], prompt: LoggedPrompt, ruler: Ruler, now_s: float | None
) -> ReuseRules:
    """Tokens of a prompt in a cache with these rules.

    now_s: None where times are not known: nothing expires.
    """
    shared = _shared_tokens(ruler, steps[-1].end if steps else 0)
    written, marks_too_little = Written(), False
    if rules.explicit and prompt.breakpoints is not None:
        ever, alive = _entries(steps, prompt, now_s)
        in_reach, fresh = _shared_tokens(ruler, ever), _shared_tokens(ruler, alive)
        too_old, no_breakpoint = in_reach - fresh, shared - in_reach
        written = _written(rules, prompt, ruler, ruler.before(alive) if rules.whole_steps(fresh) else 0)
        marks_too_little = bool(prompt.breakpoints) and not _marked(rules, prompt, ruler, 0)
    else:
        # A prompt through a step went through all before it: the last fresh one has only fresh ones
        # before it.
        end = next((step.end for step in reversed(steps) if _is_fresh(step.used_s, now_s, rules.ttl_s)), 0)
        young = _shared_tokens(ruler, end)
        fresh = _shared_tokens(ruler, whole_parts(prompt.text, end)) if rules.explicit else young
        too_old, no_breakpoint = shared - young, young - fresh
    tokens = rules.whole_steps(fresh)
    if rules.explicit and prompt.breakpoints is None:
        written = Written(tokens - min(tokens, _read_before(rules, steps, prompt, ruler, now_s)))
    too_short = fresh if fresh < rules.min_tokens else 0
    return ReuseRules(tokens, too_old, no_breakpoint, too_short, fresh - tokens - too_short, written, marks_too_little)


def reuse_after_fix(
    rules: CacheRules,
    prompt: LoggedPrompt,
    tokens: int,
    reached: int,
    lost_bytes: int,
    ruler: Ruler,
    age_s: float | None,
) -> int:
    """Tokens given back if a prompt shared `tokens` tokens with the closest earlier one, last used
    `age_s` seconds ago.

    reached: end of their then common part, in the prompt.
    lost_bytes: differing bytes before that place.
    """
    marked = rules.explicit and prompt.breakpoints is not None
    if not marked and not _is_fresh(0.0, age_s, rules.ttl_s):
        return 0
    if rules.explicit:
        if prompt.breakpoints is None:
            end = whole_parts(prompt.text, reached)
        else:
            end = max(
                (at for at, ttl_s in prompt.breakpoints if at <= reached and _is_fresh(0.0, age_s, ttl_s)), default=0
            )
        tokens = max(0, min(tokens, ruler.before(end) - ruler.before(lost_bytes)))
    return rules.whole_steps(min(tokens, ruler.tokens - 1))


def written_after_fix(
    rules: CacheRules, prompt: LoggedPrompt, before: int, after: int, ruler: Ruler, *, is_first: bool
) -> Written:
    """Additional tokens written if a cache gives back `after` tokens of a prompt instead of
    `before`.

    Where the prompt's breakpoints had them written, so many fewer. Where breakpoints are assumed,
    only what is found again is written: these tokens once, for the first prompt that finds them.
    """
    if not rules.explicit:
        return Written()
    if prompt.breakpoints is None:
        return Written(after - before if is_first else 0)
    hour = max(0, min(after, _marked(rules, prompt, ruler, HOUR_S)) - before)
    return Written(hour - (after - before), -hour)


def entries_written(steps: Sequence[TreeStep], prompt: LoggedPrompt, now_s: float | None) -> list[tuple[int, int]]:
    """Cache entries of a request with breakpoints: ends in bytes and seconds to live; 0 for entries
    it read.
    """
    entries = dict(prompt.breakpoints or ())
    _, read = _entries(steps, prompt, now_s)
    if read and read not in entries:
        entries[read] = 0
    return sorted(entries.items())


def whole_parts(text: bytes, end: int) -> int:
    """The last end of a part at or before `end`: where a breakpoint can stand.

    A plain prompt has any.
    """
    if end >= len(text) or not text.startswith(PART):
        return end
    return max(text.rfind(PART, 0, end + 1), 0)


def _written(rules: CacheRules, prompt: LoggedPrompt, ruler: Ruler, read: int) -> Written:
    """Tokens written by a prompt with `read` tokens found: to the last mark for an hour, then to
    the last mark.

    As Anthropic bills mixed lifetimes (its prompt caching guide). A prefix below the minimum is not
    written.
    """
    hour, last = (_marked(rules, prompt, ruler, ttl_s) for ttl_s in (HOUR_S, 0))
    return Written(max(0, last - max(hour, read)), max(0, hour - read))


def _marked(rules: CacheRules, prompt: LoggedPrompt, ruler: Ruler, least_s: int) -> int:
    """Tokens up to the last breakpoint that lives at least `least_s`; 0 if there is none, or
    they are too few for a cache.
    """
    marked = max((at for at, ttl_s in (prompt.breakpoints or ()) if ttl_s >= least_s), default=0)
    tokens = ruler.before(marked)
    return tokens if tokens >= rules.min_tokens else 0


def _read_before(
    rules: CacheRules, steps: Sequence[TreeStep], prompt: LoggedPrompt, ruler: Ruler, now_s: float | None
) -> int:
    """With assumed breakpoints: tokens found, so not written, by the last prompt on this way."""
    end = 0
    for step in steps:
        before_s, then_s = step.used_before_s, None if now_s is None else step.used_s
        if before_s is None or not _is_fresh(step.used_s, now_s, rules.ttl_s):
            break  # nobody came by twice from here on, or too long ago
        if _is_fresh(before_s, then_s, rules.ttl_s):
            end = step.end
    return rules.whole_steps(_shared_tokens(ruler, whole_parts(prompt.text, end)))


def _entries(steps: Sequence[TreeStep], prompt: LoggedPrompt, now_s: float | None) -> tuple[int, int]:
    """Longest prefix with an entry within reach of a breakpoint: of all entries, and of the living
    ones.
    """
    written = alive = 0
    ends = [end for end, _ in prompt.breakpoints or ()]
    for step in steps:
        if not step.kept_until_s:
            continue
        looked_at = any(step.end <= end and _positions(prompt.text, step.end, end) < LOOKBACK_POSITIONS for end in ends)
        if looked_at:
            written = step.end
            if now_s is None or step.kept_until_s >= now_s:
                alive = step.end
    return written, alive


def _positions(text: bytes, start: int, end: int) -> int:
    """Steps from one end of a block back to another."""
    count = text.count(PART, start, end)
    if count < LOOKBACK_POSITIONS:
        return count
    kinds = [mark.decode("ascii", "replace").upper() for mark in MARKS.findall(text, start, end)]
    return sum(kind != SETTINGS and not (kind in RUNS and kind == before) for before, kind in pairwise(["", *kinds]))


def _is_fresh(used_s: float, now_s: float | None, ttl_s: float) -> bool:
    return now_s is None or now_s - used_s <= ttl_s


def _shared_tokens(ruler: Ruler, end: int) -> int:
    """At least the last token of a prompt is always computed."""
    return max(0, min(ruler.before(end), ruler.tokens - 1))


@dataclass(frozen=True, slots=True)
class CacheOffer:
    """A model's price, and the index of its cache's rules in CacheOffers.rules.

    in_log: whether the log asks for it.
    """

    price: Price
    rules: int
    in_log: bool

    def saved_usd(self, found_tokens: int, written: Written) -> float:
        """Savings against no cache: the discount on found tokens, less the surcharge on written
        ones.

        Below 0 where too few of the written tokens are found again.
        """
        price = self.price
        found = found_tokens * (price.input - price.cached_input)
        short, hour = (price.cache_write.get(ttl, price.input) - price.input for ttl in ("5m", "1h"))
        return (found - written.five_minutes * short - written.hour * hour) / MILLION


class CacheOffers:
    """All prices of a table with their distinct cache rules."""

    def __init__(self, table: PriceTable) -> None:
        self.table = table
        self.rules = list(dict.fromkeys(map(rules_of, table.prices)))

    def choose(self, models: Iterable[str], wanted: Sequence[str] = ()) -> list[CacheOffer]:
        """The log's priced models, then the first model of each other provider; or the wanted ones,
        by name.

        Raises ConfigError if a wanted one has no price.
        """
        asked = [price for price in self.table.prices if any(_is_named(price.model, model) for model in models)]
        if wanted:
            chosen = [self.table.find(name) for name in wanted]
        else:
            chosen = list(asked)
            for price in self.table.prices:
                if price.provider not in {one.provider for one in chosen}:
                    chosen.append(price)
        return [CacheOffer(price, self.rules.index(rules_of(price)), price in asked) for price in chosen]

    def check(self, wanted: Sequence[str]) -> None:
        """Raises ConfigError, before any work, if a name has no price."""
        for name in wanted:
            try:
                self.table.find(name)
            except ConfigError as error:
                raise ConfigError(f"--price: {error}") from error


def rules_of(price: Price) -> CacheRules:
    """The rules of a model's cache.

    Where writing is priced, it happens only where a breakpoint asks for it.
    """
    return CacheRules(price.minimum_tokens, price.step_tokens, price.ttl_s, explicit=bool(price.cache_write))


def _is_named(priced: str, logged: str) -> bool:
    """Whether a log's model name means a priced model: a vendor's or region's prefix, a date,
    dashes for dots and Bedrock's version may differ.
    """
    plain = re.sub(r"^(?:[a-z-]+\.)?(?:anthropic|amazon|meta)\.", "", logged.rsplit("/", 1)[-1].lower())
    plain = re.sub(r"-v\d+(?::\d+)*$", "", plain)
    plain = re.sub(r"[-@](?:20\d{6}|20\d\d-\d\d-\d\d|latest)$", "", plain)
    return plain.replace(".", "-") == priced.replace(".", "-")
