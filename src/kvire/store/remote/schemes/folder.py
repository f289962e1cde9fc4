"""file:///folder, a folder that several machines share; memory:// for trials."""

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import SplitResult, unquote

from kvire.core.errors import ConfigError
from kvire.store.remote.backend import Backend


class Folder:
    """Objects as files of a folder, or in this process."""

    schemes = ("file", "memory")
    example = "file:///folder"
    bytes_per_s = 500e6  # docs/adr/0014-remote-tiers.md

    def make(self, url: SplitResult, name: str, options: Mapping[str, str]) -> Backend:
        """Makes the folder if there is none."""
        try:
            from obstore.store import MemoryStore  # noqa: PLC0415 - optional

            from kvire.store.remote.objects import FolderBackend, ObjectBackend  # noqa: PLC0415 - needs it
        except ImportError:
            raise ConfigError(f"{name} needs the package obstore: pip install 'kvire[s3]'") from None
        if options or url.netloc:
            raise ConfigError(f"{name}: write file:///folder or memory://, without host and options")
        if url.scheme == "memory":
            return ObjectBackend(MemoryStore())
        try:
            return FolderBackend(Path(unquote(url.path)))
        except OSError as error:
            raise ConfigError(f"{name}: this is no folder that can be used: {error}") from error


SCHEME = Folder()
