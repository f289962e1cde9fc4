"""Joining operations that have a kernel together, and leaving out what nobody reads.

Patterns are found by structure, not by the names of classes: whatever computes a root mean square
norm in torch's operations becomes one.
"""

from collections.abc import Iterator
from dataclasses import replace

from kvire.step.lower import Lowered
from kvire.step.rows import Constant, Op, RowValue, View

GATED = {"silu": "silu_times", "gelu_tanh": "gelu_tanh_times", "gelu_erf": "gelu_erf_times"}


def fuse(lowered: Lowered) -> Lowered:
    """The same numbers, but for the order of a few roundings, in fewer operations."""
    ops = _without_unread(_select_early(lowered.ops), lowered.logits)
    makers = _makers(ops)
    fused = [_norm(op, makers) or _rotary(op, makers) or _gated(op, makers) or op for op in ops]
    return replace(lowered, ops=_without_unread(fused, lowered.logits))


def _makers(ops: list[Op]) -> dict[RowValue, list[Op]]:
    makers: dict[RowValue, list[Op]] = {}
    for op in ops:
        if op.out is not None:
            assert isinstance(op.out.source, RowValue)
            makers.setdefault(op.out.source, []).append(op)
    return makers


def _maker(view: View, makers: dict[RowValue, list[Op]], kind: str) -> Op | None:
    """The one operation of this kind that makes exactly the numbers of a view."""
    if not isinstance(view.source, RowValue) or view.is_selected or view.offset:
        return None
    made = makers.get(view.source, [])
    return made[0] if len(made) == 1 and made[0].kind == kind else None


def _without_unread(ops: list[Op], logits: View) -> list[Op]:
    read = {logits.source}
    kept: list[Op] = []
    for op in reversed(ops):
        if op.kind == "write_kv" or (op.out is not None and op.out.source in read):
            kept.append(op)
            read |= {view.source for view in op.sources}
    return kept[::-1]


# --- root mean square norms -----------------------------------------------------------------------


def _norm(op: Op, makers: dict[RowValue, list[Op]]) -> Op | None:
    """Weight * (x * inverse_root(mean(square(x)) + epsilon)), or the same without a weight."""
    for y, weight in _either_way(op, "multiply"):
        if not isinstance(weight.source, Constant) or (inner := _maker(y, makers, "multiply")) is None:
            continue
        if (found := _plain_norm(inner, makers)) is not None and y.shape == inner.shape:
            x, epsilon = found
            return replace(op, kind="rms_norm", sources=(x, weight), numbers=(epsilon, 0.0))
    if (found := _plain_norm(op, makers)) is not None:
        x, epsilon = found
        return replace(op, kind="rms_norm", sources=(x,), numbers=(epsilon, 0.0))
    return None


def _plain_norm(op: Op, makers: dict[RowValue, list[Op]]) -> tuple[View, float] | None:
    """(x, epsilon) of x * inverse_root(mean(square(x)) + epsilon)."""
    for x, factor in _either_way(op, "multiply"):
        if (root := _maker(factor, makers, "inverse_root")) is None:
            continue
        if (added := _maker(root.sources[0], makers, "add")) is None:
            continue
        mean, epsilon = added.sources
        if not isinstance(epsilon.source, Constant) or epsilon.source.numbers.numel() != 1:
            continue
        if (summed := _maker(mean, makers, "mean")) is None:
            continue
        squared = _maker(summed.sources[0], makers, "square")
        if squared is not None and squared.sources[0] == x and summed.shape == op.shape:
            return x, float(epsilon.source.numbers)
    return None


# --- rotary positions -----------------------------------------------------------------------------


