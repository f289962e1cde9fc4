"""A real server on a free port, over a tiny random llama or a script; one token is one byte."""

import copy
import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import torch
from openai import OpenAI
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from kvire.attention.paged_cache import PagedCache, PagedModel
from kvire.attention.reference import PortableAttention
from kvire.cache.batch import Batch
from kvire.cache.paged import PagedKV
from kvire.core.config import EngineConfig
from kvire.core.keys import Namespace
from kvire.core.spec import KVGroup, KVSpec, LayerKind
from kvire.engine.client import EngineClient
from kvire.engine.engine import Engine
from kvire.engine.request import Request, SamplingParams
from kvire.server.app import create_app
from kvire.server.options import ServerOptions
from kvire.server.run import bind, make_server, url_of

MODEL = "tiny"
BLOCK = 16
SPECIAL = ("<|im_start|>", "<|im_end|>", "[TOOL_CALLS]", "<|python_tag|>")
VOCAB = 256 + len(SPECIAL)
EOS = 257
SPEC = KVSpec((KVGroup(LayerKind.FULL, (0, 1, 2), 2, 16, 16),), "float32", BLOCK)

PLAIN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HERMES_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "Call them as <tool_call>{...}</tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}<tool_call>{{ c['function']['name'] }}:"
    "{% for k, v in c['function']['arguments'].items() %}{{ k }}={{ v }};{% endfor %}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}(no thinking){% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISTRAL_TEMPLATE = HERMES_TEMPLATE.replace("Call them as <tool_call>{...}</tool_call>", "[TOOL_CALLS]").replace(
    "tool_call>", "call>"
)


def byte_tokenizer(template: str | None = HERMES_TEMPLATE) -> PreTrainedTokenizerFast:
    """Byte-level BPE without merges: ids 0 to 255 are bytes, special tokens follow."""
    chars = pre_tokenizers.ByteLevel.alphabet()
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    assert set(vocab) == set(chars)
    vocab |= {text: 256 + i for i, text in enumerate(SPECIAL)}
    inner = Tokenizer(models.BPE(vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return tokenizer


@cache
def tiny_llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=8192,
        initializer_range=0.3,
    )
    return AutoModelForCausalLM.from_config(config).eval()


class ScriptedModel:
    """Writes what it is told, whatever it reads. One prompt at a time; delay_s per step."""

    def __init__(self) -> None:
        self.script: list[int] = []
        self.begin: int | None = None
        self.delay_s = 0.0
        self.steps = 0
        self.fails = False

    def say(self, text: str | list[int]) -> None:
        self.script = list(text.encode()) if isinstance(text, str) else text
        self.begin = None

    def forward(self, batch: Batch) -> torch.Tensor:
        if self.fails:
            raise RuntimeError("the scripted model was told to fail: SECRET")
        time.sleep(self.delay_s)
        self.steps += 1
        positions = batch.positions[batch.logits_rows].tolist()
        if self.begin is None and positions:
            self.begin = positions[-1] + 1
        logits = torch.zeros(len(positions), VOCAB)
        for row, position in enumerate(positions):
            at = position + 1 - (self.begin or 0)
            token = self.script[at] if 0 <= at < len(self.script) else EOS
            logits[row, token] = 30.0
        return logits


def tiny_engine(
    *,
    blocks: int = 512,
    template: str | None = HERMES_TEMPLATE,
    model: Any = None,
    max_model_len: int = 2048,
    **config: Any,
) -> Engine:
    """model: a ScriptedModel, or None for the random llama, whose answers depend on all they attend to."""
    paged = PagedKV(SPEC, blocks)
    if model is None:
        model = PagedModel(copy.deepcopy(tiny_llama()), PagedCache(paged, PortableAttention()))
    return Engine(
        model,
        paged,
        EngineConfig(block_size=BLOCK, **config),
        Namespace("weights", "config", "float32/portable", "float32", "tiny", BLOCK),
        max_model_len=min(max_model_len, blocks * BLOCK),
        vocab_size=VOCAB,
        eos_token_ids=frozenset([EOS]),
        tokenizer=byte_tokenizer(template),
    )


@dataclass
class Served:
    """A running server."""

    url: str
    client: EngineClient
    engine: Engine
    options: ServerOptions

    def openai(self, api_key: str = "none", **options: Any) -> OpenAI:
        return OpenAI(base_url=self.url + "/v1", api_key=api_key, max_retries=0, timeout=60, **options)

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, timeout: float = 30
    ) -> "Answer":
        """Any request, as raw as http.client makes them. body: bytes, or a value for JSON."""
        address = urlsplit(self.url)
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=timeout)
        if body is not None and not isinstance(body, (bytes, Iterator)):
            body = json.dumps(body).encode()
        started = time.monotonic()
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
        return Answer(response.status, dict(response.getheaders()), data, time.monotonic() - started)

    def post(self, path: str, body: Any, **more: Any) -> "Answer":
        return self.request("POST", path, body, **more)

    def wait_until_idle(self, timeout_s: float) -> float:
        """Seconds until no block is held and nothing runs or waits."""
        started = time.monotonic()
        engine = self.engine
        while time.monotonic() - started < timeout_s:
            if engine.pool.num_free == engine.pool.num_blocks and not engine.has_work and not self.client.in_flight:
                return time.monotonic() - started
            time.sleep(0.01)
        raise AssertionError(
            f"{engine.pool.num_blocks - engine.pool.num_free} blocks held, {len(engine.scheduler.running)} running, "
            f"{len(engine.scheduler.waiting)} waiting, {self.client.in_flight} in flight after {timeout_s} s"
        )

    def direct(self, token_ids: list[int], **params: Any) -> tuple[str, list[int]]:
        """(text, token ids) of the same engine, not through HTTP."""
        request = Request(f"direct-{random.random()}", tuple(token_ids), SamplingParams(**params))
        text, ids = "", []
        for output in self.client.stream(request):
            text += output.text
            ids += output.token_ids
        return text, ids


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    data: bytes
    seconds: float

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def error(self) -> dict[str, Any]:
        """The error, after checking that it has OpenAI's shape."""
        error = self.json["error"]
        assert set(self.json) == {"error"}
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str)
        assert "detail" not in self.json
        return error

    @property
    def events(self) -> list[Any]:
        """Chunks of a stream, after checking its form; "[DONE]" last unless it broke off."""
        text = self.data.decode("utf-8")
        assert text.endswith("\n\n")
        blocks = text[:-2].split("\n\n")
        assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
        payloads = [block.removeprefix("data: ") for block in blocks]
        return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


@contextmanager
def listening(
    client: EngineClient, model_name: str, *, send_buffer_bytes: int | None = None, **options: Any
) -> Iterator[Served]:
    """A server over a started engine."""
    settings = ServerOptions(port=0, **options)
    listener = bind(settings)
    if send_buffer_bytes is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)  # connections inherit it
    server = make_server(create_app(client, model_name, settings), settings)
    url = url_of(listener)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started:
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.005)
    try:
        yield Served(url, client, client.engine, settings)
    finally:
        server.should_exit = True
        thread.join(15)
        assert not thread.is_alive(), "the server did not stop"


@contextmanager
def running(engine: Engine, **options: Any) -> Iterator[Served]:
    """A server over an engine of its own."""
    with EngineClient(engine) as client, listening(client, MODEL, **options) as served:
        yield served


def words(seed: int, length: int) -> list[int]:
    """A prompt of exactly `length` tokens, printable."""
    rng = random.Random(seed)
    return [rng.randrange(97, 123) for _ in range(length)]


def text_of(token_ids: list[int]) -> str:
    return bytes(token_ids).decode()
