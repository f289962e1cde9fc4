"""`kvire store`: look at a store, check it, tidy it, and remove what should not be kept."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kvire.cli import options as opt
from kvire.cli.display import console
from kvire.core.errors import ConfigError

store = typer.Typer(
    no_args_is_help=True,
    help="Look after a store of computed blocks: a folder, or a URL such as redis://host:6379 or s3://bucket/prefix. "
    "All commands may run beside a server that uses it.",
)
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
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
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
Raw = Annotated[bool, typer.Option("--raw", help="Take the prompt as it is, without the model's chat template.")]


@store.command("ls")
def ls(
    where: Where = None,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's blocks.", show_default=False)] = None,
    limit: Annotated[int, typer.Option(help="Chains shown of each namespace, those used last.", min=1)] = 20,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Stored prompts: chains of blocks by namespace, with size, last use and pins.

    A key names the last block of a chain, and with it all before; `pin` takes it. Two prompts that begin alike share
    blocks, which are counted for both. What was said cannot be seen: keys are digests.
    """
    from kvire.cli import store_look  # noqa: PLC0415  (what opens stores takes a moment to load; --help must not wait)

    store_look.ls(where, key_file, tenant=tenant, limit=limit, as_json=as_json)


@store.command("stat")
def stat(where: Where = None, key_file: KeyFile = None, as_json: Json = False) -> None:
    """Totals, limit and health; what each tenant takes; and which engine may read which blocks.

    An engine reads a namespace's blocks only if every field shown is exactly its own.
    """
    from kvire.cli import store_look  # noqa: PLC0415

    store_look.stat(where, key_file, as_json=as_json)


@store.command("verify")
def verify(
    where: Where = None,
    sample: Annotated[
        int | None, typer.Option(help="Check only so many blocks, taken at random.", min=1, show_default=False)
    ] = None,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Read blocks and check them with the keys at hand. Removes nothing; the exit status is 1 if any is damaged.

    Without its tenant's key only a sealed block's header and length can be checked.
    """
    from kvire.cli import store_look  # noqa: PLC0415

    store_look.check(where, key_file, sample=sample, remove=False, as_json=as_json)


@store.command("scrub")
def scrub(where: Where = None, key_file: KeyFile = None, as_json: Json = False) -> None:
    """Read every block, check it with the keys at hand, and remove the damaged ones.

    What a newer version of Kvire wrote, or others sealed, stays.
    """
    from kvire.cli import store_look  # noqa: PLC0415

    store_look.check(where, key_file, sample=None, remove=True, as_json=as_json)


@store.command("gc")
def gc(
    where: Where = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    unreadable: Annotated[
        bool,
        typer.Option(
            "--unreadable",
            help="Also what no key in your key file opens: of forgotten tenants, but also of others who share the "
            "store with keys of their own.",
        ),
    ] = False,
    older_builds: Annotated[
        bool,
        typer.Option(
            "--older-builds",
            help="Also blocks of older builds: computed by other software than the blocks used last, with all else "
            "the same, or by a version of Kvire that did not say.",
        ),
    ] = False,
    ttl: Annotated[
        float | None,
        typer.Option(
            help="Also what was not used for so many seconds (in an object store: written longer ago).",
            min=1,
            show_default=False,
        ),
    ] = None,
    yes: Yes = False,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Remove what no request can find: expired blocks, blocks whose beginning is gone, leftovers of crashes.

    Pinned blocks stay. A folder does not shrink by it: its room is used for the next blocks.
    """
    from kvire.cli import store_tidy  # noqa: PLC0415

    store_tidy.gc(
        where,
        key_file,
        dry_run=dry_run,
        unreadable=unreadable,
        older_builds=older_builds,
        ttl_s=ttl,
        confirm=None if yes else _ask,
        as_json=as_json,
    )


@store.command("pin")
def pin(
    keys: Keys = None,
    where: WhereOption = None,
    namespace: NamespaceOption = None,
    prompt: PromptFile = None,
    model: PromptModel = None,
    raw: Raw = False,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Keep blocks: they are neither evicted nor expire until `unpin`, `forget` or `clear`.

    With KEY, everything before it is pinned, too, since it is of no use alone. Pinned blocks take room from all
    others. In Redis and object stores a pin ends expiry; what the server evicts for want of memory is its own setting.
    """
    from kvire.cli import store_tidy  # noqa: PLC0415

    chosen = store_tidy.Choice(keys or [], namespace, prompt, model, raw)
    store_tidy.pin(where, key_file, chosen, pinned=True, as_json=as_json)


@store.command("unpin")
def unpin(
    keys: Keys = None,
    where: WhereOption = None,
    namespace: NamespaceOption = None,
    prompt: PromptFile = None,
    model: PromptModel = None,
    raw: Raw = False,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Let pinned blocks go when room is needed. Blocks that other pinned ones build on stay pinned."""
    from kvire.cli import store_tidy  # noqa: PLC0415

    chosen = store_tidy.Choice(keys or [], namespace, prompt, model, raw)
    store_tidy.pin(where, key_file, chosen, pinned=False, as_json=as_json)


@store.command("forget")
def forget(
    where: Where = None, tenant: Tenant = "", yes: Yes = False, key_file: KeyFile = None, as_json: Json = False
) -> None:
    """Destroy a tenant's key, and remove its blocks and sessions from this store.

    What the key sealed cannot be read again, wherever copies of it are: in other stores, too, whose room comes back
    with `gc --unreadable`. Not promised: that nothing is left of the key file's old content in snapshots, journals,
    worn flash or backups; that unsealed blocks (--no-encrypt) are gone from such places; and what running servers
    hold in memory: restart them.
    """
    from kvire.cli import store_tidy  # noqa: PLC0415

    store_tidy.forget(where, key_file, tenant, confirm=None if yes else _ask, as_json=as_json)


@store.command("clear")
def clear(where: Where = None, yes: Yes = False, key_file: KeyFile = None, as_json: Json = False) -> None:
    """Remove every block, of all tenants, pinned ones too, and look whether they are gone.

    Keys and sessions stay (see forget). A server that runs keeps what is in its memory, and may store it again.
    """
    from kvire.cli import store_tidy  # noqa: PLC0415

    store_tidy.clear(where, key_file, confirm=None if yes else _ask, as_json=as_json)


@store.command("warm")
@opt.shared(engine=opt.ENGINE, store=opt.STORE)
def warm(
    model: opt.Model,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be repeated.", show_default=False)] = None,
    file: Annotated[
        list[Path] | None,
        typer.Option("--file", "-f", help="A file with a prompt; may be repeated.", show_default=False),
    ] = None,
    raw: Raw = False,
    tenant: Tenant = "",
    as_json: Json = False,
    *,
    engine: dict[str, Any],
    store: dict[str, Any],
) -> None:
    """Compute prompts now and store them, so that the first request that begins like one finds it.

    Only an engine with the same model, KV dtype, block size, device and attention finds the blocks: give the options
    that it runs with.
    """
    if not prompt and not file:
        raise ConfigError("say what to compute: --prompt TEXT or --file FILE; both may be repeated")
    from kvire.cli.store_warm import warm as run  # noqa: PLC0415  (torch takes seconds)

    run(model, prompt or [], file or [], raw=raw, tenant=tenant, engine=engine, store=store, as_json=as_json)


def _ask(question: str) -> None:
    """Go on only if the user says so."""
    console.print(question, markup=False, soft_wrap=True)
    typer.confirm("Go on?", abort=True, err=True)
