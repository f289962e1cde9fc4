"""Chats that go on after a restart: `kvire chat --session` and LLM.session, over a real store on the disk."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.commands import command
from models.tiny import make_tiny

from kvire.core.config import StoreConfig
from kvire.core.errors import ConfigError, RequestError
from kvire.llm import LLM
from kvire.models.chat import continue_chat
from kvire.sessions.folder import SessionConflictError
from kvire.sessions.session_file import SessionError

pytestmark = pytest.mark.usefixtures("loading_pays")

BLOCK = 16
# Bytes only: a special token in the middle of an answer has no text, so the template could not tell it again.
GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "logit_bias": dict.fromkeys(range(256, 320), -100)}
LONG = "once upon a time there was a cache that remembered everything it had ever read"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny("llama", tmp_path_factory.mktemp("tiny") / "tiny-llama"))


@pytest.fixture
def store(tmp_path: Path) -> StoreConfig:
    return StoreConfig(path=tmp_path / "store", disk_bytes=64 << 20, key_file=tmp_path / "keys.json")


@pytest.fixture
def chat(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs `kvire chat` on a store of this test: exit status, answers, and what is said beside them."""
    monkeypatch.setenv("KVIRE_KEY_FILE", str(tmp_path / "keys.json"))
    monkeypatch.setenv("KVIRE_STORE", str(tmp_path / "cache" / "store"))

    return command(monkeypatch, capsys, "chat", tiny, "--max-tokens", "24")


def reused(said: str) -> list[tuple[int, int]]:
    """Of each answer: prompt tokens reused, and all there were."""
    return [(int(a), int(b)) for a, b in re.findall(r"reused (\d+) of (\d+)", said)]


def test_a_named_chat_goes_on_where_it_was_left(chat):
    status, _, first = chat("--session", "work", stdin=f"{LONG}\n")
    assert status == 0, first
    assert "session work: new." in first
    assert first.count("The history of this chat is stored, sealed, in ") == 1
    assert "`kvire store forget`" in first
    status, _, second = chat("--session", "work", stdin="and then\n")
    assert status == 0, second
    known = int(re.search(r"session work: 2 messages, (\d+) tokens", second)[1])
    lost = re.search(r"(\d+) tokens of earlier turns not reused", second)
    ((hit, prompt),) = reused(second)
    assert 0 < (known - (int(lost[1]) if lost else 0) - 1) // BLOCK * BLOCK <= hit < prompt
    assert "session work: 4 messages" in chat("--session", "work")[2]
    assert "session other: new." in chat("--session", "other")[2]


def test_without_a_name_nothing_of_the_chat_is_kept(chat, tmp_path):
    assert "stored" not in chat(stdin=f"{LONG}\n")[2]
    assert not list(tmp_path.rglob("sessions"))


def test_new_empties_the_session(chat, tmp_path):
    chat("--session", "work", stdin=f"{LONG}\n")
    status, _, said = chat("--session", "work", stdin="/new\n")
    assert status == 0, said
    assert [path for path in tmp_path.rglob("sessions/*/*") if path.is_file()] == []
    assert "session work: new." in chat("--session", "work", stdin="/new\nagain\n")[2]
    assert "session work: 2 messages" in chat("--session", "work")[2]


def test_a_session_that_is_not_sealed_says_so(chat, tmp_path):
    assert "is stored, NOT sealed, in " in chat("--session", "work", "--no-encrypt", stdin=f"{LONG}\n")[2]
    (kept,) = (path for path in tmp_path.rglob("sessions/*/*") if path.is_file())
    assert LONG.encode() in kept.read_bytes()


def test_a_system_message_stays_with_its_session(chat):
    chat("--session", "work", "--system", "Be brief.", stdin="hello\n")
    assert "session work: 3 messages" in chat("--session", "work", "--system", "Be brief.")[2]
    assert "session work: 3 messages" in chat("--session", "work")[2]
    status, _, said = chat("--session", "work", "--system", "Be long.")
    assert status == 2 and "leave out --system" in said


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--no-store"], "--session needs a store on this machine's disk"),
        (["--remote", "redis://127.0.0.1:1"], "name a folder with --store"),
        (["--no-prefix-cache"], "--session needs a store on this machine's disk"),
        (["--session", "no/slashes"], "1 to 64 of the characters"),
    ],
    ids=["no store", "remote only", "no cache", "name"],
)
def test_what_cannot_be_kept_is_refused_before_the_model_is_loaded(chat, options, says, monkeypatch):
    monkeypatch.setattr("kvire.llm.build_engine", lambda *_: pytest.fail("the model was loaded"))
    status, _, said = chat("--session", "work", *options)
    assert status == 2
    assert says in said


