"""Every form of a model's name, and what is said when it leads nowhere."""

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from kvire.core.errors import ModelNotFoundError, UnsupportedModelError
from kvire.models.resolve import model_name, resolve

from .tiny import make_tiny
from .tiny_gguf import make_gguf


def test_a_directory_is_itself(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "model")
    assert resolve(str(folder)) == folder


def test_a_directory_wins_over_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny("llama", tmp_path / "smollm2")
    monkeypatch.chdir(tmp_path)
    assert resolve("smollm2") == Path("smollm2")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nonsense", r"not an embedded model \(smollm2, gemma3-270m\).*kvire models ls"),
        ("./missing", "no file or directory missing"),
        ("missing.gguf", r"no file or directory missing\.gguf"),
        ("org/missing.gguf", r"no file or directory"),
        ("a/b/c", "not a hub id"),
    ],
)
def test_nowhere(name: str, words: str) -> None:
    with pytest.raises(ModelNotFoundError, match=words):
        resolve(name)


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelNotFoundError, match=r"no \.gguf"):
        resolve(str(tmp_path / "model.bin"))


def test_an_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        resolve(str(tmp_path))


def test_what_people_call_it(tmp_path: Path) -> None:
    assert model_name(tmp_path / "my-model") == "my-model"
    assert model_name(tmp_path / "models--org--name" / "snapshots" / "0a1b") == "org/name"
    assert model_name(resolve(str(make_gguf(tmp_path / "tiny.gguf")))) == "tiny"


class _Hub:
    """A hub that answers with an error, or with a folder; what is in its cache; what it was asked for."""

    def __init__(self, online: Exception | Path, cached: Path | None = None) -> None:
        self.online, self.cached, self.asked = online, cached, []

    def __call__(self, name: str, *, local_files_only: bool = False, **options: object) -> str:
        self.asked.append(options | {"offline": local_files_only})
        if local_files_only:
            if self.cached is None:
                raise LocalEntryNotFoundError("not cached")
            return str(self.cached)
        if isinstance(self.online, Exception):
            raise self.online
        return str(self.online)


def _hub(monkeypatch: pytest.MonkeyPatch, online: Exception | Path, cached: Path | None = None) -> _Hub:
    hub = _Hub(online, cached)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    return hub


def test_the_hubs_cache_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny("llama", tmp_path / "snapshot")
    hub = _hub(monkeypatch, RuntimeError("must not go online"), folder)
    assert resolve("org/model") == folder
    assert [asked["offline"] for asked in hub.asked] == [True]


def test_a_download_fetches_no_pickles_and_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny("llama", tmp_path / "snapshot")
    hub = _hub(monkeypatch, folder)
    assert resolve("org/model") == folder
    for asked in hub.asked:
        wanted = asked["allow_patterns"]
        assert "*.safetensors" in wanted
        assert not any(bad in pattern for pattern in wanted for bad in (".bin", ".pt", ".py", ".ckpt"))


def test_only_pickles_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    _hub(monkeypatch, tmp_path)
    with pytest.raises(UnsupportedModelError, match="no safetensors"):
        resolve("org/model")


class _Response:
    """As much of an HTTP answer as the hub's errors look at."""

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.request, self.status_code = None, 403


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (LocalEntryNotFoundError("no network"), "cannot be reached.*hf download org/model.*kvire models ls"),
        (ConnectionError("refused"), "cannot be reached"),
        (GatedRepoError("gated", response=_Response()), "gated: accept its terms"),
        (RepositoryNotFoundError("gone", response=_Response()), "no model org/model, or it is private"),
        (RuntimeError("odd"), "RuntimeError: odd"),
    ],
)
def test_what_went_wrong_on_the_hub(monkeypatch: pytest.MonkeyPatch, error: Exception, words: str) -> None:
    _hub(monkeypatch, error)
    with pytest.raises(ModelNotFoundError, match=words):
        resolve("org/model")
