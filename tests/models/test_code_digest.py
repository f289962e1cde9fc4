"""Two releases that compute alike have one digest, and whatever changes what is computed has another."""

import functools
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType

import pytest
import torch
import transformers
from harness.families import family_model, family_path
from torch.nn import functional
from transformers import AttentionInterface
from transformers.integrations import sdpa_attention
from transformers.modeling_rope_utils import dynamic_rope_update
from transformers.models.llama import modeling_llama

from kvire.models import code_digest
from kvire.models.code_digest import ModelCode
from kvire.models.loaded_state import loaded_state
from kvire.models.loader import load_model
from models.tiny import FAMILIES

Edit = Callable[[pytest.MonkeyPatch], None]


def digest(model: torch.nn.Module) -> str:
    return ModelCode(model, also={}).current()


def another(function: Callable, old: str, new: str) -> Callable:
    """The function as a release of its module would have it whose source has `new` in the place of `old`."""
    module = sys.modules[function.__module__]
    lines, own = inspect.getsource(module), inspect.getsource(function)
    assert own.count(old) == lines.count(own) == 1
    waiting = [compile(lines.replace(own, own.replace(old, new)), "another release", "exec")]
    for code in waiting:
        if code.co_qualname == function.__qualname__:
            return FunctionType(code, vars(module), function.__name__, function.__defaults__)
        waiting += [each for each in code.co_consts if isinstance(each, CodeType)]
    raise AssertionError(function)


def the_rotary_function(patch: pytest.MonkeyPatch) -> None:
    changed = another(modeling_llama.apply_rotary_pos_emb, "rotate_half(q) * sin", "rotate_half(q) * -sin")
    patch.setattr(modeling_llama, "apply_rotary_pos_emb", changed)


def a_function_that_it_calls(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(modeling_llama, "rotate_half", lambda x: x)


def a_method_of_a_class(patch: pytest.MonkeyPatch) -> None:
    mlp = modeling_llama.LlamaMLP
    patch.setattr(mlp, "forward", another(mlp.forward, "self.up_proj(x)", "self.up_proj(2 * x)"))


def a_constant_in_a_function(patch: pytest.MonkeyPatch) -> None:
    norm = modeling_llama.LlamaRMSNorm
    patch.setattr(norm, "forward", another(norm.forward, "pow(2)", "pow(3)"))


def what_a_wrapper_wraps(patch: pytest.MonkeyPatch) -> None:
    """The same wrapper around another function: only what it captured tells."""
    rotary = modeling_llama.LlamaRotaryEmbedding
    changed = another(inspect.unwrap(rotary.forward), "emb.cos()", "emb.sin()")
    patch.setattr(rotary, "forward", dynamic_rope_update(changed))


def the_attention_that_is_selected(patch: pytest.MonkeyPatch) -> None:
    changed = another(sdpa_attention.sdpa_attention_forward, "scale=scaling", "scale=2 * scaling")
    patch.setitem(AttentionInterface._global_mapping, "sdpa", changed)


def a_function_of_torch(patch: pytest.MonkeyPatch) -> None:
    """As packages with faster attention do it."""
    attend = functional.scaled_dot_product_attention

    @functools.wraps(attend)
    def other(*arguments, **options):
        return 2 * attend(*arguments, **options)

    patch.setattr(functional, "scaled_dot_product_attention", other)


def a_method_of_torch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.nn.Linear, "forward", lambda self, x: functional.linear(x, self.weight))


def a_method_put_before_an_inherited_one(patch: pytest.MonkeyPatch) -> None:
    layer = modeling_llama.LlamaDecoderLayer
    patch.setattr(layer, "__call__", lambda self, *rest, **options: self.forward(*rest, **options))


def code_put_into_a_function(patch: pytest.MonkeyPatch) -> None:
    rotate = modeling_llama.rotate_half
    patch.setattr(rotate, "__code__", (lambda x: x).__code__)


