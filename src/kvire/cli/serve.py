"""`kvire serve`: a model behind an OpenAI-compatible API."""

from typing import Annotated

import typer

from kvire.cli import options as opt
from kvire.cli.display import LoadProgress, console


def serve(
    model: opt.Model,
    host: Annotated[
        str, typer.Option(help="Address to listen on; one that others can reach needs an API key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Key that clients must send; may be repeated. Better set KVIRE_API_KEY: other users of this "
            "machine can see command lines.",
            show_default=False,
        ),
    ] = None,
    served_name: Annotated[
        str | None, typer.Option(help="The model's name in the API, by default MODEL.", show_default=False)
    ] = None,
    request_timeout: Annotated[float, typer.Option(help="Seconds that one request may take.")] = 600.0,
    max_queue: Annotated[int, typer.Option(help="Requests that may wait; more are answered 429.")] = 256,
    kv_dtype: opt.KvDtype = "float32",
    kv_memory: opt.KvMemory = "auto",
    block_size: opt.BlockSize = 16,
    prefix_cache: opt.PrefixCache = True,
    max_model_len: opt.MaxModelLen = None,
    max_batch_tokens: opt.MaxBatchTokens = 512,
    max_num_seqs: opt.MaxNumSeqs = 32,
    attention: opt.Attention = "auto",
    deterministic: opt.Deterministic = False,
    kv_cache: opt.KvCache = "paged",
    device: opt.Device = "auto",
) -> None:
    """Serve a model: /v1/chat/completions, /v1/completions, /v1/models, /health and /metrics.

    Every answer's usage says how many prompt tokens came from the cache.
    """
    engine = opt.engine_options(locals()) | {"max_queue": max_queue}
    from kvire.server.options import ServerOptions  # noqa: PLC0415  (--help must not wait for torch)
    from kvire.server.run import serve as run  # noqa: PLC0415

    options = ServerOptions(
        host=host,
        port=port,
        api_keys=tuple(api_key or ()),
        served_name=served_name,
        request_timeout_s=request_timeout,
    )
    with LoadProgress() as progress:
        run(
            model,
            options,
            progress=progress,
            say=lambda line: console.print(line, markup=False, soft_wrap=True),
            **engine,
        )
