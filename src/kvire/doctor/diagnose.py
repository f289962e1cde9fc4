"""The examination: compares each request, in the log's order, with all earlier ones."""

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from kvire.doctor.findings import Cause, Diagnosis, Example, Finding, MeasuredLog, Refused, RuleTotals, Totals
from kvire.doctor.likeness import (
    LEAST_GAIN_BYTES,
    LEAST_OVERLAP,
    ONE_IN,
    Difference,
    Likeness,
    PassageIndex,
    TextPiece,
    likeness,
)
from kvire.doctor.prompt import BEFORE_MESSAGES, KIND_NAMES, PART, TOOL, PromptPart
from kvire.doctor.reading.logs import Item, LoggedRequest, LoggedUsage, Malformed
from kvire.doctor.reading.usage import TokenUsage
from kvire.doctor.rules import (
    CacheRules,
    Written,
    entries_written,
    reuse,
    reuse_after_fix,
    written_after_fix,
)
from kvire.doctor.tokens import Counter, Ruler
from kvire.doctor.tree import Match, Node, PrefixTree

MEMORY_BYTES = 200 << 20
MOST_SCOPES = 8
# If no sampled passage of a text so long was seen before, then it is another text, and no use
# comparing it as one.
LONG_TEXT_BYTES = 16 * ONE_IN
FIRST_MALFORMED = 10
MARK = re.compile(PART + b".", re.DOTALL)


