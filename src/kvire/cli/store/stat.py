"""`kvire store stat`."""

from kvire.cli.options import Json
from kvire.cli.store import show
from kvire.cli.store.options import KeyFile, Where
from kvire.cli.store.place import late_progress, opened


def stat(where: Where = None, key_file: KeyFile = None, as_json: Json = False) -> None:
    """Totals, limit and health; the share of each tenant; and which engine may read which blocks.

    An engine reads a namespace's blocks only if every field shown is exactly its own.
    """
    with opened(where, key_file) as place, late_progress() as report:
        values = show.stat_values(place, place.survey(report))
    (show.print_json if as_json else show.print_stat)(values)
