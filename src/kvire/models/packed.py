"""A transformers model whose matrices stay packed, in their file's form.

Classes stay unmodified: modules with a packed matrix get a subclass of their own class, whose
products the kernels compute. Everything else, such as norms and biases, is float32 as always.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from kvire.core.errors import UnsupportedModelError
from kvire.core.native import native_module
from kvire.weights.forms import FORMS, INT8, Form, quantise_to_int8
from kvire.weights.packed_file import PackedFile, PackedTensor, SourceTensor

FLOAT_FORMS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


class PackedModule(nn.Module):
    """A module with a packed matrix instead of the parameter `weight`."""

    packed: PackedTensor
    kernel_weights: Any
    recorder: Callable[[Tensor, Any], Tensor] | None = None  # stands in while the model is recorded

    def hold(self, tensor: PackedTensor) -> None:
        """Compute with this matrix from now on."""
        shape = self._parameters.pop("weight").shape  # type: ignore[union-attr]
        # For code that asks for a weight's dtype or shape; nothing computes on the meta device by
        # mistake.
        self.weight = torch.empty(shape, device="meta")
        self.packed, self.kernel_weights = tensor, tensor.kernel_weights()

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """float32 [..., inputs] -> [..., outputs]."""
        outputs, width = self.packed.shape
        if x.shape[-1] < width:  # int8 pads rows to whole groups
            x = pad(x, (0, width - x.shape[-1]))
        x = x.float().contiguous()
        out = x.new_empty(*x.shape[:-1], outputs)
        native: Any = native_module()
        native.packed_linear(
            self.kernel_weights,
            x.data_ptr(),
            x.numel() // width,
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out


class PackedLinear(PackedModule, nn.Linear):
    """nn.Linear over a packed matrix."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """[..., in_features] -> float32 [..., out_features]."""
        if self.recorder is not None:
            return self.recorder(input, self)
        return self.product(input, self.bias)


class PackedConv1D(PackedModule, Conv1D):
    """transformers' Conv1D, a linear layer whose matrix lies the other way in files."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., nx] -> float32 [..., nf]."""
        if self.recorder is not None:
            return self.recorder(x, self)
        bias: Any = self.bias
        return self.product(x, bias)


