"""Models from the Hugging Face hub: its local cache first, the network only for missing files."""

import re
from collections.abc import Callable
from pathlib import Path

from kvire.core.errors import KvireError, ModelNotFoundError, UnsupportedModelError
from kvire.models.checkpoint import open_checkpoint

# Weights as safetensors, and the text files around them. Never *.bin, *.pt or *.py.
WANTED = ("*.safetensors", "*.json", "tokenizer.model", "*.jinja", "*.txt", "*.tiktoken")
# Some repositories hold the same weights a second time, in their vendor's layout.
UNWANTED = ("original/*", "consolidated*", "*/*")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_id(name: str) -> bool:
    """Whether a name has the form org/name."""
    return _HUB_ID.fullmatch(name) is not None


def find_in_hub(name: str, *, download: bool = True) -> Path:
    """Local folder of a hub model.

    Raises ModelNotFoundError with the cause (unknown, gated, no network), and UnsupportedModelError
    for a model with only pickled weights.
    """
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - slow to import, and seldom needed
    from huggingface_hub.errors import LocalEntryNotFoundError  # noqa: PLC0415

    if (cached := _cached(name)) is not None:
        return cached
    if not download:
        raise ModelNotFoundError(f"{name} is not in the hub's local cache. Fetch it: kvire models pull {name}")
    try:
        folder = Path(snapshot_download(name, allow_patterns=list(WANTED), ignore_patterns=list(UNWANTED)))
    except LocalEntryNotFoundError as error:
        raise ModelNotFoundError(_no_network(name)) from error
    except Exception as error:  # the hub client raises errors of its HTTP library as well as its own
        raise ModelNotFoundError(_explained(name, error)) from error
    if not any(folder.glob("*.safetensors")):
        raise UnsupportedModelError(
            f"{name} has no safetensors weights on the hub. Pickled weights can run code hidden in them, so Kvire "
            "never loads them: look for a safetensors conversion of the model."
        )
    return folder


def find_config_in_hub(name: str, say: Callable[[str], None]) -> Path:
    """config.json of a hub model, without its weights.

    say: called before the network is asked, which takes time.

    Raises ModelNotFoundError.
    """
    from huggingface_hub import hf_hub_download  # noqa: PLC0415
    from huggingface_hub.errors import LocalEntryNotFoundError  # noqa: PLC0415

    try:
        return Path(hf_hub_download(name, "config.json", local_files_only=True))
    except LocalEntryNotFoundError:
        say(f"asking the hub for the config of {name}")
    try:
        return Path(hf_hub_download(name, "config.json"))
    except LocalEntryNotFoundError as error:
        raise ModelNotFoundError(_no_network(name)) from error
    except Exception as error:  # the hub client raises errors of its HTTP library as well as its own
        raise ModelNotFoundError(_explained(name, error)) from error


def _cached(name: str) -> Path | None:
    """A complete local snapshot; None: there is none, or only part of one."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError  # noqa: PLC0415

    try:
        folder = Path(
            snapshot_download(name, allow_patterns=list(WANTED), ignore_patterns=list(UNWANTED), local_files_only=True)
        )
        open_checkpoint(folder)
    except (LocalEntryNotFoundError, HfHubHTTPError, ModelNotFoundError):
        return None
    except KvireError:  # complete, and refused: the caller meets the reason when it opens the folder
        return folder
    return folder


def _explained(name: str, error: Exception) -> str:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError  # noqa: PLC0415

    if isinstance(error, GatedRepoError):
        return (
            f"{name} is gated: accept its terms on huggingface.co, then log in (hf auth login, or HF_TOKEN), and retry"
        )
    if isinstance(error, RepositoryNotFoundError):
        return f"the hub has no model {name}, or it is private: check the name, or log in (hf auth login, or HF_TOKEN)"
    if any(word in type(error).__name__ for word in ("Connect", "Timeout")):
        return _no_network(name)
    return f"fetching {name} from the hub failed: {type(error).__name__}: {error}"


def _no_network(name: str) -> str:
    return (
        f"{name} is not in the hub's local cache, and the hub cannot be reached (no network, or HF_HUB_OFFLINE is "
        f"set). On a machine with network: hf download {name}, then copy the folder here and pass its path. "
        "Or use an embedded model: kvire models ls."
    )