def test_somebody_else_s_turn_is_not_overwritten(chat, tiny, tmp_path, monkeypatch):
    """They wrote while we read: our chat goes on, and says that it is not kept."""
    chat("--session", "work", stdin=f"{LONG}\n")
    config = StoreConfig(path=tmp_path / "cache" / "store", disk_bytes=64 << 20, key_file=tmp_path / "keys.json")
    keep = LLM.session.__globals__["ChatSession"].keep

    def too_late(session, *args) -> None:
        if not hasattr(too_late, "done"):
            too_late.done = True
            with LLM(tiny, store=config) as other:
                other.session("work").say("mine", **GREEDY)
        keep(session, *args)

    monkeypatch.setattr("kvire.llm.ChatSession.keep", too_late)
    status, _, said = chat("--session", "work", stdin="yours\nmore\n")
    assert status == 0
    assert said.count("This turn is not kept: somebody else continued this session") == 2
    with LLM(tiny, store=config) as llm:
        assert [m["content"] for m in llm.session("work").messages if m["role"] == "user"] == [LONG, "mine"]


def test_a_session_of_the_python_api_goes_on_after_a_restart(tiny, store):
    """It computes the last partial block and what is new, and answers as an engine that reuses nothing."""
    with LLM(tiny, store=store) as llm:
        session = llm.session("work")
        session.say(LONG, **GREEDY)
        session.say("what was it about?", **GREEDY)
        known = session.token_ids
    with LLM(tiny, store=store) as llm:
        session = llm.session("work")
        assert session.token_ids == known
        assert [message["role"] for message in session.messages] == ["user", "assistant"] * 2
        messages = [*session.messages, {"role": "user", "content": "and then?"}]
        prompt = continue_chat(llm.tokenizer, messages, known)
        assert prompt.token_ids[: len(known)] == known != llm.encode_chat(messages)[: len(known)]
        result = session.say("and then?", **GREEDY)
        assert session.tokens_lost == 0
        assert session.token_ids == (*prompt.token_ids, *result.token_ids)
        assert session.messages == [*messages, {"role": "assistant", "content": result.text}]
    assert result.cache.computed_tokens <= len(prompt.token_ids) - (len(known) - 1) // BLOCK * BLOCK
    assert result.cache.disk_tokens > 0
    with LLM(tiny, prefix_cache=False) as llm:
        assert llm.generate(prompt.token_ids, **GREEDY).token_ids == result.token_ids


def test_another_model_is_told_the_history_in_its_own_tokens(tiny, store, tmp_path):
    with LLM(tiny, store=store) as llm:
        session = llm.session("work")
        session.say(LONG, **GREEDY)
    other = str(make_tiny("llama", tmp_path / "other", seed=1))
    with LLM(other, store=store) as llm:
        session = llm.session("work")
        assert session.token_ids == ()
        messages = [*session.messages, {"role": "user", "content": "go on"}]
        result = session.say("go on", **GREEDY)
        assert session.token_ids == (*llm.encode_chat(messages), *result.token_ids)
        assert result.cache.reused_tokens == 0


def test_what_a_session_refuses(tiny, store):
    with LLM(tiny) as llm, pytest.raises(ConfigError, match="store=DIR"):
        llm.session("work")
    with LLM(tiny, store=store) as llm:
        with pytest.raises(SessionError, match="1 to 64"):
            llm.session("a/b")
        session, other = llm.session("work"), llm.session("work")
        with pytest.raises(RequestError, match="leave out n"):
            session.say("hi", n=2)
        assert session.messages == [] and session.token_ids == ()
        session.say("hi", **GREEDY)
        with pytest.raises(SessionConflictError):
            other.say("hi", **GREEDY)
        session.delete()
        assert llm.sessions.names("") == [] and session.messages == []
        session.say("again", **GREEDY)
        assert [m["content"] for m in llm.session("work").messages if m["role"] == "user"] == ["again"]


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_goes_on_after_a_restart(store):
    options = {"kv_memory": "256MiB", "max_model_len": 2048, "store": store}
    greedy = {"temperature": 0, "max_tokens": 30}
    question = "What is the capital of France? Answer in one short sentence."
    with LLM("smollm2", **options) as llm:
        session = llm.session("paris")
        assert "Paris" in session.say(question, **greedy).text
        known = session.token_ids
    with LLM("smollm2", **options) as llm:
        session = llm.session("paris")
        result = session.say("Which river flows through it?", **greedy)
        assert session.tokens_lost == 0
        prompt = session.token_ids[: result.usage.prompt_tokens]
        assert prompt[: len(known)] == known
        assert result.cache.computed_tokens <= len(prompt) - (len(known) - 1) // BLOCK * BLOCK
        assert result.cache.disk_tokens > 0
    with LLM("smollm2", kv_memory="256MiB", max_model_len=2048, prefix_cache=False) as llm:
        assert llm.generate(prompt, **greedy).token_ids == result.token_ids
