"""G2: twelve and more single changes, each across a restart, over every kind of tier: nothing is taken over.

Each change has its other half: built again as it was, and built again as changed, an engine finds everything.
"""

import inspect
import json
import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from harness.differential import poison
from harness.engines import BLOCK, words
from harness.families import family_path
from harness.loads import PATIENT_S, ask_as
from harness.stored import disk, memory, say_what_prefill_costs, shared_folder, store_over
from harness.waiting import PATIENCE_S
from store.servers import redis_server
from transformers.models.llama import modeling_llama

from kvire.attention.cpu import native_available
from kvire.codec.frame import Frames
from kvire.core.config import EngineConfig
from kvire.core.keys import Namespace
from kvire.core.report import MissReason
from kvire.engine.build import build_engine
from kvire.engine.engine import Engine
from kvire.models import loader
from kvire.store.remote.open import open_remote
from kvire.store.tiered import TieredStore

PROMPT = words(2, 12 * 32 + 3)  # so long that every change of block size leaves whole blocks


@dataclass(frozen=True)
class Change:
    """One thing that is not as it was.

    options: of the engine.
    files: how the model's folder is changed.
    release: what another release of transformers makes of the model that it loads.
    namespace: what no option reaches.
    """

    options: Mapping[str, object] = field(default_factory=dict)
    files: Callable[[Path], None] | None = None
    release: Callable[[torch.nn.Module], None] | None = None
    namespace: Mapping[str, object] = field(default_factory=dict)
    tenant: str = ""
    cache_salt: str = ""


