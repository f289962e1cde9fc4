"""The real work of a generate() call: the tokens in the cache, and the prompt's time."""

import time
from types import TracebackType
from typing import Any, Self

import torch
import transformers
from torch import Tensor

from kvire.core.errors import GenerationError


class Computed:
    """Watches a model's forward while it runs on `cache`.

    The cache holds the first `start` tokens of the prompt.
    """

    def __init__(self, model: Any, cache: Any, prompt: list[int], start: int) -> None:
        self._model = model
        self._cache = cache
        self._prompt = prompt
        self._start = start
        self._fed: list[Tensor] = []  # [tokens] each
        self._began: list[float] = []  # start of each; then the end of all
        self._held = start  # tokens

    def __enter__(self) -> Self:
        self._hook = self._model.register_forward_pre_hook(self._before, with_kwargs=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._hook.remove()
        self._began.append(time.perf_counter())

    def token_ids(self, limit: int | None) -> list[int]:
        """Tokens whose KV the cache holds, at most `limit`."""
        fed = torch.cat(self._fed).tolist() if self._fed else []
        tokens: list[int] = self._prompt[: self._start] + fed
        return tokens[: self._cache.get_seq_length()][:limit]

    def prefill(self) -> tuple[int, int, float] | None:
        """(first token, tokens, seconds) computed of the prompt; None if unknown."""
        done, count = 0, len(self._prompt) - self._start
        for ids, after in zip(self._fed, self._began[1:], strict=False):
            done += len(ids)
            if done == count:
                return self._start, count, after - self._began[0]
        return None

    def _before(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises GenerationError if anything but the prompt's next tokens would be computed."""
        if not any(value is self._cache for value in (*args, *kwargs.values())):
            return
        ids = kwargs.get("input_ids")
        rest = self._prompt[self._held :]
        if (
            ids is None
            or len(ids) != 1
            or self._cache.get_seq_length() != self._held
            or (rest and ids[0].tolist() != rest[: ids.shape[1]])
        ):
            raise GenerationError(
                f"transformers {transformers.__version__} was about to compute other tokens than those that follow the "
                "KV at hand: call the model's own generate(), and report this"
            )
        self._began.append(time.perf_counter())
        self._fed.append(ids[0])
        self._held += ids.shape[1]
