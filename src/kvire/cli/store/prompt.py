"""The stored blocks of a prompt.

Needs the model's tokenizer and digests, and so transformers.
"""

from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from kvire.cli.store.place import OpenedStore
from kvire.core.errors import ConfigError, StoreError, UnsupportedModelError
from kvire.core.keys import BlockKey, Namespace, block_keys
from kvire.models.chat import encode_chat
from kvire.models.checkpoint import open_checkpoint
from kvire.models.families import max_positions
from kvire.models.fingerprint import config_digest, weights_digest
from kvire.models.progress import Progress
from kvire.models.resolve import resolve
from kvire.models.rope import fix_longrope


def prompt_keys(place: OpenedStore, model: str, text: str, *, raw: bool, report: Progress) -> set[BlockKey]:
    """Keys of the prompt's full blocks, in each noted namespace of the model with a known tenant.

    A namespace is the model's if weights and config are; its other fields are taken from the note,
    and the digest of all must be the namespace's own.

    Raises StoreError if there is none.
    """
    path = resolve(model, progress=report)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        config: Any = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise UnsupportedModelError(f"{path} has no tokenizer or config that transformers can load: {error}") from error
    fix_longrope(config, max_positions(config))
    digests = {
        "weights": weights_digest(open_checkpoint(path).shards, report),
        "config": config_digest(config.to_dict()),
    }
    if raw or not getattr(tokenizer, "chat_template", None):
        ids = tuple(tokenizer(text)["input_ids"])
    else:
        ids = encode_chat(tokenizer, [{"role": "user", "content": text}])
    found = [
        namespace
        for root, noted in place.notes().items()
        if noted.items() >= digests.items() and (namespace := _known(place, root, noted)) is not None
    ]
    if not found:
        raise StoreError(
            f"{place.name} has noted no namespace of {model} whose tenant's key is at hand, so the prompt's blocks "
            "cannot be told: store some with this model first (kvire store warm), or name blocks by KEY or --namespace"
        )
    return {key for namespace in found for key in block_keys(namespace.root, ids, namespace.block_size)}


def read_prompts(texts: list[str], files: list[Path]) -> dict[str, str]:
    """The prompts by name. Raises ConfigError."""
    prompts = {f"prompt {number}": text for number, text in enumerate(texts, 1)}
    for path in files:
        try:
            prompts[str(path)] = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from error
    return prompts


def _known(place: OpenedStore, root: BlockKey, noted: dict[str, str]) -> Namespace | None:
    """The noted namespace, with its tenant's salt; None if that tenant's key is missing."""
    given: dict[str, Any] = {f.name: noted[f.name] for f in fields(Namespace) if f.name in noted}
    try:
        bare = Namespace(**given | {name: int(noted[name]) for name in ("block_size", "layout_version")})
    except (KeyError, TypeError, ValueError):
        return None  # noted by a version with other fields
    salted = (bare.with_salt(place.keyring.tenant(name).salt) for name in place.tenants.values())
    return next((namespace for namespace in salted if namespace.root == root), None)
