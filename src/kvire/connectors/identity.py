"""The namespace of a checkpoint's KV as another engine computes and lays it out.

Blocks are raw bytes of the engine's own cache, so its name and version, its kernels and its layout
    are part of the
namespace: an engine reads only blocks of the same engine.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvire.core.errors import ModelNotFoundError
from kvire.core.keys import Namespace
from kvire.models.fingerprint import config_digest, weights_digest

WEIGHT_PATTERNS = ("*.safetensors", "*.gguf", "*.bin", "*.pt", "*.pth")


def files_with_weights(model: Path) -> tuple[Path, ...]:
    """Every weight file that an engine might read of a checkpoint, by name.

    It is `model` itself, or the files in that folder.

    Raises ModelNotFoundError if there is none.
    """
    if model.is_file():
        return (model,)
    found = sorted({path for pattern in WEIGHT_PATTERNS for path in model.glob(pattern)})
    if not found:
        raise ModelNotFoundError(
            f"{model} holds no weight files ({', '.join(WEIGHT_PATTERNS)}), so it cannot be told which model its KV "
            "belongs to; use a checkpoint with its weights in one local folder"
        )
    return tuple(found)


def connector_namespace(
    model: Path | Sequence[Path],
    config: Mapping[str, Any],
    *,
    engine: str,
    numerics: str,
    kv_dtype: str,
    spec: str,
    block_size: int,
    shard: str = "",
    adapter: str = "",
) -> Namespace:
    """The namespace of the KV that `engine` computes from a checkpoint.

    Its salt is the tenant's, and is set later.

    model: the checkpoint's folder, or its weight files.
    config: the model config in force; values that JSON does not know count by their text.
    engine: name and version of everything that computes.
    numerics: device, attention kernel, compute dtype and everything else that changes bits.
    spec: text of a block's layout.

    The files are read once; later their digests are remembered.
    """
    files = files_with_weights(model) if isinstance(model, Path) else tuple(model)
    plain = json.loads(json.dumps(dict(config), default=str, sort_keys=True))
    return Namespace(
        weights=weights_digest(files),
        config=config_digest(plain),
        numerics=numerics,
        kv_dtype=kv_dtype,
        spec=spec,
        block_size=block_size,
        adapter=adapter,
        shard=shard,
        build=engine,
    )
