"""Options that several `kvire store` commands share."""

from pathlib import Path
from typing import Annotated

import typer

from kvire.cli.display import console

Where = Annotated[
    str | None,
    typer.Argument(metavar="STORE", help="A folder or URL; by default the folder that serve and chat use."),
]
WhereOption = Annotated[
    str | None,
    typer.Option("--store", help="A folder or URL; by default the folder that serve and chat use.", show_default=False),
]
KeyFile = Annotated[
    Path | None, typer.Option(help="The file with the keys of the seal; yours by default.", show_default=False)
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Tenant = Annotated[
    str,
    typer.Option(
        help="The tenant, as `kvire store stat` names it; by default the one of all requests without an API key.",
        show_default=False,
    ),
]
Keys = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY",
        help="Keys of blocks, or their first digits, as `kvire store ls` shows them; each stands for its whole chain.",
    ),
]
NamespaceOption = Annotated[
    str | None, typer.Option("--namespace", help="All blocks of a namespace (its first digits).", show_default=False)
]
PromptFile = Annotated[
    Path | None, typer.Option("--prompt", help="The blocks of the prompt in this file.", show_default=False)
]
PromptModel = Annotated[str | None, typer.Option("--model", help="The model that --prompt is for.", show_default=False)]
RawPrompt = Annotated[bool, typer.Option("--raw", help="Take the prompt as it is, without the model's chat template.")]


def go_on(question: str) -> None:
    """Continue only if the user agrees."""
    console.print(question, markup=False, soft_wrap=True)
    typer.confirm("Go on?", abort=True, err=True)
