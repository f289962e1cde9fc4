"""The tensors of a GGUF, one by one: named and laid out for the transformers class.

Dequantised they are kept in float32, packed in their own form, so the numbers are exactly those of
the GGUF. Every tensor of the
file must have a place in the model and every parameter of the model a tensor of its shape: a file
with more or less is another model.
"""

import json
import logging
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from kvire.core.errors import UnsupportedModelError
from kvire.models.checkpoint import INDEX, SINGLE
from kvire.models.gguf.config import ConfigFields
from kvire.models.gguf.header import GgufHeader
from kvire.models.progress import Progress
from kvire.weights.forms import FORMS, INT8, padded_width, quantise_to_int8
from kvire.weights.packed_file import SourceTensor

log = logging.getLogger(__name__)

Array = npt.NDArray[np.float32]
Places = dict[str, str]  # parameter of the transformers class -> tensor of the GGUF

# Memory taken while converting is about two shards.
SHARD_BYTES = 2 << 30


def tensor_places(config: ConfigFields, header: GgufHeader) -> Places:
    """Place of every tensor.

    Raises UnsupportedModelError unless file and model match one to one, shapes included.
    """
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == header.architecture)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    places: Places = {}
    for parameter, shape in _parameters(config).items():
        tensor = names.get_name(parameter, try_suffixes=(".weight", ".bias"))
        if tensor not in header.tensors:
            raise UnsupportedModelError(f"the GGUF has no tensor for {parameter}: it is damaged, or another model")
        if header.shape(tensor) != shape:
            raise UnsupportedModelError(f"{tensor} has shape {header.shape(tensor)}, expected {shape}: damaged GGUF")
        places[parameter] = tensor
    if extra := sorted(set(header.tensors) - set(places.values())):
        raise UnsupportedModelError(
            f"the GGUF has tensors that {config['model_type']} has no place for ({', '.join(extra[:3])}): the model "
            "would not be the same (rope_freqs: scaled rotary factors). Use its safetensors checkpoint."
        )
    return places


def converted_bytes(places: Places, header: GgufHeader) -> int:
    """Bytes of the weights after conversion."""
    return sum(4 * prod(header.shape(tensor)) for tensor in places.values())


def write_weights(folder: Path, config: ConfigFields, header: GgufHeader, places: Places, progress: Progress) -> None:
    """Write the weights as safetensors into `folder`, in shards of at most SHARD_BYTES.

    A larger tensor gets a shard of its own.
    """
    shards = list(_shards(places, header))
    undo, done = _layout(config, header), 0
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        arrays: dict[str, Array] = {}
        for name in names:
            arrays[name] = undo(places[name], _values(places[name], header))
            done += 1
            progress("converting the weights to float32", done, len(places))
        save_file(arrays, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = converted_bytes(places, header)
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))


def packed_tensors(
    config: ConfigFields, header: GgufHeader, places: Places, progress: Progress, *, int8: bool
) -> Iterator[SourceTensor]:
    """Every tensor as the file has it; matrices without kernels for their form become int8.

    int8: so do matrices of 16 and 32 bits.
    """
    undo = _layout(config, header)
    for done, (parameter, tensor) in enumerate(places.items(), start=1):
        shape, form = header.shape(tensor), FORMS.get(header.tensors[tensor].tensor_type.name.lower())
        if len(shape) != 2:
            values = undo(tensor, _values(tensor, header))
            yield SourceTensor(parameter, FORMS["f32"], shape, values.view(np.uint8))
        elif form is None or (int8 and form.block_inputs == 1 and not parameter.endswith("embed_tokens.weight")):
            if form is None:
                log.warning(
                    "%s is stored as %s, which no kernel reads: it is kept as int8 with a scale for every 32 numbers",
                    tensor,
                    header.tensors[tensor].tensor_type.name,
                )
            rows = quantise_to_int8(undo(tensor, _values(tensor, header)))
            yield SourceTensor(parameter, INT8, (shape[0], padded_width(shape[1])), rows)
        else:
            rows = np.ascontiguousarray(header.tensors[tensor].data).view(np.uint8).reshape(shape[0], -1)
            yield SourceTensor(parameter, form, shape, undo(tensor, rows))
        progress("packing the weights", done, len(places))


def _parameters(config: ConfigFields) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter of the transformers class, built without memory."""
    import torch  # noqa: PLC0415 - seconds, and only conversion needs it
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    fields = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **fields))
    skip = ["lm_head.weight"] if config["tie_word_embeddings"] else []
    return {name: tuple(value.shape) for name, value in model.named_parameters() if name not in skip}


def _shards(places: Places, header: GgufHeader) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, tensor in places.items():
        extra = 4 * prod(header.shape(tensor))
        if names and size + extra > SHARD_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += extra
    yield names


def _values(tensor: str, header: GgufHeader) -> Array:
    """The tensor's numbers in float32, in its torch shape."""
    record = header.tensors[tensor]
    try:
        values = gguf.dequantize(record.data, record.tensor_type)
    except NotImplementedError:
        raise UnsupportedModelError(f"{tensor} is stored as {record.tensor_type.name}, which cannot be read") from None
    array: Array = np.asarray(values, dtype=np.float32).reshape(header.shape(tensor))
    return array


def _layout(config: ConfigFields, header: GgufHeader) -> Callable[[str, Any], Any]:
    """Undo the layout changes of llama.cpp's converter (convert_hf_to_gguf.py).

    Of numbers, or of rows of blocks: only whole rows of a matrix move.
    """
    if header.architecture == "llama":
        return lambda tensor, array: _unpermuted(tensor, array, config)
    if header.architecture == "gemma3":
        return lambda tensor, array: array - np.float32(1) if tensor.endswith("norm.weight") else array
    return lambda _, array: array


def _unpermuted(tensor: str, array: npt.NDArray[Any], config: ConfigFields) -> npt.NDArray[Any]:
    """Rows of Q and K from interleaved pairs back to the halves that transformers rotates.

    All other tensors unchanged.
    """
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}.get(_part(tensor))
    if heads is None:
        return array
    pairs = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)


def _part(tensor: str) -> str:
    """The kind of a tensor: attn_q for blk.0.attn_q.weight."""
    return tensor.split(".")[-2]
