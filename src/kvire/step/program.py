"""Ordering operations into stages, and handing them to the C++ program.

A stage of rows takes every operation whose operands are there; then come the products whose rows
are, then attention. Values that one stage alone needs live in a worker's scratch memory; of the
others, those that are done with give their memory to later ones.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvire.cache.paged import PagedKV
from kvire.core.dtypes import KV_DTYPES
from kvire.core.native import native_module
from kvire.step.lower import Lowered
from kvire.step.record import NotRecordableError
from kvire.step.rows import MOST_DIMENSIONS, REDUCTIONS, ROW_KINDS, Constant, Op, Position, RowValue, View, whole

VALUE, CONSTANT, POSITION, SELECTED, SCRATCH = range(5)
OPERATION, EMBED, QUANTISE, WRITE_KV = range(4)
NOTHING = [0, 0, 0]


@dataclass(slots=True)
class Stage:
    """kind: rows, linear or attend. ops: in order."""

    kind: str
    is_wanted: bool
    ops: list[Op] = field(default_factory=list)


def staged(lowered: Lowered) -> list[Stage]:
    """The operations in stages, each of which needs only earlier ones."""
    left, stages = list(lowered.ops), []
    unmade: dict[RowValue, int] = {}  # operations that have yet to write a part of a value
    for op in left:
        if op.out is not None and isinstance(op.out.source, RowValue):
            unmade[op.out.source] = unmade.get(op.out.source, 0) + 1

    def take(stage: Stage, suits: Callable[[Op], bool]) -> bool:
        """Move what is ready into the stage; whether anything was."""
        ready = [
            op
            for op in left
            if suits(op)
            and op.is_wanted == stage.is_wanted
            and not any(isinstance(view.source, RowValue) and unmade[view.source] for view in op.sources)
        ]
        for op in ready:
            left.remove(op)
            if op.out is not None and isinstance(op.out.source, RowValue):
                unmade[op.out.source] -= 1
        stage.ops += ready
        return bool(ready)

    while left:
        before = len(left)
        for is_wanted in (False, True):
            rows, linears = Stage("rows", is_wanted), Stage("linear", is_wanted)
            while take(rows, lambda op: op.kind not in {"linear", "attend"}):
                pass
            take(linears, lambda op: op.kind == "linear")
            stages += [stage for stage in (rows, linears) if stage.ops]
        attends = Stage("attend", is_wanted=False)
        unwritten = {op.number for op in left if op.kind == "write_kv"}
        take(attends, lambda op, unwritten=unwritten: op.kind == "attend" and op.number not in unwritten)  # type: ignore[misc]
        stages += [Stage("attend", False, [op]) for op in attends.ops]
        assert len(left) < before, "operations wait for each other"
    return stages


class Program:
    """A model's step, ready to run over one pool.

    Keeps alive what the C++ side only points at.
    """

    def __init__(self, lowered: Lowered, paged: PagedKV) -> None:
        native: Any = native_module()
        self.native = native.StepProgram()
        self._lowered, self._paged = lowered, paged
        self._kept: list[Any] = []
        self._constants: dict[Constant, int] = {}
        self._weights: dict[int, int] = {}
        self._layers: dict[int, int] = {}
        self._places: dict[RowValue, tuple[int, int, int]] = {}
        self._scratch_floats = 1
        self._build(staged(lowered))

    def _build(self, stages: list[Stage]) -> None:
        self._allocate(stages)
        free: list[tuple[int, int]] = []  # (width, number) of quantised rows
        for stage in stages:
            if stage.kind == "rows":
                self._rows(stage)
            elif stage.kind == "linear":
                self._linear(stage, free)
            else:
                self._attend(stage.ops[0])
        source = self._lowered.logits.source
        assert isinstance(source, RowValue)
        self.native.finish(self._scratch_floats, self._places[source][1])

    def _allocate(self, stages: list[Stage]) -> None:
        """A place for every value: scratch, or a value of the program that others had before."""
        lives = _lives(stages, self._lowered.logits)
        free: dict[int, list[int]] = {}
        for at, stage in enumerate(stages):
            scratch = 0
            for value in [value for value, (begin, _) in lives.items() if begin == at]:
                if stage.kind == "rows" and lives[value] == (at, at):
                    self._places[value] = (SCRATCH, 0, scratch)
                    scratch += -(-value.width // 16) * 16
                else:
                    spare = free.setdefault(value.width, [])
                    self._places[value] = (VALUE, spare.pop() if spare else self.native.value(value.width), 0)
            self._scratch_floats = max(self._scratch_floats, scratch)
            for value in [value for value, (_, end) in lives.items() if end == at]:
                if self._places[value][0] == VALUE:
                    free.setdefault(value.width, []).append(self._places[value][1])

    def _rows(self, stage: Stage) -> None:
        words: list[int] = []
        for op in stage.ops:
            if op.kind == "embed":
                words += [EMBED, self._matrix(op.number), *self._operand(op.out), *NOTHING]
            elif op.kind == "write_kv":
                words += [
                    WRITE_KV,
                    self._layer(op.number),
                    *self._operand(op.sources[0]),
                    *self._operand(op.sources[1]),
                ]
            else:
                words += [OPERATION, self.native.row_step(self._step(op)), *NOTHING, *NOTHING]
        self.native.rows(int(stage.is_wanted), words)

    def _linear(self, stage: Stage, free: list[tuple[int, int]]) -> None:
        """Products, and before them their rows: quantised once for all that share them."""
        quantised: dict[View, int] = {}
        gathered: dict[View, View] = {}
        words: list[int] = []
        for op in stage.ops:
            [rows] = op.sources
            packed = self._lowered.recording.modules[op.number].packed
            if packed.form.block_inputs > 1 and rows not in quantised:
                quantised[rows] = self._quantised(packed.shape[1], quantised, free)
                words += [QUANTISE, quantised[rows], *self._operand(rows), *NOTHING]
            elif packed.form.block_inputs == 1 and rows.is_selected and rows not in gathered:
                copy = self._copy(rows)
                assert copy.out is not None
                gathered[rows] = copy.out
                words += [OPERATION, self.native.row_step(self._step(copy)), *NOTHING, *NOTHING]
        if words:
            self.native.rows(int(stage.is_wanted), words)
        words = []
        for op in stage.ops:
            [rows] = op.sources
            words += [self._matrix(op.number), quantised.get(rows, -1), *self._operand(gathered.get(rows, rows))]
            words += [self._bias(op.number), *self._operand(op.out)]
        self.native.linears(int(stage.is_wanted), words)

    def _quantised(self, width: int, taken: dict[View, int], free: list[tuple[int, int]]) -> int:
        """Memory for quantised rows: what earlier stages had, if there is any."""
        spare = next((number for size, number in free if size == width and number not in taken.values()), None)
        if spare is not None:
            return spare
        number: int = self.native.quantised(width)
        free.append((width, number))
        return number

    def _copy(self, rows: View) -> Op:
        """Wanted rows beside each other."""
        value = RowValue(rows.size, is_wanted=True)
        self._places[value] = (VALUE, self.native.value(value.width), 0)
        return Op("copy", whole(value), (rows,), rows.shape)

    def _bias(self, number: int) -> int:
        bias = getattr(self._lowered.recording.modules[number], "bias", None)
        return -1 if bias is None else self._constant(Constant(bias.detach().float().contiguous()))

    def _attend(self, op: Op) -> None:
        self.native.attention(self._layer(op.number), [*self._operand(op.sources[0]), *self._operand(op.out)])

    def _step(self, op: Op) -> list[int]:
        assert op.out is not None
        shape, to, sources = _compressed(op)
        words = [ROW_KINDS[op.kind], len(sources), *shape, *self._operand(op.out), *to]
        for view, strides in zip(op.sources, sources, strict=True):
            words += [*self._operand(view), *strides]
        words += [*NOTHING, *[0] * MOST_DIMENSIONS] * (3 - len(sources))
        return words + [struct.unpack("<q", struct.pack("<d", number))[0] for number in op.numbers]

    def _operand(self, view: View | None) -> list[int]:
        assert view is not None
        if isinstance(view.source, Position):
            return [POSITION, 0, 0]
        if isinstance(view.source, Constant):
            return [CONSTANT, self._constant(view.source), view.offset]
        space, number, start = self._places[view.source]
        if view.is_selected:
            assert space == VALUE
            space = SELECTED
        return [space, number, start + view.offset]

    def _constant(self, constant: Constant) -> int:
        if constant not in self._constants:
            numbers = constant.numbers.float().contiguous()
            self._kept.append(numbers)
            self._constants[constant] = self.native.constant(numbers.data_ptr(), numbers.numel())
        return self._constants[constant]

    def _matrix(self, number: int) -> int:
        if number not in self._weights:
            module = self._lowered.recording.modules[number]
            self._kept.append(module.packed)
            self._weights[number] = self.native.weights(module.kernel_weights)
        return self._weights[number]

    def _layer(self, number: int) -> int:
        """Of a call of attention."""
        if number not in self._layers:
            call = self._lowered.recording.calls[number]
            group = self._paged.group_of[call.layer]
            shape = self._paged.spec.groups[group]
            [query] = [op.sources[0] for op in self._lowered.ops if op.kind == "attend" and op.number == number]
            sinks = None if call.params.sinks is None else call.params.sinks.detach().float().contiguous()
            self._kept.append(sinks)
            self._layers[number] = self.native.layer(
                pool_layer(self._paged, call.layer),
                group,
                query.size // shape.key_width,
                call.params.scale,
                call.params.window or 0,
                call.params.softcap or 0.0,
                0 if sinks is None else sinks.data_ptr(),
            )
        return self._layers[number]


def _lives(stages: list[Stage], logits: View) -> dict[RowValue, tuple[int, int]]:
    """The first and the last stage that touches each value."""
    lives: dict[RowValue, tuple[int, int]] = {}
    for at, stage in enumerate(stages):
        for op in stage.ops:
            for view in (*op.sources, *((op.out,) if op.out is not None else ())):
                if isinstance(view.source, RowValue):
                    lives[view.source] = (lives.get(view.source, (at, at))[0], at)
    assert isinstance(logits.source, RowValue)
    return lives | {logits.source: (lives[logits.source][0], len(stages))}


def pool_layer(paged: PagedKV, layer: int) -> Any:
    """The kernels' view of one layer of a pool that is laid out by heads."""
    assert paged.spec.layout == "heads"
    native: Any = native_module()
    k, v, k_scales, v_scales = paged.k(layer), paged.v(layer), paged.k_scales(layer), paged.v_scales(layer)
    return native.PagedLayer(
        k=k.data_ptr(),
        v=v.data_ptr(),
        k_block_stride=k.stride(0),
        v_block_stride=v.stride(0),
        num_blocks=k.shape[0],
        block_size=k.shape[1],
        heads=k.shape[2],
        key_width=k.shape[3],
        value_width=v.shape[3],
        dtype=KV_DTYPES[paged.spec.dtype].kernel_code,
        k_scales=0 if k_scales is None else k_scales.data_ptr(),
        v_scales=0 if v_scales is None else v_scales.data_ptr(),
        k_scale_stride=0 if k_scales is None else k_scales.stride(0),
        v_scale_stride=0 if v_scales is None else v_scales.stride(0),
    )


