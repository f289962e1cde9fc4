"""From a recorded graph to operations on rows: the dimension of tokens vanishes.

Every tensor of the graph has at most one dimension that counts tokens. Whatever reshapes, slices,
transposes or repeats the others becomes another view of the same row.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch.fx import Node

from kvire.step.record import NotRecordableError, Recording
from kvire.step.rows import Constant, Op, Position, RowValue, View, dense, whole

# Operations whose result has the shape of their operands, by the name of torch's.
ELEMENTWISE = {
    "aten.neg.default": "negative",
    "aten.sqrt.default": "root",
    "aten.rsqrt.default": "inverse_root",
    "aten.exp.default": "exponential",
    "aten.sin.default": "sine",
    "aten.cos.default": "cosine",
    "aten.tanh.default": "tanh",
    "aten.sigmoid.default": "sigmoid",
    "aten.silu.default": "silu",
    "aten.relu.default": "relu",
    "aten.abs.default": "magnitude",
    "aten.add.Tensor": "add",
    "aten.sub.Tensor": "subtract",
    "aten.mul.Tensor": "multiply",
    "aten.div.Tensor": "divide",
    "aten.maximum.default": "larger",
    "aten.minimum.default": "smaller",
}
SAME_NUMBERS = ("aten._to_copy.default", "aten.clone.default", "aten.alias.default", "aten.detach.default")
RESHAPES = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")


@dataclass(frozen=True, slots=True)
class TokenTensor:
    """A tensor of the graph.

    view: its row.
    at: which of its dimensions counts tokens.
    """

    view: View
    at: int

    @property
    def sizes(self) -> list[int | None]:
        """Of all its dimensions; None for tokens."""
        return [*self.view.shape[: self.at], None, *self.view.shape[self.at :]]

    @property
    def strides(self) -> list[int]:
        """Within a row, of all its dimensions; 0 for tokens."""
        return [*self.view.strides[: self.at], 0, *self.view.strides[self.at :]]


@dataclass(frozen=True, slots=True)
class Lowered:
    """A recorded model as operations on rows.

    ops: in an order in which they can run.
    logits: of the wanted rows.
    """

    ops: list[Op]
    logits: View
    recording: Recording


def lower(recording: Recording) -> Lowered:
    """Raises NotRecordableError."""
    return _Lowering(recording).run()


class _Lowering:
    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.ops: list[Op] = []
        self.made: dict[Node, Any] = {}

    def run(self) -> Lowered:
        inputs = iter(("ids", TokenTensor(View(Position(), (1,), (0,)), 1), "rows"))
        logits: Any = None
        for node in self.recording.graph.graph.nodes:
            if node.op == "placeholder":
                self.made[node] = next(inputs)
            elif node.op == "get_attr":
                self.made[node] = getattr(self.recording.graph, node.target)
            elif node.op == "call_function":
                self.made[node] = self._call(node)
            elif node.op == "output":
                [logits] = node.all_input_nodes
        result = self.made[logits]
        if not isinstance(result, TokenTensor):
            raise NotRecordableError("its logits do not depend on its input")
        return Lowered(self.ops, self._flat(result.view), self.recording)

    def _call(self, node: Node) -> Any:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt | int):
            return value  # a size: shapes are taken from the results themselves
        arguments = [self._argument(argument) for argument in node.args]
        name = str(node.target)
        if all(not isinstance(each, TokenTensor | str) for each in _flattened(arguments)):
            return self._folded(node)
        if name in ELEMENTWISE:
            return self._elementwise(ELEMENTWISE[name], node, arguments[:2])
        if name in SAME_NUMBERS:
            return self._same(node, arguments[0])
        if name in RESHAPES:
            return self._reshaped(node, arguments[0])
        handler: Callable[[Node, list[Any]], Any] | None = HANDLERS.get(name)
        if handler is None:
            raise NotRecordableError(f"{name} has no kernel")
        return handler(self, node, arguments)  # type: ignore[call-arg,arg-type]

    def _argument(self, argument: Any) -> Any:
        if isinstance(argument, Node):
            return self.made[argument]
        if isinstance(argument, list | tuple):
            return [self._argument(each) for each in argument]
        return argument

    def _folded(self, node: Node) -> Any:
        """The result of an operation on constants."""

        def real(argument: Any) -> Any:
            found = self.made[argument] if isinstance(argument, Node) else argument
            return [real(each) for each in found] if isinstance(found, list | tuple) else found

        made: Any = node.target
        return made(*map(real, node.args), **{name: real(each) for name, each in node.kwargs.items()})

    # --- views ------------------------------------------------------------------------------------

    def _same(self, node: Node, x: Any) -> Any:
        dtype = node.meta["val"].dtype
        if dtype not in {torch.float32, torch.int64} and not (isinstance(x, str) and x == "ids"):
            raise NotRecordableError(f"it computes in {dtype}")
        return x

    def _reshaped(self, node: Node, x: Any) -> Any:
        if not isinstance(x, TokenTensor):
            return x
        sizes, at = _sizes(node)
        before = prod(size for size in x.sizes[: x.at] if size is not None)
        if before != prod(sizes[:at]):
            raise NotRecordableError("it joins tokens with another dimension")
        return TokenTensor(self._viewed(x.view, tuple(sizes)), at)

    def _viewed(self, view: View, shape: tuple[int, ...]) -> View:
        if view.is_dense:
            return replace(view, shape=shape, strides=dense(shape))
        try:
            other = torch.empty_strided(view.shape, view.strides, device="meta").view(shape)
        except RuntimeError:
            return self._viewed(self._flat(view), shape)
        return replace(view, shape=shape, strides=tuple(other.stride()))

    def _flat(self, view: View) -> View:
        """The same numbers, following each other in one dimension."""
        if view.is_dense and isinstance(view.source, RowValue):
            return replace(view, shape=(view.size,), strides=(1,))
        copied = self._emit("copy", view.shape, (view,))
        return replace(copied, shape=(view.size,), strides=(1,))

    def transpose(self, node: Node, arguments: list[Any]) -> Any:
        x, first, second = arguments
        order = list(range(len(x.sizes)))
        first, second = first % len(order), second % len(order)
        order[first], order[second] = order[second], order[first]
        return self._permuted(x, order)

    def permute(self, node: Node, arguments: list[Any]) -> Any:
        x, order = arguments
        return self._permuted(x, [each % len(x.sizes) for each in order])

    def _permuted(self, x: TokenTensor, order: list[int]) -> TokenTensor:
        sizes, strides = [x.sizes[i] for i in order], [x.strides[i] for i in order]
        return _tracked(x.view, sizes, strides, order.index(x.at))

    def unsqueeze(self, node: Node, arguments: list[Any]) -> Any:
        x, dim = arguments
        dim %= len(x.sizes) + 1
        sizes, strides = x.sizes, x.strides
        sizes.insert(dim, 1)
        strides.insert(dim, 0)
        return _tracked(x.view, sizes, strides, x.at + (dim <= x.at))

    def squeeze(self, node: Node, arguments: list[Any]) -> Any:
        x, dim = arguments
        dim %= len(x.sizes)
        sizes, strides = x.sizes, x.strides
        if sizes[dim] == 1:
            del sizes[dim], strides[dim]
        return _tracked(x.view, sizes, strides, x.at - (dim < x.at))

    def expand(self, node: Node, arguments: list[Any]) -> Any:
        x = arguments[0]
        if not isinstance(x, TokenTensor):
            return x  # a constant, repeated: broadcasting does the same
        sizes, at = _sizes(node)
        wanted: list[int | None] = [*sizes[:at], None, *sizes[at:]]
        more = len(wanted) - len(x.sizes)
        old: list[int | None] = [*[1] * more, *x.sizes]
        strides = [*[0] * more, *x.strides]
        if old.index(None) != at:
            raise NotRecordableError("it repeats tokens")
        found = [
            0 if size == 1 and new != 1 else stride for size, new, stride in zip(old, wanted, strides, strict=True)
        ]
        return _tracked(x.view, wanted, found, at)

    def slice(self, node: Node, arguments: list[Any]) -> Any:
        x, dim, start, end, *step = [*arguments, *[0, 0, None, 1 << 62][len(arguments) :]][:5]
        dim %= len(x.sizes)
        if dim == x.at:
            if (start or 0) == 0 and (end is None or isinstance(end, torch.SymInt) or end >= 1 << 31):
                return x
            raise NotRecordableError("it takes some of the tokens")
        by = step[0] if step else 1
        return self._part(x, dim, start or 0, end, by)

    def _part(self, x: TokenTensor, dim: int, start: int, end: int | None, by: int = 1) -> TokenTensor:
        sizes, strides = x.sizes, x.strides
        size = sizes[dim]
        assert size is not None
        start, stop, by = slice(start, end, by).indices(size)
        view = replace(x.view, offset=x.view.offset + start * strides[dim])
        sizes[dim] = len(range(start, stop, by))
        strides[dim] *= by
        return _tracked(view, sizes, strides, x.at)

    def select(self, node: Node, arguments: list[Any]) -> Any:
        x, dim, index = arguments
        dim %= len(x.sizes)
        if dim == x.at:
            raise NotRecordableError("it takes one of the tokens")
        part = self._part(x, dim, index, index + 1 or None)
        return self.squeeze(node, [part, dim])

    def split(self, node: Node, arguments: list[Any]) -> Any:
        x, size, *rest = arguments
        dim = (rest[0] if rest else 0) % len(x.sizes)
        whole_size = x.sizes[dim]
        if whole_size is None:
            raise NotRecordableError("it splits the tokens")
        sizes = size if isinstance(size, list) else [size] * -(-whole_size // size)
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return [self._part(x, dim, start, start + each) for start, each in zip(starts, sizes, strict=True)]

    def getitem(self, node: Node, arguments: list[Any]) -> Any:
        return arguments[0][arguments[1]]

    def index(self, node: Node, arguments: list[Any]) -> Any:
        x, indices = arguments
        wanted = [i for i, each in enumerate(indices) if each is not None]
        if not (isinstance(x, TokenTensor) and wanted == [x.at] and isinstance(indices[x.at], str)):
            raise NotRecordableError("it looks up rows by number")
        return replace(x, view=replace(x.view, is_selected=True))

    # --- numbers ----------------------------------------------------------------------------------

    def _elementwise(self, kind: str, node: Node, arguments: list[Any], **more: Any) -> TokenTensor:
        if node.kwargs.get("alpha", 1) != 1 or "rounding_mode" in node.kwargs:
            raise NotRecordableError(f"{node.target} with options has no kernel")
        sizes, at = _sizes(node)
        shape = tuple(sizes)
        sources = tuple(_broadcast(each, shape, at) for each in arguments)
        return TokenTensor(self._emit(kind, shape, sources, **more), at)

    def power(self, node: Node, arguments: list[Any]) -> Any:
        x, exponent = arguments
        if exponent == 2:
            return self._elementwise("square", node, [x])
        if exponent == 0.5:
            return self._elementwise("root", node, [x])
        if exponent == -0.5:
            return self._elementwise("inverse_root", node, [x])
        if exponent == 3:
            square = self._elementwise("square", node, [x])
            return self._elementwise("multiply", node, [square, x])
        raise NotRecordableError(f"a power of {exponent} has no kernel")

    def clamp(self, node: Node, arguments: list[Any]) -> Any:
        x, least, most = [*arguments, None, None][:3]
        x = x if least is None else self._elementwise("larger", node, [x, least])
        return x if most is None else self._elementwise("smaller", node, [x, most])

    def gelu(self, node: Node, arguments: list[Any]) -> Any:
        kind = "gelu_tanh" if node.kwargs.get("approximate", "none") == "tanh" else "gelu_erf"
        return self._elementwise(kind, node, arguments[:1])

    def mean(self, node: Node, arguments: list[Any]) -> Any:
        return self._reduced("mean", node, arguments)

    def sum(self, node: Node, arguments: list[Any]) -> Any:
        return self._reduced("sum", node, arguments)

    def _reduced(self, kind: str, node: Node, arguments: list[Any]) -> Any:
        x, dims, *keep = arguments
        if [dim % len(x.sizes) for dim in dims] != [len(x.sizes) - 1] or x.at == len(x.sizes) - 1:
            raise NotRecordableError("it adds over another dimension than the last")
        out = self._emit(kind, x.view.shape, (x.view,))
        if keep and keep[0]:
            return TokenTensor(replace(out, shape=(*out.shape, 1), strides=(*out.strides, 0)), x.at)
        return TokenTensor(out, x.at)

    def softmax(self, node: Node, arguments: list[Any]) -> Any:
        x, dim, *_ = arguments
        if dim % len(x.sizes) != len(x.sizes) - 1:
            raise NotRecordableError("a softmax over another dimension than the last has no kernel")
        return TokenTensor(self._emit("softmax", x.view.shape, (x.view,)), x.at)

    def layer_norm(self, node: Node, arguments: list[Any]) -> Any:
        x, shape, weight, bias, epsilon = arguments
        if len(shape) != 1 or shape[0] != x.sizes[-1]:
            raise NotRecordableError("a norm over several dimensions has no kernel")
        ones = torch.ones(shape) if weight is None else weight
        zeros = torch.zeros(shape) if bias is None else bias
        sources = (x.view, *(_broadcast(each, x.view.shape, x.at) for each in (ones, zeros)))
        made = self._emit("layer_norm", x.view.shape, sources, numbers=(float(epsilon), 0.0))
        return [TokenTensor(made, x.at), None, None]  # mean and deviation are for training

    def cat(self, node: Node, arguments: list[Any]) -> Any:
        parts, dim = [*arguments, 0][:2]
        sizes, at = _sizes(node)
        dim %= len(sizes) + 1
        if dim == at:
            raise NotRecordableError("it appends tokens")
        place = dim - (dim > at)
        out = RowValue(prod(sizes), any(_is_wanted(part.view) for part in parts if isinstance(part, TokenTensor)))
        start = 0
        for part in parts:
            shape = list(sizes)
            shape[place] = part.view.shape[place] if isinstance(part, TokenTensor) else part.shape[dim]
            if shape[place] == 0:
                continue
            source = _broadcast(part, tuple(shape), at)
            to = View(out, tuple(shape), dense(tuple(sizes)), start * dense(tuple(sizes))[place])
            self.ops.append(Op("copy", to, (source,), tuple(shape)))
            start += shape[place]
        return TokenTensor(whole(out, tuple(sizes)), at)

    def stack(self, node: Node, arguments: list[Any]) -> Any:
        parts, dim = [*arguments, 0][:2]
        dim %= len(parts[0].sizes) + 1
        return self.cat(node, [[self.unsqueeze(node, [part, dim]) for part in parts], dim])

    # --- what has kernels of its own --------------------------------------------------------------

    def embedding(self, node: Node, arguments: list[Any]) -> Any:
        ids, number, width = arguments
        if ids != "ids":
            raise NotRecordableError("it embeds something else than its input")
        packed_width = self.recording.modules[number].packed.shape[1]
        if packed_width != width:
            raise NotRecordableError("its embedding is padded")
        out = RowValue(width)
        self.ops.append(Op("embed", whole(out), (), number=number))
        return TokenTensor(whole(out, (1, width)), 1)

    def linear(self, node: Node, arguments: list[Any]) -> Any:
        x, number, outputs = arguments
        if x.at != len(x.sizes) - 2 or x.view.size != x.sizes[-1]:
            raise NotRecordableError("a linear layer meets several rows of one token")
        if self.recording.modules[number].packed.shape[1] != x.sizes[-1]:
            raise NotRecordableError("a matrix is padded to whole groups")
        flat = self._flat(x.view)
        out = RowValue(outputs, _is_wanted(flat))
        self.ops.append(Op("linear", whole(out), (flat,), number=number))
        return TokenTensor(whole(out, (*x.view.shape[:-1], outputs)), x.at)

    def attention(self, node: Node, arguments: list[Any]) -> Any:
        q, k, v, number = arguments
        call = self.recording.calls[number]
        if call.layer != call.source:
            raise NotRecordableError("layers share KV")
        if any(part.at != 2 or part.sizes[0] != 1 for part in (q, k, v)):
            raise NotRecordableError("attention has an unknown shape")
        heads, width = q.sizes[1], v.sizes[-1]
        self.ops.append(Op("write_kv", None, (self._flat(k.view), self._flat(v.view)), number=number))
        out = RowValue(heads * width)
        self.ops.append(Op("attend", whole(out), (self._flat(q.view),), number=number))
        return TokenTensor(whole(out, (1, heads, width)), 1)

    def _emit(
        self, kind: str, shape: tuple[int, ...], sources: tuple[View, ...], *, numbers: tuple[float, float] = (0.0, 0.0)
    ) -> View:
        """A new operation; its result, all numbers following each other."""
        result = shape[:-1] if kind in {"sum", "mean", "largest"} else shape
        wanted = {_is_wanted(view) for view in sources if isinstance(view.source, RowValue)}
        if len(wanted) > 1:
            raise NotRecordableError("it joins all tokens with the wanted ones")
        out = whole(RowValue(prod(result), True in wanted), result)
        self.ops.append(Op(kind, out, sources, shape, numbers))
        return out


HANDLERS: dict[str, Any] = {
    "aten.transpose.int": _Lowering.transpose,
    "aten.permute.default": _Lowering.permute,
    "aten.unsqueeze.default": _Lowering.unsqueeze,
    "aten.squeeze.dim": _Lowering.squeeze,
    "aten.expand.default": _Lowering.expand,
    "aten.slice.Tensor": _Lowering.slice,
    "aten.select.int": _Lowering.select,
    "aten.split.Tensor": _Lowering.split,
    "aten.split_with_sizes.default": _Lowering.split,
    "<built-in function getitem>": _Lowering.getitem,
    "aten.index.Tensor": _Lowering.index,
    "aten.pow.Tensor_Scalar": _Lowering.power,
    "aten.clamp.default": _Lowering.clamp,
    "aten.clamp_.default": _Lowering.clamp,
    "aten.gelu.default": _Lowering.gelu,
    "aten.mean.dim": _Lowering.mean,
    "aten.sum.dim_IntList": _Lowering.sum,
    "aten._softmax.default": _Lowering.softmax,
    "aten.native_layer_norm.default": _Lowering.layer_norm,
    "aten.cat.default": _Lowering.cat,
    "aten.stack.default": _Lowering.stack,
    "kvire.recorded_embedding.default": _Lowering.embedding,
    "kvire.recorded_linear.default": _Lowering.linear,
    "kvire.recorded_attention.default": _Lowering.attention,
}


def _tracked(view: View, sizes: list[int | None], strides: list[int], at: int) -> TokenTensor:
    shape = tuple(size for size in sizes if size is not None)
    return TokenTensor(replace(view, shape=shape, strides=tuple(strides[:at] + strides[at + 1 :])), at)


def _sizes(node: Node) -> tuple[list[int], int]:
    """Sizes of a result without its tokens, and which dimension counts them."""
    value = node.meta["val"]
    shape = (value[0] if isinstance(value, list | tuple) else value).shape
    counted = [i for i, size in enumerate(shape) if isinstance(size, torch.SymInt) and not _is_number(size)]
    if len(counted) != 1:
        raise NotRecordableError(f"{node.target} has a result of shape {list(shape)}: its tokens are not one dimension")
    return [int(size) for i, size in enumerate(shape) if i != counted[0]], counted[0]


def _is_number(size: torch.SymInt) -> bool:
    return size.node.maybe_as_int() is not None


def _is_wanted(view: View) -> bool:
    return view.is_selected or (isinstance(view.source, RowValue) and view.source.is_wanted)


def _broadcast(x: Any, shape: tuple[int, ...], at: int) -> View:
    """An operand as a view of the result's shape."""
    if isinstance(x, TokenTensor):
        sizes, strides, view = x.sizes, x.strides, x.view
    else:
        numbers = torch.as_tensor(x, dtype=torch.float32).detach().contiguous()
        sizes, strides, view = list(numbers.shape), list(numbers.stride()), whole(Constant(numbers))
    wanted: list[int | None] = [*shape[:at], None, *shape[at:]]
    sizes = [*[1] * (len(wanted) - len(sizes)), *sizes]
    strides = [*[0] * (len(wanted) - len(strides)), *strides]
    if sizes[at] not in {None, 1} or any(size is None and i != at for i, size in enumerate(sizes)):
        raise NotRecordableError("it joins tokens with another dimension")
    found = tuple(
        0 if size == 1 else stride for i, (size, stride) in enumerate(zip(sizes, strides, strict=True)) if i != at
    )
    return replace(view, shape=shape, strides=found)


def _flattened(values: Any) -> list[Any]:
    if isinstance(values, list | tuple):
        return [each for value in values for each in _flattened(value)]
    return [values]