class Doctor:
    """Takes a log request by request.

    rules: of providers to reckon with.
    memory_bytes: for earlier prompts.
    """

    def __init__(self, rules: Sequence[CacheRules], counter: Counter, memory_bytes: int = MEMORY_BYTES) -> None:
        self._totals = Totals()
        self._by_rules = [RuleTotals(one) for one in rules]
        self._findings: dict[tuple[tuple[Cause, ...], str], Finding] = {}
        self._counter = counter
        self._memory_bytes = memory_bytes
        self._tree = PrefixTree(memory_bytes)
        self._passages = PassageIndex()
        self._logs: list[tuple[int, str]] = []  # prompts before each log, and its name
        self._counted: dict[str, TokenUsage] = {}  # of answers whose prompts are in no log, by the answer

    def examine(self, log: Iterable[Item], name: str = "") -> "Doctor":
        """Examine a whole log. Several logs in a row make one history, in which their names tell
        lines apart.
        """
        self._logs.append((self._tree.turns, name))
        for item in log:
            if isinstance(item, Malformed):
                self._totals.malformed += 1
                if len(self._totals.malformed_first) < FIRST_MALFORMED:
                    self._totals.malformed_first.append((name, item.line, item.reason))
            elif isinstance(item, LoggedUsage):
                self._counted[item.answer] = item.usage
            elif item.incomplete:
                self._totals.incomplete += 1
            else:
                self._examine(item)
        return self

    def diagnosis(self) -> Diagnosis:
        """Findings and totals so far."""
        self._totals.without_prompt = MeasuredLog()
        for usage in self._counted.values():
            self._totals.without_prompt.add(usage)
        findings = sorted(self._findings.values(), key=lambda finding: (-finding.tokens, finding.causes, finding.where))
        return Diagnosis(
            self._totals,
            self._by_rules,
            findings,
            self._counter.method(),
            self._tree.forgotten_bytes,
            self._memory_bytes,
        )

    def _examine(self, request: LoggedRequest) -> None:
        ruler = self._counter.ruler(request)
        text = request.prompt.text
        now_s = request.sent_s
        at_s = now_s if now_s is not None else self._totals.last_s or 0.0
        match = self._tree.observe(request.model, text, at_s, request.line)
        shared = max(0, min(ruler.before(match.depth), ruler.tokens - 1))
        self._count(request, ruler, shared)
        reused = []
        for totals in self._by_rules:
            got = reuse(totals.rules, match.steps, request.prompt, ruler, now_s)
            totals.add(got)
            reused.append(got.tokens)
        if request.prompt.breakpoints:
            entries = entries_written(match.steps, request.prompt, now_s)
            self._tree.keep_until(match.node, entries, at_s)
        if match.depth < len(text):
            self._look_for_causes(request, ruler, match, reused)

    def _count(self, request: LoggedRequest, ruler: Ruler, shared_tokens: int) -> None:
        totals = self._totals
        totals.requests += 1
        totals.prompt_tokens += ruler.tokens
        totals.prompt_bytes += len(request.prompt.text)
        totals.ideal_tokens += shared_tokens
        totals.media += request.prompt.media
        totals.apis[request.api] = totals.apis.get(request.api, 0) + 1
        totals.models[request.model] = totals.models.get(request.model, 0) + 1
        if request.sent_s is not None:
            totals.timed += 1
            totals.backwards += totals.last_s is not None and request.sent_s < totals.last_s
            totals.first_s = min(request.sent_s, request.sent_s if totals.first_s is None else totals.first_s)
            totals.latest_s = max(request.sent_s, request.sent_s if totals.latest_s is None else totals.latest_s)
            totals.last_s = request.sent_s
        if (breakpoints := request.prompt.breakpoints) is not None:
            totals.with_breakpoints_api += 1
            totals.without_breakpoint += not breakpoints and request.prompt.refused_for is None
        if (reason := request.prompt.refused_for) is not None:
            totals.refused.setdefault(reason, Refused(self._logs[-1][1], request.line)).requests += 1
        if request.usage is not None and request.usage.cached_tokens is not None:
            totals.measured.add(request.usage, shared_tokens)

    def _look_for_causes(self, request: LoggedRequest, ruler: Ruler, match: Match, reused: list[int]) -> None:
        text, depth = request.prompt.text, match.depth
        if (other := self._in_other_scope(request, depth)) is not None:
            self._note_model(request, ruler, match, other, reused)
            return
        rest = text[depth:]
        best: Likeness | None = None
        near = self._passages.closest(request.model, rest, match.node)
        is_foreign = near is None and len(rest) >= LONG_TEXT_BYTES
        for candidate in (near.latest(match.node.turn) if near is not None else None, match.beside):
            if candidate is None or (best is not None and candidate is best.node):
                continue
            like = likeness(text, depth, candidate, is_foreign=is_foreign)
            if best is None or like.gain_bytes > best.gain_bytes:
                best = like
            if best.gain_bytes >= LEAST_OVERLAP * len(rest):
                break
        if best is not None:
            self._note(request, ruler, match, best, reused)

    def _note(self, request: LoggedRequest, ruler: Ruler, match: Match, like: Likeness, reused: list[int]) -> None:
        """Add one prompt's losses to the findings, difference by difference."""
        age_s = None if request.sent_s is None else request.sent_s - like.node.used_s
        known, cached = ruler.before(match.depth), list(reused)
        tokens, differing = ruler.before(like.shared_bytes), 0
        counted: set[int] = set()
        for difference in like.differences:
            for piece in difference.pieces:
                end = piece.same_end
                differing += piece.same_start - piece.spans.new_start
                tokens += ruler.before(end) - ruler.before(piece.same_start)
            tokens = min(tokens, ruler.tokens - 1)  # at least the last token is always computed
            finding = self._finding(request, ruler, like, difference)
            finding.tokens += max(0, tokens - known)
            known = max(known, tokens)
            for i, totals in enumerate(self._by_rules):
                after = reuse_after_fix(totals.rules, request.prompt, tokens, end, differing, ruler, age_s)
                self._credit(finding, i, request, ruler, like.node, (cached[i], after))
                cached[i] = max(cached[i], after)
            if id(finding) not in counted:
                finding.requests += 1
                counted.add(id(finding))
        self._mark_mended(like.node, match.node, reused, cached)

    def _credit(
        self, finding: Finding, i: int, request: LoggedRequest, ruler: Ruler, old: Node, found: tuple[int, int]
    ) -> None:
        """Credit a mended cause by one provider's rules.

        found: tokens found before and after.
        old: end of the found prompt.
        """
        before, after = found
        if after > before:
            is_first = not old.mended_on_the_way() >> i & 1
            more = written_after_fix(self._by_rules[i].rules, request.prompt, before, after, ruler, is_first=is_first)
            finding.by_rules[i] += after - before
            finding.written[i] = finding.written[i].plus(more)

    def _mark_mended(self, old: Node, new: Node, before: list[int], after: list[int]) -> None:
        """Once the causes are mended, both prompts are in the caches by whose rules more is found
        than before.
        """
        gained = sum(1 << i for i, (was, now) in enumerate(zip(before, after, strict=True)) if now > was)
        old.mended |= gained
        new.mended |= gained

    def _finding(self, request: LoggedRequest, ruler: Ruler, like: Likeness, difference: Difference) -> Finding:
        piece = difference.pieces[0]
        key = (difference.causes, _where(piece.part))
        token = ruler.before(piece.spans.new_start)
        finding = self._findings.get(key)
        if finding is None:
            example = self._example(request, like.node, piece, token)
            finding = self._findings[key] = self._new_finding(key, example)
            finding.first_token = token
        finding.first_token = min(finding.first_token, token)
        finding.last_token = max(finding.last_token, token)
        return finding

    def _new_finding(self, key: tuple[tuple[Cause, ...], str], example: Example) -> Finding:
        rules = len(self._by_rules)
        return Finding(*key, example, by_rules=[0] * rules, written=[Written()] * rules)

    def _example(self, request: LoggedRequest, old: Node, piece: TextPiece, token: int) -> Example:
        spans, part = piece.spans, piece.part
        before = part.text[: max(0, spans.new_start - part.content)].decode("utf-8", "replace")
        return Example(
            self._logs[-1][1],
            request.line,
            self._log_of(old),
            old.line,
            part.place,
            len(before),
            token,
            _readable(request.prompt.text[spans.new_start : spans.new_end]),
            _readable(old.text()[spans.old_start : spans.old_end]),
        )

    def _log_of(self, node: Node) -> str:
        return self._logs[bisect_left(self._logs, node.turn, key=lambda log: log[0]) - 1][1]

    def _in_other_scope(self, request: LoggedRequest, depth: int) -> tuple[str, int, Node] | None:
        """Another model with most of this prompt, if its own has little: name, bytes, node."""
        least = depth + max(LEAST_GAIN_BYTES, LEAST_OVERLAP * (len(request.prompt.text) - depth))
        scopes = self._tree.scopes()[:MOST_SCOPES]
        if len(scopes) < 2:
            return None
        for scope in scopes:
            if scope != request.model:
                known, node = self._tree.depth(scope, request.prompt.text)
                if known >= least and node is not None:
                    return scope, known, node
        return None

    def _note_model(
        self, request: LoggedRequest, ruler: Ruler, match: Match, other: tuple[str, int, Node], reused: list[int]
    ) -> None:
        scope, known, node = other
        key = ((Cause.MODEL,), "model")
        finding = self._findings.get(key)
        if finding is None:
            here, there = self._logs[-1][1], self._log_of(node)
            example = Example(here, request.line, there, node.line, "model", 0, 0, request.model, scope)
            finding = self._findings[key] = self._new_finding(key, example)
        age_s = None if request.sent_s is None else request.sent_s - node.used_s
        tokens = min(ruler.before(known), ruler.tokens - 1)
        finding.requests += 1
        finding.tokens += max(0, tokens - ruler.before(match.depth))
        cached = list(reused)
        for i, totals in enumerate(self._by_rules):
            after = reuse_after_fix(totals.rules, request.prompt, tokens, known, 0, ruler, age_s)
            self._credit(finding, i, request, ruler, node, (reused[i], after))
            cached[i] = max(reused[i], after)
        self._mark_mended(node, match.node, reused, cached)


def _where(part: PromptPart) -> str:
    if part.kind == TOOL:
        return "tools"
    if part.kind in BEFORE_MESSAGES or not part.kind:
        return KIND_NAMES.get(part.kind, "prompt")
    return f"messages ({KIND_NAMES.get(part.kind, 'text')})"


def _readable(piece: bytes) -> str:
    """Without the marks of parts."""
    return MARK.sub(b"\n", piece).removeprefix(b"\n").decode("utf-8", "replace")
