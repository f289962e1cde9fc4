"""The next turn begins with the very ids of the last one, wherever the history still says what they say."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvire.models.chat import ChatPrompt, continue_chat, encode_chat

SPECIAL = ("<|start|>", "<|end|>", "<|return|>")
PLAIN = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ CONTENT }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
VERBATIM = PLAIN.replace("CONTENT", "m['content']")
TRIMMED = PLAIN.replace("CONTENT", "m['content'] | trim")
# As Qwen's: reasoning is shown only in the answer that is being written.
FORGETFUL = PLAIN.replace("CONTENT", "m['content'].split('</think>')[-1]")


def tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Bytes, and five merges: "sunset" is one token, and its parts together say the same."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("s", "u"), ("su", "n"), ("s", "e"), ("se", "t"), ("sun", "set")]
    vocab = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    inner = Tokenizer(models.BPE(vocab, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return finished(inner, template)


def spaced_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Writes a space before every text it is given, as Llama 2's does, and takes it away again."""
    chars = sorted(set("▁abcdefghijklmnopqrstuvwxyz\n"))
    inner = Tokenizer(models.BPE({token: i for i, token in enumerate([*chars, "he"])}, [("h", "e")]))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    inner.decoder = decoders.Metaspace(prepend_scheme="always", split=False)
    return finished(inner, template)


def finished(inner: Tokenizer, template: str) -> PreTrainedTokenizerFast:
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>")
    made.chat_template = template
    return made


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def ids_of(made, *tokens: str) -> tuple[int, ...]:
    return tuple(made.convert_tokens_to_ids(list(tokens)))


FIRST = [user("say sunset")]


def test_the_first_turn_is_what_the_template_says():
    made = tokenizer(VERBATIM)
    assert continue_chat(made, FIRST, ()) == ChatPrompt(encode_chat(made, FIRST), 0)


def test_an_answer_in_its_canonical_tokens_is_continued():
    made = tokenizer(VERBATIM)
    known = encode_chat(made, FIRST) + ids_of(made, "sunset", "<|end|>")
    messages = [*FIRST, assistant("sunset"), user("again")]
    assert continue_chat(made, messages, known) == ChatPrompt(encode_chat(made, messages), 0)


def test_an_answer_in_other_tokens_keeps_them():
    made = tokenizer(VERBATIM)
    known = encode_chat(made, FIRST) + ids_of(made, "sun", "set", "<|end|>")
    messages = [*FIRST, assistant("sunset"), user("again")]
    prompt = continue_chat(made, messages, known)
    assert prompt.tokens_lost == 0
    assert prompt.token_ids[: len(known)] == known != encode_chat(made, messages)[: len(known)]
    assert made.decode(prompt.token_ids) == made.decode(encode_chat(made, messages))


def test_an_answer_that_was_cut_off_inside_a_character_keeps_its_bytes():
    made = tokenizer(VERBATIM)
    half = tuple(made("é", add_special_tokens=False)["input_ids"][:1])
    known = encode_chat(made, FIRST) + half
    messages = [*FIRST, assistant(made.decode(half)), user("go on")]
    assert messages[1]["content"] == "\ufffd"
    prompt = continue_chat(made, messages, known)
    assert prompt.token_ids[: len(known)] == known
    assert prompt.tokens_lost == 0


def test_an_end_that_the_history_writes_otherwise_costs_one_token():
    """gpt-oss ends an answer with <|return|>; its template then says <|end|>."""
    made = tokenizer(VERBATIM)
    known = encode_chat(made, FIRST) + ids_of(made, "sun", "set", "<|return|>")
    prompt = continue_chat(made, [*FIRST, assistant("sunset"), user("again")], known)
    assert prompt.token_ids[: len(known)] == known[:-1] + ids_of(made, "<|end|>")
    assert prompt.tokens_lost == 1


def test_s25_a_template_that_drops_reasoning_is_followed_and_says_what_that_costs():
    made = tokenizer(FORGETFUL)
    answer = tuple(made("<think>of evening</think>sunset", add_special_tokens=False)["input_ids"])
    begun = encode_chat(made, FIRST)
    known = begun + answer + ids_of(made, "<|end|>")
    messages = [*FIRST, assistant("<think>of evening</think>sunset"), user("again")]
    prompt = continue_chat(made, messages, known)
    assert prompt.token_ids == encode_chat(made, messages)
    assert prompt.token_ids[: len(begun)] == begun
    assert prompt.tokens_lost == len(answer) + 1


def test_a_template_that_trims_is_followed():
    made = tokenizer(TRIMMED)
    begun = encode_chat(made, FIRST)
    known = begun + ids_of(made, "Ġ", "sun", "set", "<|end|>")
    messages = [*FIRST, assistant(" sunset"), user("again")]
    assert continue_chat(made, messages, known) == ChatPrompt(encode_chat(made, messages), 4)


def test_a_history_that_was_changed_is_followed():
    made = tokenizer(VERBATIM)
    known = encode_chat(made, FIRST) + ids_of(made, "sun", "set", "<|end|>")
    messages = [user("say sundown"), assistant("sunset"), user("again")]
    prompt = continue_chat(made, messages, known)
    assert prompt.token_ids == encode_chat(made, messages)
    assert prompt.token_ids[: len(known) - prompt.tokens_lost] == known[: len(known) - prompt.tokens_lost]
    assert prompt.token_ids[len(known) - prompt.tokens_lost] != known[len(known) - prompt.tokens_lost]


def test_a_shorter_conversation_has_nothing_to_go_on_from():
    made = tokenizer(VERBATIM)
    known = encode_chat(made, FIRST) + ids_of(made, "sun", "set", "<|end|>")
    assert continue_chat(made, FIRST, known) == ChatPrompt(encode_chat(made, FIRST), 3)


def test_a_tokenizer_that_adds_spaces_between_parts_is_not_led_astray():
    made = spaced_tokenizer(VERBATIM.replace("<|start|>", "").replace("<|end|>", ""))
    known = encode_chat(made, FIRST) + ids_of(made, "h", "e")
    messages = [*FIRST, assistant("he"), user("again")]
    text = made.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.startswith(made.decode(known))
    assert continue_chat(made, messages, known) == ChatPrompt(encode_chat(made, messages), 2)
