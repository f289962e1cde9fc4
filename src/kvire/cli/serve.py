"""`kvire serve`: a model behind an OpenAI-compatible API."""

from typing import Annotated, Any

import typer

from kvire.cli import options as opt
from kvire.cli.display import LoadProgress, console
from kvire.cli.lazy import deferred
from kvire.cli.store_config import store_config
from kvire.server.options import ServerOptions

server = deferred("kvire.server.run")


@opt.with_options(engine=opt.ENGINE | opt.SERVING, store=opt.STORE)
def serve(
    model: opt.ModelName,
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
    *,
    engine: dict[str, Any],
    store: dict[str, Any],
) -> None:
    """Serve a model: /v1/chat/completions, /v1/completions, /v1/models, /health and /metrics.

    Every answer's usage says how many prompt tokens came from the cache. Computed KV is kept on
    disk, sealed, so that the next start is warm (--no-store: it is not).
    """
    options = ServerOptions(
        host=host,
        port=port,
        api_keys=tuple(api_key or ()),
        served_name=served_name,
        request_timeout_s=request_timeout,
    )
    with LoadProgress() as progress:
        server.serve(
            model,
            options,
            progress=progress,
            store=store_config(store, engine, default=True),
            say=lambda line: console.print(line, markup=False, soft_wrap=True),
            **engine,
        )
