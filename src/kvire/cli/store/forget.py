"""`kvire store forget` and `clear`."""

import time

from kvire.cli.options import Json
from kvire.cli.store import show
from kvire.cli.store.options import KeyFile, Tenant, Where, Yes, go_on
from kvire.cli.store.place import AT_ONCE, late_progress, opened, sessions_of
from kvire.core.errors import StoreError

WRITERS_S = 2.0  # time for running servers to write blocks computed before a tenant was forgotten


def forget(
    where: Where = None, tenant: Tenant = "", yes: Yes = False, key_file: KeyFile = None, as_json: Json = False
) -> None:
    """Destroy a tenant's key, and remove its blocks and sessions from this store.

    Blocks sealed with the key can never be read again, in any copy: other stores get their room
    back with `gc --unreadable`. Not promised: that no old content of the key file is left in
    snapshots, journals, worn flash or backups; that unsealed blocks (--no-encrypt) are gone from
    such places; and the memory of running servers: restart them.
    """
    with opened(where, key_file) as place, late_progress() as report:
        tag = place.tag_of(tenant)
        theirs = [entry for entry in place.entries(report) if entry.tenant_tag == tag]
        if not yes:
            go_on(
                f"This destroys the key of the {show.tenant_name({'tenant': tenant})} in {place.keyring.path}, and "
                f"removes its {len(theirs):,} blocks and all its sessions from {place.name}. There is no way back."
            )
        place.keyring.forget(tenant)
        sessions = sessions_of(place).delete_tenant(tag) if place.folder is not None else 0
        removed = place.patiently(lambda: place.tier.delete_tenant(tag))
        time.sleep(WRITERS_S)
        roots = {entry.root for entry in theirs}
        late = [entry for entry in place.entries(report) if entry.tenant_tag == tag or entry.root in roots]
        removed += place.delete(late, "forgotten", report)
        left = sum(entry.tenant_tag == tag for entry in place.entries(report))
    if left:
        raise StoreError(
            f"the key is destroyed, but {left:,} of its blocks are still in {place.name}, unreadable: "
            "kvire store gc --unreadable removes them"
        )
    values = {"store": place.name, "tenant": tenant, "blocks": removed, "sessions": sessions}
    if as_json:
        show.print_json(values)
        return
    print(f"{place.name}: key destroyed, {removed:,} blocks and {sessions:,} sessions removed")
    print("not covered: the memory of running servers, and backups or snapshots of the key file or of unsealed blocks")


def clear(where: Where = None, yes: Yes = False, key_file: KeyFile = None, as_json: Json = False) -> None:
    """Remove every block, of all tenants, pinned ones too, and check that they are gone.

    Keys and sessions stay (see forget). A running server keeps the blocks in its memory, and may
    store them again.
    """
    with opened(where, key_file) as place, late_progress() as report:
        ids = [entry.id for entry in place.entries(report)]
        if not yes:
            go_on(f"This removes all {len(ids):,} blocks from {place.name}, of every tenant and whoever stored them.")
        removed = place.patiently(place.tier.clear)
        left = 0
        for start in range(0, len(ids), AT_ONCE):
            left += sum(place.tier.held(ids[start : start + AT_ONCE]))
            report("looking for what is left", min(start + AT_ONCE, len(ids)), len(ids))
    if left:
        raise StoreError(
            f"{left:,} blocks are in {place.name} again: somebody who is running stores them; end that, and clear again"
        )
    values = {"store": place.name, "removed": removed, "left": left}
    if as_json:
        show.print_json(values)
    else:
        print(f"{place.name}: {removed:,} blocks removed, and none of them is found any more")