class PackedEmbedding(PackedModule, nn.Embedding):
    """nn.Embedding over a packed matrix, whose rows are unpacked exactly."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """int64 [...] -> float32 [..., embedding_dim]."""
        return self.exact(input) if self.recorder is None else self.recorder(input, self)

    def exact(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """The rows themselves, without what a subclass makes of them."""
        ids = input.long().contiguous()
        out = torch.empty(ids.numel(), self.packed.shape[1])
        native: Any = native_module()
        native.unpack_rows(self.kernel_weights, ids.data_ptr(), ids.numel(), out.data_ptr(), torch.get_num_threads())
        return out[:, : self.embedding_dim].view(*ids.shape, self.embedding_dim)


PACKED_KINDS: dict[Any, Any] = {nn.Linear: PackedLinear, Conv1D: PackedConv1D, nn.Embedding: PackedEmbedding}


def matrices(model: nn.Module) -> Iterator[tuple[str, nn.Module, type[nn.Module]]]:
    """(parameter's name, module, kind) of every matrix that can stay packed.

    kind: one of PACKED_KINDS. A module whose class has a forward of its own for other reasons than
    calling its parent's counts like its parent.
    """
    for name, module in model.named_modules():
        for kind in PACKED_KINDS:
            if isinstance(module, kind) and module._parameters.get("weight") is not None:  # noqa: SLF001 - torch's dict
                yield f"{name}.weight", module, kind


def tensors_of_checkpoint(model: PreTrainedModel, shards: tuple[Path, ...], *, int8: bool) -> Iterator[SourceTensor]:
    """Every parameter of a loaded model, once, as its checkpoint stores it.

    int8: matrices become int8 with a scale for every 32 inputs.
    """
    stored = {name: shard for shard in shards for name in _names(shard)}
    kinds = {name: kind for name, _, kind in matrices(model)}
    for name, parameter in model.named_parameters():
        value = _stored(stored[name], name) if name in stored else parameter.detach()
        if value.shape != parameter.shape:
            value = parameter.detach()
        kind = kinds.get(name)
        value = value.T if kind is Conv1D else value
        yield _as_int8(name, value) if int8 and kind in {nn.Linear, Conv1D} else _as_stored(name, value)


def packed_model(config: PreTrainedConfig, file: PackedFile) -> PreTrainedModel:
    """The model's class, unmodified but for packed matrices; in eval mode.

    Raises UnsupportedModelError if file and class do not belong together.
    """
    with _parameters_on_meta():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    used: set[str] = set()
    tied = _tied(model)
    for name, module, kind in list(matrices(model)):
        tensor = _find(file, name, tied)
        _check_matrix(name, module, kind, tensor)
        own: Any = type(module)
        module.__class__ = _subclass(own, PACKED_KINDS[kind])
        module.hold(tensor)  # type: ignore[operator]
        used.add(tensor.name)
    for name, parameter in list(model.named_parameters()):
        tensor = _find(file, name, tied)
        if tensor.shape != tuple(parameter.shape):
            raise UnsupportedModelError(f"{file.path} has {name} as {tensor.shape}, expected {tuple(parameter.shape)}")
        owner, _, last = name.rpartition(".")
        values = torch.from_numpy(np.array(tensor.floats(), dtype=np.float32))
        setattr(model.get_submodule(owner), last, nn.Parameter(values, requires_grad=False))
        used.add(tensor.name)
    if extra := sorted(set(file) - used):
        raise UnsupportedModelError(f"{file.path} has weights that the model has no place for: {', '.join(extra[:5])}")
    return model.eval().requires_grad_(False)


def _find(file: PackedFile, name: str, tied: Mapping[str, str]) -> PackedTensor:
    found = file.get(name) or file.get(tied.get(name, ""))
    if found is None:
        raise UnsupportedModelError(f"{file.path} lacks {name}, which the model needs")
    return found


def _tied(model: PreTrainedModel) -> dict[str, str]:
    """The embedding's name by that of the output matrix, if they are one."""
    output, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    names = {id(module): f"{name}.weight" for name, module in model.named_modules()}
    if not getattr(model.config.get_text_config(), "tie_word_embeddings", False) or output is None:
        return {}
    return {names[id(output)]: names[id(embedding)]}


def _check_matrix(name: str, module: Any, kind: Any, tensor: PackedTensor) -> None:
    shape = tuple(module.weight.shape)
    outputs, width = (shape[1], shape[0]) if kind is Conv1D else shape
    padded = -(-width // tensor.form.block_inputs) * tensor.form.block_inputs
    if tensor.shape != (outputs, padded):
        raise UnsupportedModelError(f"{name} is packed as {tensor.shape}, and the model has {(outputs, width)}")


def _as_stored(name: str, value: Tensor) -> SourceTensor:
    form = FORMS[FLOAT_FORMS.get(value.dtype, "f32")]
    value = value if value.dtype in FLOAT_FORMS else value.float()
    rows = value.contiguous().reshape(value.shape[0] if value.dim() else 1, -1)
    if value.dim() != 2:
        rows, form = rows.float(), FORMS["f32"]
    return SourceTensor(name, form, tuple(value.shape), rows.view(torch.uint8).numpy())


def _as_int8(name: str, value: Tensor) -> SourceTensor:
    try:
        rows = quantise_to_int8(value.float().contiguous().numpy())
    except ValueError as error:
        raise UnsupportedModelError(f"{name} cannot be int8: {error}; use weights='file'") from error
    width = rows.shape[1] // INT8.block_bytes * INT8.block_inputs
    return SourceTensor(name, INT8, (value.shape[0], width), rows)


def _names(shard: Path) -> list[str]:
    with safe_open(str(shard), framework="pt") as tensors:
        return list(tensors.keys())


def _stored(shard: Path, name: str) -> Tensor:
    with safe_open(str(shard), framework="pt") as tensors:
        found: Tensor = tensors.get_tensor(name)
    return found


@cache
def _subclass(kind: Any, packed: Any) -> Any:
    return packed if kind in PACKED_KINDS else type(f"Packed{kind.__name__}", (kind, packed), {})


_making = threading.Lock()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules that this thread makes have buffers as usual, and parameters without memory."""
    register, me = nn.Module.register_parameter, threading.get_ident()

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and threading.get_ident() == me:
            module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)  # noqa: SLF001

    with _making:
        register = nn.Module.register_parameter
        nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]


def form_of(file: PackedFile) -> str:
    """The forms of a model's matrices, most bytes first: "q4_1, q8_0"."""
    sizes: dict[Form, int] = {}
    for tensor in file.values():
        if len(tensor.shape) == 2:
            sizes[tensor.form] = sizes.get(tensor.form, 0) + tensor.data.nbytes
    return ", ".join(form.name for form in sorted(sizes, key=lambda form: -sizes[form]))
