"""The tokenizer of a GGUF, equal to the model's own tokenizer.json.

transformers builds it from the vocabulary and merges; the rest is completed here, since a nearly
right tokenizer gives other tokens, silently. Vocabularies with unknown rules are refused.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import decoders, normalizers, pre_tokenizers

from kvire.core.errors import UnsupportedModelError
from kvire.models.gguf.header import GgufHeader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# tokenizer.ggml.pre of the byte-level vocabularies whose splitting rules are known (llama.cpp names
# them; the rules are those of the models' own tokenizer.json).
LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
QWEN2 = ("qwen2", "deepseek-r1-qwen")
SMOLLM = ("smollm",)


def check_tokenizer(header: GgufHeader) -> None:
    """Raise UnsupportedModelError unless the tokenizer is of a kind that is known to convert
    right.
    """
    model, splitting = header.get("tokenizer.ggml.model"), header.get("tokenizer.ggml.pre")
    if not header.count("tokenizer.ggml.tokens"):
        raise UnsupportedModelError("the GGUF has no vocabulary: it is damaged, or only a part of a model")
    known = (*LLAMA3, *QWEN2, *SMOLLM)
    if model == "gpt2" and splitting not in known:
        raise UnsupportedModelError(
            f"the GGUF splits text by the rules {splitting!r}, which are not known here (known: {', '.join(known)}). "
            "Use the model's safetensors checkpoint, which brings its tokenizer."
        )
    if model == "llama" and header.architecture == "gemma3" and header.get("tokenizer.ggml.add_space_prefix"):
        raise UnsupportedModelError(
            "the GGUF puts a space before a text (add_space_prefix), which a gemma3 tokenizer does not: use the "
            "safetensors checkpoint"
        )
    if model not in ("gpt2", "llama"):
        raise UnsupportedModelError(f"tokenizer {model!r} in a GGUF is not supported: use the safetensors checkpoint")


def tokenizer_from_gguf(path: Path, header: GgufHeader) -> "PreTrainedTokenizerFast":
    """A tokenizer that save_pretrained can write.

    path: the GGUF that `header` was read from.
    """
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - imports torch

    splitting = header.get("tokenizer.ggml.pre")
    options: dict[str, Any] = {}
    if splitting in LLAMA3 and header.get("tokenizer.ggml.add_bos_token") is None:
        options["add_bos_token"] = True  # older files leave it out; the models were trained with it
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name, **options)
    if header.get("tokenizer.ggml.add_eos_token"):
        tokenizer.add_eos_token = False  # a prompt is not the end of the text
    _complete_rules(tokenizer.backend_tokenizer, splitting)
    if header.get("tokenizer.ggml.model") == "llama" and header.get("tokenizer.ggml.add_space_prefix") is False:
        _without_first_space(tokenizer.backend_tokenizer)
    return tokenizer


def _without_first_space(backend: Any) -> None:
    """Keep texts unchanged; transformers would add a space before each, and remove it again."""
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


def _complete_rules(backend: Any, splitting: str | None) -> None:
    """Set the rules that the GGUF only names, and transformers leaves at GPT-2's."""
    if splitting in SMOLLM:
        # Digits one by one before GPT-2's split: "  5" is two spaces and 5, not a space and " 5".
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    elif splitting in QWEN2:
        backend.normalizer = normalizers.NFC()
    elif splitting in LLAMA3:
        backend.model.ignore_merges = True  # a word that is in the vocabulary is one token
