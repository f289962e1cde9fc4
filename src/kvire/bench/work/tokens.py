"""Token ids of prompts as the built-in engine will see them, by the model's own tokenizer and chat
template.
"""

from functools import lru_cache

from kvire.bench.work.ideal import Spell, Units
from kvire.bench.work.prompts import BenchPrompt, message
from kvire.core.errors import ConfigError, RequestError
from kvire.models.chat import encode_chat
from kvire.models.progress import Progress
from kvire.models.resolve import resolve

REMEMBERED = 4096  # prompts: each is needed several times


def token_ids(model: str, progress: Progress | None = None) -> Spell:
    """Encodes prompts.

    Fetches or converts the model if it is not here yet; does not load its weights.

    Raises ModelNotFoundError, UnsupportedModelError, or ConfigError for a model that is not made to
    chat.
    """
    from transformers import AutoTokenizer  # noqa: PLC0415  (a second that foreign servers need not spend)

    tokenizer = AutoTokenizer.from_pretrained(str(resolve(model, progress=progress)))
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(f"{model} has no chat template, and the bench asks in chats: choose a model made to chat")

    @lru_cache(REMEMBERED)
    def encode(conversation: tuple[tuple[str, str], ...]) -> Units:
        return encode_chat(tokenizer, [message(role, content) for role, content in conversation])

    def spell(prompt: BenchPrompt) -> Units:
        try:
            return encode(tuple((turn["role"], turn["content"]) for turn in prompt.messages))
        except RequestError as error:
            raise ConfigError(f"{model} cannot be asked like this: {error}") from error

    return spell
