"""Options that several commands share, so that each is described once."""

from typing import Annotated, Any

import typer

Model = Annotated[
    str,
    typer.Argument(
        help="A transformers directory, a .gguf file, a hub id (org/name), or an embedded model: smollm2, gemma3-270m.",
        show_default=False,
    ),
]

_ENGINE = "Engine"
KvDtype = Annotated[
    str,
    typer.Option(
        help="What the pool keeps: float32, float16 (half the bytes), bfloat16 or int8 (about a quarter).",
        rich_help_panel=_ENGINE,
    ),
]
KvMemory = Annotated[
    str,
    typer.Option(help="Size of the KV pool, such as 2GiB; auto takes half of what is free.", rich_help_panel=_ENGINE),
]
BlockSize = Annotated[int, typer.Option(help="Tokens per block, the granularity of reuse.", rich_help_panel=_ENGINE)]
PrefixCache = Annotated[
    bool, typer.Option(help="Remember the blocks of finished requests and reuse them.", rich_help_panel=_ENGINE)
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        help="Longest prompt and answer together, in tokens; by default what the model and the pool allow.",
        rich_help_panel=_ENGINE,
        show_default=False,
    ),
]
MaxBatchTokens = Annotated[int, typer.Option(help="Tokens computed in one step at most.", rich_help_panel=_ENGINE)]
MaxNumSeqs = Annotated[int, typer.Option(help="Answers written at once at most.", rich_help_panel=_ENGINE)]
Attention = Annotated[
    str, typer.Option(help="auto, native (C++ kernels) or portable (no compiler needed).", rich_help_panel=_ENGINE)
]
Deterministic = Annotated[
    bool,
    typer.Option(
        help="The same bits whatever is cached and whoever else is served; slower, float32 only.",
        rich_help_panel=_ENGINE,
    ),
]
KvCache = Annotated[
    str,
    typer.Option(
        help="paged; contiguous (reserves max-model-len per answer) and off (recomputes every step) show what paging "
        "and caching are worth.",
        rich_help_panel=_ENGINE,
    ),
]
Device = Annotated[
    str,
    typer.Option(help="Where model and pool live: auto (a GPU if there is one), cpu or cuda.", rich_help_panel=_ENGINE),
]

_SAMPLING = "Sampling"
MaxTokens = Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.", rich_help_panel=_SAMPLING)]
Temperature = Annotated[
    float,
    typer.Option(help="0 always takes the likeliest token; 1 samples as the model says.", rich_help_panel=_SAMPLING),
]
TopP = Annotated[
    float, typer.Option(help="Keep the likeliest tokens that hold this much probability.", rich_help_panel=_SAMPLING)
]
TopK = Annotated[int, typer.Option(help="Keep the K likeliest tokens; 0 keeps all.", rich_help_panel=_SAMPLING)]
MinP = Annotated[
    float, typer.Option(help="Keep tokens at least this share of the likeliest.", rich_help_panel=_SAMPLING)
]
Seed = Annotated[
    int | None,
    typer.Option(
        help="With it, sampling gives the same answer every time.", rich_help_panel=_SAMPLING, show_default=False
    ),
]


def engine_options(values: dict[str, Any]) -> dict[str, Any]:
    """Those of a command's arguments that belong to EngineConfig."""
    names = (
        "kv_dtype",
        "kv_memory",
        "block_size",
        "prefix_cache",
        "max_model_len",
        "max_batch_tokens",
        "max_num_seqs",
        "attention",
        "deterministic",
        "kv_cache",
        "device",
    )
    return {name: values[name] for name in names if name in values}
