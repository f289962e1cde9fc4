"""The `kvire` command: a table of all commands, each declared in a file of its own."""

import sys
from importlib.metadata import version as installed_version
from typing import Annotated

import typer
from rich.markup import escape

from kvire.cli.display import console
from kvire.cli.lazy import Declared, group
from kvire.core.errors import KvireError

STORE = {
    "ls": Declared("kvire.cli.store.ls", "ls"),
    "stat": Declared("kvire.cli.store.stat", "stat"),
    "verify": Declared("kvire.cli.store.verify", "verify"),
    "scrub": Declared("kvire.cli.store.verify", "scrub"),
    "gc": Declared("kvire.cli.store.gc", "gc"),
    "pin": Declared("kvire.cli.store.pin", "pin"),
    "unpin": Declared("kvire.cli.store.pin", "unpin"),
    "forget": Declared("kvire.cli.store.forget", "forget"),
    "clear": Declared("kvire.cli.store.forget", "clear"),
    "warm": Declared("kvire.cli.store.warm", "warm"),
}
STORE_HELP = (
    "Look after a store of computed blocks: a folder, or a URL such as redis://host:6379 or s3://bucket/prefix. "
    "All commands may run beside a server that uses it."
)
MODELS = {
    "ls": Declared("kvire.cli.models", "ls"),
    "show": Declared("kvire.cli.models", "show"),
    "pull": Declared("kvire.cli.models", "pull"),
    "gc": Declared("kvire.cli.models", "gc"),
}
MODELS_HELP = "List, fetch and describe models."
BENCH_HELP = "Measure what the cache is worth: the same questions with their KV in each place, and nowhere."
store = typer.Typer(
    cls=group(STORE), no_args_is_help=True, add_completion=False, rich_markup_mode="rich", help=STORE_HELP
)
models = typer.Typer(
    cls=group(MODELS), no_args_is_help=True, add_completion=False, rich_markup_mode="rich", help=MODELS_HELP
)
for each in (store, models):
    each.callback()(lambda: None)

COMMANDS = {
    "generate": Declared("kvire.cli.generate", "generate"),
    "chat": Declared("kvire.cli.chat.command", "chat"),
    "serve": Declared("kvire.cli.serve", "serve"),
    "plan": Declared("kvire.cli.plan.command", "plan"),
    "doctor": Declared("kvire.cli.doctor", "doctor"),
    "replay": Declared("kvire.cli.replay.command", "replay"),
    "bench": Declared("kvire.cli.bench.command", "bench", BENCH_HELP),
    "models": Declared("kvire.cli.main", "models", MODELS_HELP),
    "store": Declared("kvire.cli.main", "store", STORE_HELP),
}
cli = typer.Typer(
    cls=group(COMMANDS),
    name="kvire",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Run a language model whose KV cache is computed once, kept, and found again by exact token prefix.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(installed_version("kvire"))
        raise typer.Exit


@cli.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Options of every command."""


def app() -> None:
    """Run the command.

    A mistake of the user's ends with a message and status 2, not with a traceback.
    """
    try:
        cli()
    except KvireError as error:
        console.print(f"[bold red]kvire:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    app()
