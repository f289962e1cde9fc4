"""Options that several commands share, so that each is described once."""

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from kvire.core import dtypes
from kvire.store.remote.scheme import examples

ModelName = Annotated[
    str,
    typer.Argument(
        help="A transformers directory, a .gguf file, a hub id (org/name), or an embedded model: smollm2, gemma3-270m.",
        show_default=False,
    ),
]

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_ENGINE, _STORE, _SAMPLING = "Engine", "Store", "Sampling"


def _option(kind: Any, help_text: str, panel: str, **more: Any) -> Any:
    return Annotated[kind, typer.Option(help=help_text, rich_help_panel=panel, **more)]


# Fields of EngineConfig: name -> (type and help, default).
ENGINE: dict[str, tuple[Any, Any]] = {
    "kv_dtype": (
        _option(str, f"Dtype of the pool: {dtypes.names()}.", _ENGINE),
        "float32",
    ),
    "kv_memory": (
        _option(str, "Size of the KV pool, such as 2GiB; auto takes half of the free memory.", _ENGINE),
        "auto",
    ),
    "block_size": (_option(int, "Tokens per block, the granularity of reuse.", _ENGINE), 16),
    "prefix_cache": (_option(bool, "Remember the blocks of finished requests and reuse them.", _ENGINE), True),
    "max_model_len": (
        _option(
            int | None,
            "Longest prompt and answer together, in tokens; by default the limit of model and pool.",
            _ENGINE,
            show_default=False,
        ),
        None,
    ),
    "attention": (_option(str, "auto, native (C++ kernels) or portable (no compiler needed).", _ENGINE), "auto"),
    "deterministic": (
        _option(bool, "The same bits for any cache content and any other requests; slower, float32 only.", _ENGINE),
        False,
    ),
    "kv_cache": (
        _option(
            str,
            "paged; contiguous (reserves max-model-len per answer) and off (recomputes every step) show what paging "
            "and caching are worth.",
            _ENGINE,
        ),
        "paged",
    ),
    "weights": (
        _option(
            str,
            "Form of the weights in memory: float32; file (a GGUF's own blocks, 16-bit numbers as they are) or int8, "
            "which take less and decode faster. auto is float32 today.",
            _ENGINE,
        ),
        "auto",
    ),
    "device": (_option(str, "Where model and pool live: auto (a GPU if there is one), cpu or cuda.", _ENGINE), "auto"),
}
# Options that matter only with many requests at once.
SERVING: dict[str, tuple[Any, Any]] = {
    "max_batch_tokens": (_option(int, "Tokens computed in one step at most.", _ENGINE), 512),
    "max_num_seqs": (_option(int, "Answers written at once at most.", _ENGINE), 32),
    "max_queue": (_option(int, "Requests that may wait; more are answered 429.", _ENGINE), 256),
}
# The store below the pool (cli/store_config.py).
STORE: dict[str, tuple[Any, Any]] = {
    "store": (
        _option(
            Path | None,
            "Folder that keeps computed blocks on disk, for the next start; serve and chat have one by default.",
            _STORE,
            show_default=False,
        ),
        None,
    ),
    "disk_size": (
        _option(
            str | None,
            "Limit of that folder's size; a new one gets 20 GB, or a tenth of the free space if that is less.",
            _STORE,
            show_default=False,
        ),
        None,
    ),
    "ram": (
        _option(
            str | None, "Size of a store in memory, beside the pool; none by default.", _STORE, show_default=False
        ),
        None,
    ),
    "remote": (
        _option(
            list[str] | None,
            f"A store that several machines share: {examples()}; may be repeated.",
            _STORE,
            show_default=False,
        ),
        None,
    ),
    "encrypt": (_option(bool, "Seal blocks outside this process with AES-256-GCM.", _STORE), True),
    "key_file": (
        _option(Path | None, "The file with the keys of the seal; yours by default.", _STORE, show_default=False),
        None,
    ),
    "store_ttl": (
        _option(
            float | None, "Seconds that a block is kept unused; by default while there is room.", _STORE,
            show_default=False,
        ),
        None,
    ),
    "no_store": (_option(bool, "Keep nothing outside the engine.", _STORE), False),
}  # fmt: skip
SAMPLING: dict[str, tuple[Any, Any]] = {
    "max_tokens": (_option(int, "Longest answer, in tokens.", _SAMPLING, min=1), 256),
    "temperature": (_option(float, "0 always takes the likeliest token; 1 samples as the model says.", _SAMPLING), 0.0),
    "top_p": (_option(float, "Keep the likeliest tokens that hold this much probability.", _SAMPLING), 1.0),
    "top_k": (_option(int, "Keep the K likeliest tokens; 0 keeps all.", _SAMPLING), 0),
    "min_p": (_option(float, "Keep tokens at least this share of the likeliest.", _SAMPLING), 0.0),
    "seed": (
        _option(int | None, "With it, sampling gives the same answer every time.", _SAMPLING, show_default=False),
        None,
    ),
}


def with_options(**groups: dict[str, tuple[Any, Any]]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of `groups`, each passed as one dict under its name."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in signature(command).parameters.values() if p.name not in groups]
        more = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for group in groups.values()
            for name, (kind, default) in group.items()
        ]

        @wraps(command)
        def run(**values: Any) -> None:
            given = {title: {name: values.pop(name) for name in group} for title, group in groups.items()}
            command(**values, **given)

        run.__signature__ = Signature([p.replace(kind=Parameter.KEYWORD_ONLY) for p in own] + more)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in [*own, *more]}
        return run

    return decorate
