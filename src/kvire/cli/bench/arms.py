"""From the options of `kvire bench` to its settings and servers."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvire.bench.arm import Arm
from kvire.bench.arms.kvire_repeat import KvireArm
from kvire.bench.arms.url import UrlArm, check_states
from kvire.bench.client import Endpoint, first_model
from kvire.bench.metrics import Slo
from kvire.bench.run import new_nonce
from kvire.bench.settings import Settings
from kvire.bench.states import TierState
from kvire.bench.work.tokens import token_ids
from kvire.bench.work.traces import TraceScale
from kvire.cli.display import LoadProgress
from kvire.core.errors import ConfigError
from kvire.store.place import default_store

LETTERS = "ABCDEFGH"  # names of arms
DEFAULT_MODEL = "smollm2"
LEAST_TIMEOUT_S, MOST_TIMEOUT_S = 0.1, 86_400.0
KEYS = ("--api-key", "--against-key")
SECRET_IN_URL = re.compile(r"(?<=://)[^\s/@]*@")
Given = Mapping[str, Any]


def settings_of(given: Given) -> Settings:
    """Raises ConfigError for a value that cannot work."""
    return Settings(
        workloads=() if given["workload"] == "none" else _words(given["workload"]),
        contexts=_numbers("--context", given["context"]),
        at_once=_numbers("--concurrency", given["concurrency"]),
        states=_states(given),
        nonce=new_nonce(),
        repeats=given["repeats"],
        scripts=given["scripts"],
        output_tokens=given["output_tokens"],
        seed=given["seed"],
        rate_per_s=given["rate"],
        slo=Slo.parse(given["slo"]),
        trace=given["trace"],
        trace_scale=TraceScale(given["scale"], given["speed"], given["requests"]),
    )


def arms_of(given: Given, settings: Settings) -> dict[str, Arm]:
    """The servers, by letter. Raises ConfigError, ModelNotFoundError or UnsupportedModelError."""
    if not LEAST_TIMEOUT_S <= given["timeout"] <= MOST_TIMEOUT_S:
        raise ConfigError(f"--timeout lies between {LEAST_TIMEOUT_S:g} and {MOST_TIMEOUT_S:g} seconds")
    if given["url"] is not None:
        if given["model"] or given["options"] or given["store"] or given["remote"]:
            raise ConfigError(
                "--model, --options, --store and --remote are for the built-in engine; leave them out with --url, "
                "whose model --served-name names"
            )
        arms: list[Arm] = [_foreign(given, given["url"], given["api_key"], settings)]
    else:
        models, stores = _words(given["model"] or "") or (DEFAULT_MODEL,), _words(given["store"] or "")
        arms = [
            _built_in(given, model, Path(store).expanduser(), given["options"], settings)
            for model in models
            for store in stores or (str(default_store().parent),)
        ]
    if given["against"] is not None:
        arms.append(_second(given, settings, len(arms)))
    if len(arms) > len(LETTERS):
        raise ConfigError(f"{len(arms)} combinations of model and store are more than the {len(LETTERS)} of one run")
    return dict(zip(LETTERS, arms, strict=False))


def without_secrets(words: Sequence[str]) -> list[str]:
    """A command line for a public report: without keys, and names and passwords in addresses."""
    told = []
    for before, word in zip(("", *words), words, strict=False):
        name, sign, _ = word.partition("=")
        hidden = "..." if before in KEYS else f"{name}=..." if sign and name in KEYS else word
        told.append(SECRET_IN_URL.sub("...@", hidden))
    return told


def check_outputs(*paths: Path | None) -> None:
    """Fail before ten minutes of measuring, not after, if a file cannot be written."""
    for path in paths:
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise ConfigError(f"cannot write {path}: name a file in a folder that exists")


def _second(given: Given, settings: Settings, others: int) -> Arm:
    if others > 1:
        raise ConfigError("--against needs one arm to compare with: name one model and one store")
    against = given["against"]
    if given["url"] is not None and against.rstrip("/") == given["url"].rstrip("/"):
        raise ConfigError("--against is the same server as --url: it would meet its own KV, and nothing would be cold")
    if against.startswith(("http://", "https://")):
        return _foreign(given, against, given["against_key"], settings)
    if given["url"] is not None:
        raise ConfigError("--against takes options of `kvire serve` only beside the built-in engine; give it a URL")
    place = Path(given["store"]).expanduser() if given["store"] else default_store().parent
    return _built_in(given, given["model"] or DEFAULT_MODEL, place, against, settings)


def _built_in(given: Given, model: str, place: Path, options: str, settings: Settings) -> KvireArm:
    with LoadProgress() as progress:
        encode = token_ids(model, progress)
    try:
        words = tuple(shlex.split(options))
    except ValueError as error:
        raise ConfigError(f"the options {options!r} cannot be read: {error}") from error
    return KvireArm(
        model=model,
        settings=settings,
        encode=encode,
        place=place,
        options=words,
        remote=given["remote"],
        timeout_s=given["timeout"],
    )


def _foreign(given: Given, url: str, key: str | None, settings: Settings) -> UrlArm:
    check_states(settings.states)
    there = Endpoint(url.rstrip("/"), given["served_name"] or "", key, given["timeout"])
    if not there.model:
        there = Endpoint(there.url, first_model(there), there.api_key, there.timeout_s)
    return UrlArm(there, settings, _fields(given["no_reuse"]))


def _fields(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--no-reuse is a JSON object, got {text!r}: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"--no-reuse is a JSON object, got {text!r}")
    return fields


def _states(given: Given) -> tuple[TierState, ...]:
    """The states asked for, else the states that every arm has."""
    if given["state"] is not None:
        letters = given["state"].replace(",", "").replace(" ", "").upper()
        try:
            return tuple(dict.fromkeys(TierState(letter) for letter in letters))
        except ValueError:
            raise ConfigError(f"--state takes the letters of E, G, R, D, N, W and Z; got {given['state']!r}") from None
    if given["url"] is not None:
        return (TierState.E, TierState.W, TierState.Z)
    against = given["against"] or ""
    if against.startswith(("http://", "https://")):
        return (TierState.E, TierState.W, TierState.Z)
    if "--no-store" in (*given["options"].split(), *against.split()):
        return (TierState.E, TierState.G, TierState.Z)
    remote = (TierState.N,) if given["remote"] is not None else ()
    return (TierState.E, TierState.G, TierState.R, TierState.D, *remote, TierState.Z)


def _words(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(int(word) for word in _words(text)))
    except ValueError:
        raise ConfigError(f"{option} takes whole numbers separated by commas, got {text!r}") from None