def a_default(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(modeling_llama.apply_rotary_pos_emb, "__defaults__", (2,))


EDITS = [
    the_rotary_function, a_function_that_it_calls, a_method_of_a_class, a_constant_in_a_function, what_a_wrapper_wraps,
    the_attention_that_is_selected, a_function_of_torch, a_method_of_torch, a_method_put_before_an_inherited_one,
    code_put_into_a_function, a_default,
]  # fmt: skip


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_an_edit_is_seen_by_who_looks_now_and_by_who_looked_before(edit: Edit) -> None:
    model = load_model(family_path("llama")).model
    code = ModelCode(model, also={})
    before = code.current()
    with pytest.MonkeyPatch.context() as patch:
        edit(patch)
        assert code.current() == digest(model) != before
    assert code.current() == before


def captured_functions_are_not_followed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(code_digest, "_content", lambda cell: None)


def constants_do_not_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(code_digest, "_constant", lambda value: None)


def torch_is_as_it_came(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(code_digest._Walk, "_read_module", lambda *_: None)


def code_is_looked_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(code_digest._Walk, "holds", lambda *_: True)


@pytest.mark.parametrize(
    ("edit", "mutant"),
    [
        (what_a_wrapper_wraps, captured_functions_are_not_followed),
        (a_constant_in_a_function, constants_do_not_count),
        (a_function_of_torch, torch_is_as_it_came),
        (a_method_of_a_class, code_is_looked_at_once),
    ],
    ids=lambda part: part.__name__,
)
def test_notices_a_broken_build(edit: Edit, mutant: Edit, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        test_an_edit_is_seen_by_who_looks_now_and_by_who_looked_before(edit)


def comments_and_docstrings(patch: pytest.MonkeyPatch) -> None:
    rotate = another(modeling_llama.rotate_half, '"""Rotates', '"""Turns')
    patch.setattr(modeling_llama, "rotate_half", rotate)
    norm = modeling_llama.LlamaRMSNorm
    patch.setattr(norm, "forward", another(norm.forward, "input_dtype = ", "# as they come\n\n        input_dtype = "))


def a_version_number(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(transformers, "__version__", "5.99.0")


def a_function_that_it_does_not_use(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(modeling_llama, "LlamaForSequenceClassification", None)


def an_attention_that_is_not_selected(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(AttentionInterface._global_mapping, "flash_attention_2", a_version_number)


@pytest.mark.parametrize(
    "edit",
    [comments_and_docstrings, a_version_number, a_function_that_it_does_not_use, an_attention_that_is_not_selected],
    ids=lambda edit: edit.__name__,
)
def test_what_computes_nothing_does_not_count(edit: Edit, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(family_path("llama")).model
    before = digest(model)
    edit(monkeypatch)
    assert digest(model) == before


DIGESTS = """
import sys
from pathlib import Path
from kvire.models import code_digest
from kvire.models.code_digest import ModelCode
from kvire.models.loaded_state import loaded_state
from kvire.models.loader import load_model
model = load_model(Path(sys.argv[1])).model
print(ModelCode(model, also={}).current(), loaded_state(model))
"""


def test_another_process_finds_the_same() -> None:
    path = family_path("gemma3_text")
    model = load_model(path).model
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    told = subprocess.run(
        [sys.executable, "-c", DIGESTS, str(path)], env=environment, capture_output=True, text=True, check=True
    ).stdout.split()
    assert told == [digest(model), loaded_state(model)]


@pytest.mark.parametrize("family", FAMILIES)
def test_running_changes_neither_code_nor_state(family: str) -> None:
    model = family_model(family)
    code = ModelCode(model, also={})
    before = code.current(), loaded_state(model)
    with torch.inference_mode():
        model(torch.arange(40)[None], use_cache=True)
    assert (code.current(), loaded_state(model)) == before
    assert digest(model) == before[0]


def a_number(model) -> None:
    model.model.layers[1].self_attn.scaling *= 3


def a_buffer(model) -> None:
    model.model.rotary_emb.inv_freq *= 1.5


def a_matrix_turned(model) -> None:
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.data = weight.data.flip(0)


@pytest.mark.parametrize("change", [a_number, a_buffer, a_matrix_turned], ids=lambda change: change.__name__)
def test_what_loading_made_otherwise_is_seen(change: Callable) -> None:
    model = load_model(family_path("llama")).model
    before = loaded_state(model)
    change(model)
    assert loaded_state(model) != before


def test_the_place_of_a_checkpoint_is_no_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").symlink_to(family_path("llama"), target_is_directory=True)
    one, other = (load_model(path).model for path in (family_path("llama"), tmp_path / "elsewhere"))
    assert loaded_state(one) == loaded_state(other)