def one_weight(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    weights["model.layers.0.self_attn.k_proj.weight"][3, 5] += 2.0**-8
    safetensors.torch.save_file(weights, path, metadata={"format": "pt"})


def set_in_config(**values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def rotary_in_half_precision(model: torch.nn.Module) -> None:
    """Positions are turned by a module whose source says something else."""
    source = inspect.getsource(modeling_llama.LlamaRotaryEmbedding.forward)
    changed = textwrap.dedent(source).replace("cos = emb.cos()", "cos = emb.half().cos().float()")
    assert changed != textwrap.dedent(source)
    names = dict(vars(modeling_llama))
    exec(changed, names)
    rotary = model.model.rotary_emb
    rotary.__class__ = type("LlamaRotaryEmbedding", (type(rotary),), {"forward": names["forward"]})


def scaled_queries(model: torch.nn.Module) -> None:
    """The same code; a number that it computes with comes out otherwise."""
    for layer in model.model.layers:
        layer.self_attn.scaling *= 1.01


def another_release(make_otherwise: Callable[[torch.nn.Module], None]) -> Callable[..., torch.nn.Module]:
    load = loader._load_model

    def other(*arguments: object) -> torch.nn.Module:
        model = load(*arguments)
        make_otherwise(model)
        return model

    return other


CHANGES = {
    "one weight": Change(files=one_weight),
    "a field of the config": Change(files=set_in_config(rms_norm_eps=1e-4)),
    "rotary": Change(files=set_in_config(rope_parameters={"rope_type": "default", "rope_theta": 5000.0})),
    "a field that nobody knows": Change(files=set_in_config(made_up=1)),
    "float16 pool": Change({"kv_dtype": "float16"}),
    "bfloat16 pool": Change({"kv_dtype": "bfloat16"}),
    "int8 pool": Change({"kv_dtype": "int8"}),
    "block size": Change({"block_size": 2 * BLOCK}),
    "deterministic": Change({"deterministic": True}),
    "kernels": Change({"attention": "native"}),
    "a release with another rotary": Change(release=rotary_in_half_precision),
    "a release with another scale": Change(release=scaled_queries),
    "tenant": Change(tenant="somebody"),
    "cache salt": Change(cache_salt="salt"),
    "shape": Change(namespace={"spec": "full layers=0,1,2 heads=1 k=32 v=32 window=0"}),
    "adapter": Change(namespace={"adapter": "0" * 64}),
    "shard": Change(namespace={"shard": "1/2"}),
    "layout version": Change(namespace={"layout_version": 99}),
}
SAME = Change()


class Builder:
    """Builds each engine's model once; every restart is an engine of its own over it, with an empty pool."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._built: dict[str, Engine] = {}

    def restarted(self, name: str, store: TieredStore) -> Engine:
        if name not in self._built:
            self._built[name] = self._build(name)
        like = self._built[name]
        engine = Engine(
            like.model, like.paged, like.config, like.namespace, max_model_len=like.max_model_len,
            vocab_size=like.vocab_size, store=store,
        )  # fmt: skip
        say_what_prefill_costs(engine, PATIENT_S)
        if like.config.kv_dtype != "int8":
            poison(engine)
        return engine

    def _build(self, name: str) -> Engine:
        change, model = CHANGES.get(name, SAME), self._folder / name
        shutil.copytree(family_path("llama"), model)
        if change.files is not None:
            change.files(model)
        options = {"block_size": BLOCK, "kv_memory": "2MiB", "attention": "portable"} | change.options
        with pytest.MonkeyPatch.context() as patch:
            if change.release is not None:
                patch.setattr(loader, "_load_model", another_release(change.release))
            engine, _ = build_engine(str(model), EngineConfig.from_options(options))
        engine.namespace = replace(engine.namespace, **change.namespace)
        return engine


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    return Builder(tmp_path_factory.mktemp("models"))


@contextmanager
def opener(kind: str, folder: Path) -> Iterator[Callable[[], "contextmanager[TieredStore]"]]:
    """A call that opens the store again on what it held, of that kind of tier alone."""
    if kind == "redis":
        with redis_server(folder / "redis") as port:
            url = f"redis://127.0.0.1:{port}/0"
            tiers = lambda _, keyring: [(open_remote(url, timeout_s=PATIENCE_S), Frames(keyring.tenant))]
            yield lambda: store_over(tiers, folder)
    elif kind == "memory":  # it cannot outlive its process; engines come and go over it
        with store_over(memory, folder) as store:

            @contextmanager
            def again() -> Iterator[TieredStore]:
                yield store

            yield again
    else:
        tiers = {"disk": disk, "file://": shared_folder}[kind]
        yield lambda: store_over(tiers, folder)


@pytest.mark.parametrize("kind", ["memory", "disk", "redis", "file://"])
def test_nothing_is_taken_over_across_a_change_and_everything_without_one(
    kind: str, tmp_path: Path, builder: Builder
) -> None:
    names = ["as it was", *(name for name in CHANGES if name != "kernels" or native_available())]
    assert len(names) > 12
    with opener(kind, tmp_path) as opened:

        def reused(name: str) -> int:
            change = CHANGES.get(name, SAME)
            with opened() as store:
                engine = builder.restarted(name, store)
                report = ask_as(engine, PROMPT, tenant=change.tenant, cache_salt=change.cache_salt, max_tokens=2).cache
                assert store.flush(30)
                assert report.reused_tokens or report.miss in (MissReason.NEVER_STORED, MissReason.OTHER_NAMESPACE)
                assert report.reused_tokens <= (len(PROMPT) - 1) // engine.pool.block_size * engine.pool.block_size
            return report.reused_tokens

        first = {name: reused(name) for name in names}
        assert first == dict.fromkeys(names, 0), "each of them differs from all before it"
        second = {name: reused(name) for name in names}
        assert all(tokens >= 0.99 * (len(PROMPT) - 3) for tokens in second.values()), second


def test_the_changes_reach_every_field_of_a_namespace(tmp_path: Path, builder: Builder) -> None:
    reached = set()
    with store_over(memory, tmp_path) as store:
        base = builder.restarted("as it was", store)
        for name, change in CHANGES.items():
            if name == "kernels" and not native_available():
                continue
            engine = builder.restarted(name, store)
            salts = [e.reuse.name(c.tenant, c.cache_salt).salt for e, c in ((base, SAME), (engine, change))]
            mine, other = (replace(e.namespace, salt=salt) for e, salt in zip((base, engine), salts, strict=True))
            differing = {f.name for f in fields(Namespace) if getattr(mine, f.name) != getattr(other, f.name)}
            # what another option or file makes of the model is seen in the build, too; a release is seen there alone
            told = differing if change.release is not None else differing - {"build"}
            assert len(told) == 1, (name, differing)
            reached |= told
    assert reached == {f.name for f in fields(Namespace)}