def _rotary(op: Op, makers: dict[RowValue, list[Op]]) -> Op | None:
    """X * cos + cat(-second half of x, first half of x) * sin."""
    for straight, turned in _either_way(op, "add"):
        by_cos, by_sin = _maker(straight, makers, "multiply"), _maker(turned, makers, "multiply")
        if by_cos is None or by_sin is None:
            continue
        for x, cos in _either_way(by_cos, "multiply"):
            for swapped, sin in _either_way(by_sin, "multiply"):
                if cos.shape == sin.shape == x.shape and _is_turned(swapped, x, makers):
                    return replace(op, kind="rotary", sources=(x, cos, sin))
    return None


def _is_turned(swapped: View, x: View, makers: dict[RowValue, list[Op]]) -> bool:
    if not isinstance(swapped.source, RowValue) or swapped.offset or swapped.is_selected or swapped.shape != x.shape:
        return False
    parts = makers.get(swapped.source, [])
    if len(parts) != 2 or any(part.kind != "copy" for part in parts) or x.shape[-1] % 2:
        return False
    half = x.shape[-1] // 2
    shape = (*x.shape[:-1], half)
    first, second = sorted(parts, key=lambda part: part.out.offset if part.out else 0)
    assert first.out is not None and second.out is not None
    if (first.out.offset, second.out.offset) != (0, half) or first.shape != shape or second.shape != shape:
        return False
    negative = _maker(first.sources[0], makers, "negative")
    upper = replace(x, shape=shape, offset=x.offset + half * x.strides[-1])
    return negative is not None and negative.sources[0] == upper and second.sources[0] == replace(x, shape=shape)


# --- activations that are multiplied --------------------------------------------------------------


def _gated(op: Op, makers: dict[RowValue, list[Op]]) -> Op | None:
    for active, other in _either_way(op, "multiply"):
        for kind, joined in GATED.items():
            maker = _maker(active, makers, kind)
            if maker is not None and maker.shape == op.shape:
                return replace(op, kind=joined, sources=(maker.sources[0], other))
    return None


def _either_way(op: Op, kind: str) -> Iterator[tuple[View, View]]:
    if op.kind == kind:
        first, second = op.sources
        yield first, second
        yield second, first


# --- only wanted rows behind the last attention ---------------------------------------------------


def _select_early(ops: list[Op]) -> list[Op]:
    """Behind the last attention, rows whose logits nobody wants are not computed.

    A selected view of a value that no attention needs becomes a view of the same value of the
    wanted rows, and so on backwards, up to what attention makes or needs.
    """
    selection = _Selection(_makers(ops), _needed_by_attention(ops))
    for op in ops:
        sources = tuple(selection.of(view) if view.is_selected else view for view in op.sources)
        selection.ops.append(replace(op, sources=sources))
    return selection.ops


class _Selection:
    """Copies of operations for wanted rows alone, each put before its first use."""

    def __init__(self, makers: dict[RowValue, list[Op]], needed: set[RowValue]) -> None:
        self.ops: list[Op] = []
        self._makers, self._needed = makers, needed
        self._copies: dict[RowValue, RowValue] = {}

    def of(self, view: View) -> View:
        """The wanted rows of a view."""
        source = view.source
        if not isinstance(source, RowValue) or source.is_wanted:
            return view
        if source in self._needed or any(op.kind in {"attend", "embed"} for op in self._makers[source]):
            return replace(view, is_selected=True)
        if source not in self._copies:
            copy = self._copies[source] = RowValue(source.width, is_wanted=True)
            for op in self._makers[source]:
                assert op.out is not None
                sources = tuple(map(self.of, op.sources))
                self.ops.append(replace(op, out=replace(op.out, source=copy), sources=sources))
        return replace(view, source=self._copies[source], is_selected=False)


def _needed_by_attention(ops: list[Op]) -> set[RowValue]:
    needed: set[RowValue] = set()
    for op in reversed(ops):
        if op.kind in {"attend", "write_kv"} or (op.out is not None and op.out.source in needed):
            needed |= {view.source for view in op.sources if isinstance(view.source, RowValue)}
    return needed
