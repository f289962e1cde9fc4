"""`kvire store ls`."""

from typing import Annotated

import typer

from kvire.cli.options import Json
from kvire.cli.store import show
from kvire.cli.store.options import KeyFile, Where
from kvire.cli.store.place import late_progress, opened


def ls(
    where: Where = None,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's blocks.", show_default=False)] = None,
    limit: Annotated[int, typer.Option(help="Chains shown of each namespace, those used last.", min=1)] = 20,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Stored prompts: chains of blocks by namespace, with size, last use and pins.

    A key names the last block of a chain, and with it all before; `pin` takes it. Two prompts that
    begin alike share blocks, which are counted for both. The text cannot be seen: keys are digests.
    """
    with opened(where, key_file) as place, late_progress() as report:
        tag = None if tenant is None else place.tag_of(tenant)
        values = show.listing_values(place, place.survey(report), tag, limit)
    (show.print_json if as_json else show.print_listing)(values)