def _compressed(op: Op) -> tuple[list[int], list[int], list[list[int]]]:
    """(shape, strides of the result, strides of the sources), each in four dimensions.

    Dimensions of one are left out, neighbours that every operand steps through alike are joined.
    """
    assert op.out is not None
    result = [*op.out.strides, 0] if op.kind in REDUCTIONS else list(op.out.strides)
    operands = [result, *(list(view.strides) for view in op.sources)]
    if op.kind not in REDUCTIONS and op.out.shape != op.shape:
        raise AssertionError((op.kind, op.out.shape, op.shape))
    last = op.shape[-1] if op.shape else 1
    dims = [(size, [strides[i] for strides in operands]) for i, size in enumerate(op.shape[:-1]) if size > 1]
    joined: list[tuple[int, list[int]]] = []
    for size, strides in dims:
        if joined and all(before == stride * size for before, stride in zip(joined[-1][1], strides, strict=True)):
            joined[-1] = (joined[-1][0] * size, strides)
        else:
            joined.append((size, strides))
    if len(joined) > MOST_DIMENSIONS - 1:
        raise NotRecordableError(f"an operation on {len(joined) + 1} dimensions of a row has no kernel")
    pad = MOST_DIMENSIONS - 1 - len(joined)
    shape = [*[1] * pad, *(size for size, _ in joined), last]
    found = [
        [*[0] * pad, *(strides[i] for _, strides in joined), operand[-1] if operand else 0]
        for i, operand in enumerate(operands)
    ]
    return shape, found[0], found[1:]
