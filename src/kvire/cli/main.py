"""The `kvire` command."""

import sys
from typing import Annotated

import typer
from rich.markup import escape

from kvire.cli.bench import bench
from kvire.cli.chat import chat
from kvire.cli.display import console
from kvire.cli.doctor import doctor
from kvire.cli.generate import generate
from kvire.cli.models import models
from kvire.cli.plan import EPILOG as PLAN_EPILOG
from kvire.cli.plan import plan
from kvire.cli.replay import EPILOG as REPLAY_EPILOG
from kvire.cli.replay import replay
from kvire.cli.serve import serve
from kvire.cli.store import store
from kvire.core.errors import KvireError

cli = typer.Typer(
    name="kvire",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Run a language model whose KV cache is computed once, kept, and found again by exact token prefix.",
)
cli.command()(generate)
cli.command()(chat)
cli.command()(serve)
cli.command(epilog=PLAN_EPILOG)(plan)
cli.command()(doctor)
cli.command(epilog=REPLAY_EPILOG)(replay)
cli.add_typer(bench, name="bench")
cli.add_typer(models, name="models")
cli.add_typer(store, name="store")


def _print_version(wanted: bool) -> None:
    if wanted:
        from kvire import __version__  # noqa: PLC0415  (reading it takes time that other commands need not spend)

        typer.echo(__version__)
        raise typer.Exit


@cli.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """What holds for every command."""


def app() -> None:
    """Run the command; a mistake of the user's ends with a message and status 2, not with a traceback."""
    try:
        cli()
    except KvireError as error:
        console.print(f"[bold red]kvire:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    app()
