"""`kvire store pin` and `unpin`."""

from dataclasses import dataclass
from pathlib import Path

from kvire.cli.lazy import deferred
from kvire.cli.options import Json
from kvire.cli.store import show
from kvire.cli.store.options import KeyFile, Keys, NamespaceOption, PromptFile, PromptModel, RawPrompt, WhereOption
from kvire.cli.store.place import OpenedStore, late_progress, opened
from kvire.core.errors import ConfigError, StoreError
from kvire.core.keys import BlockKey
from kvire.core.record import BlockId
from kvire.models.progress import Progress
from kvire.store.survey import Survey
from kvire.store.tier import Entry

prompts = deferred("kvire.cli.store.prompt")


@dataclass(frozen=True, slots=True)
class BlockChoice:
    """The blocks to pin: by KEY, by namespace, or by prompt. Exactly one of them."""

    keys: list[str]
    namespace: str | None
    prompt: Path | None
    model: str | None
    raw: bool

    def check(self) -> None:
        """Raises ConfigError."""
        if sum(map(bool, (self.keys, self.namespace, self.prompt))) != 1:
            raise ConfigError("say which blocks: KEY..., --namespace, or --prompt FILE with --model; one of them")
        if (self.prompt is None) != (self.model is None):
            raise ConfigError("--prompt FILE and --model MODEL go together: the model's tokenizer makes the keys")

    def of_prompt(self, place: OpenedStore, report: Progress) -> set[BlockKey]:
        """Keys of the prompt's blocks; none without a prompt."""
        if self.prompt is None or self.model is None:
            return set()
        [text] = prompts.read_prompts([], [self.prompt]).values()
        keys: set[BlockKey] = prompts.prompt_keys(place, self.model, text, raw=self.raw, report=report)
        return keys

    def entries(self, survey: Survey, prompt_keys: set[BlockKey]) -> list[Entry]:
        """The blocks that are here. Raises StoreError."""
        if self.namespace is not None:
            return survey.space(self.namespace).entries
        if self.prompt is not None:
            found = [entry for entry in survey.entries if entry.id.key in prompt_keys]
            if not found:
                raise StoreError("no block of this prompt is stored here: kvire store warm computes and stores them")
            return found
        chains = [(space, space.path(key)) for space, key in map(survey.find, self.keys)]
        by_id = {entry.id: entry for space, path in chains for key in path for entry in space.blocks[key]}
        return list(by_id.values())


def pin(
    keys: Keys = None,
    where: WhereOption = None,
    namespace: NamespaceOption = None,
    prompt: PromptFile = None,
    model: PromptModel = None,
    raw: RawPrompt = False,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Keep blocks: they are neither evicted nor expire until `unpin`, `forget` or `clear`.

    With KEY, everything before it is pinned, too, since it is of no use alone. Pinned blocks take
    room from all others. In Redis and object stores a pin ends expiry; eviction for lack of memory
    is the server's own setting.
    """
    chosen = BlockChoice(keys or [], namespace, prompt, model, raw)
    _mark(where, key_file, chosen, pinned=True, as_json=as_json)


def unpin(
    keys: Keys = None,
    where: WhereOption = None,
    namespace: NamespaceOption = None,
    prompt: PromptFile = None,
    model: PromptModel = None,
    raw: RawPrompt = False,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Let pinned blocks be evicted when room is needed.

    Blocks before other pinned ones stay pinned.
    """
    chosen = BlockChoice(keys or [], namespace, prompt, model, raw)
    _mark(where, key_file, chosen, pinned=False, as_json=as_json)


def _mark(where: str | None, key_file: Path | None, chosen: BlockChoice, *, pinned: bool, as_json: bool) -> None:
    """Pin or unpin."""
    chosen.check()
    with opened(where, key_file) as place, late_progress() as report:
        of_prompt = chosen.of_prompt(place, report)
        survey = place.survey(report)
        entries = chosen.entries(survey, of_prompt)
        kept = set() if pinned else _needed_by_pinned(survey, entries)
        changed = place.pin([entry for entry in entries if entry.id not in kept], report, pinned=pinned)
    values = {
        "store": place.name,
        "blocks": changed,
        "bytes": sum(entry.frame_bytes for entry in entries),
        "still_pinned": len(kept),
        "prompt_blocks_missing": len(of_prompt - {entry.id.key for entry in entries}),
    }
    if as_json:
        show.print_json(values)
        return
    print(f"{place.name}: {changed:,} blocks {'pinned' if pinned else 'unpinned'}")
    if kept:
        print(f"{len(kept):,} stay pinned: other pinned blocks build on them")
    if pinned and values["prompt_blocks_missing"]:
        print(
            f"{values['prompt_blocks_missing']:,} blocks of the prompt are not stored here: kvire store warm adds them"
        )


def _needed_by_pinned(survey: Survey, chosen: list[Entry]) -> set[BlockId]:
    """Chosen blocks that come before pinned ones outside the choice."""
    ids = {entry.id for entry in chosen}
    needed = {
        key
        for space in survey.spaces
        for entry in space.entries
        if entry.pinned and entry.id not in ids
        for key in space.path(entry.id.key)
    }
    return {block_id for block_id in ids if block_id.key in needed}
