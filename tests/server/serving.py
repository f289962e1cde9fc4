"""A real server on a free port, over a tiny random llama or a script; one token is one byte."""

import asyncio
import copy
import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import torch
from harness.engines import held
from harness.waiting import PATIENCE_S, until
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
from kvire.server.protocol import BoundedProtocol
from kvire.server.run import bind, make_server, url_of
from kvire.server.service import Service
from kvire.store.tiered import TieredStore

MODEL = "tiny"
BLOCK = 16
SPECIAL = ("<|im_start|>", "<|im_end|>", "[TOOL_CALLS]", "<|python_tag|>")
VOCAB = 256 + len(SPECIAL)
EOS = 257
SLOW_STEP_S = 0.06  # a request of 1,500 steps takes three times as long as anybody waits for what should come soon
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


def slow_model() -> ScriptedModel:
    """A request with `max_tokens` of 1,500 and more does not end by itself before a test has looked."""
    model = ScriptedModel()
    model.say("z" * 3000)
    model.delay_s = SLOW_STEP_S
    return model


def tiny_engine(
    *,
    blocks: int = 512,
    template: str | None = HERMES_TEMPLATE,
    model: Any = None,
    max_model_len: int = 2048,
    store: TieredStore | None = None,
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
        store=store,
    )


class SkippingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock a test can put forward: what the server does after a time is seen without waiting."""

    skipped_s = 0.0

    def time(self) -> float:
        return super().time() + self.skipped_s

    def skip(self, seconds: float) -> None:
        """From any thread."""
        self.skipped_s += seconds
        self.call_soon_threadsafe(lambda: None)  # it looks at its clock when it wakes


@dataclass
class Served:
    """A running server."""

    url: str
    client: EngineClient
    engine: Engine
    options: ServerOptions
    service: Service
    loop: SkippingLoop
    protocols: set[BoundedProtocol]  # one for each open connection

    def openai(self, api_key: str = "none", **options: Any) -> OpenAI:
        return OpenAI(base_url=self.url + "/v1", api_key=api_key, max_retries=0, timeout=60, **options)

    def connect(self) -> socket.socket:
        address = urlsplit(self.url)
        return socket.create_connection((address.hostname, address.port), timeout=PATIENCE_S)

    @contextmanager
    def begun(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """Any request, as raw as http.client makes them, once its answer begins. body: bytes, or a value for JSON."""
        address = urlsplit(self.url)
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=2 * PATIENCE_S)
        if body is not None and not isinstance(body, (bytes, Iterator)):
            body = json.dumps(body).encode()
        try:
            connection.request(method, path, body, headers or {})
            yield connection.getresponse()
        finally:
            connection.close()

    def request(self, *what: Any, **more: Any) -> "Answer":
        """The same to its end."""
        started = time.monotonic()
        with self.begun(*what, **more) as response:
            data = response.read()
        return Answer(response.status, dict(response.getheaders()), data, time.monotonic() - started)

    def post(self, path: str, body: Any, **more: Any) -> "Answer":
        return self.request("POST", path, body, **more)

    def together(self, *calls: Callable[[], Any]) -> list[Any]:
        """What the calls give, each of which makes one request: the engine has all of them before it answers any."""
        with ThreadPoolExecutor(len(calls)) as pool:
            with held(self.engine):
                results = [pool.submit(call) for call in calls]
                until(lambda: self.client.in_flight == len(calls))
            return [result.result() for result in results]

    @property
    def is_idle(self) -> bool:
        """Whether no block is held, and nothing runs or waits."""
        engine = self.engine
        return engine.pool.num_free == engine.pool.num_blocks and not engine.has_work and not self.client.in_flight

    def wait_until_idle(self) -> None:
        engine = self.engine
        until(
            lambda: self.is_idle,
            lambda: (
                f"{engine.pool.num_blocks - engine.pool.num_free} blocks held, {len(engine.scheduler.running)} "
                f"running, {len(engine.scheduler.waiting)} waiting, {self.client.in_flight} in flight"
            ),
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
    app, loop = create_app(client, model_name, settings), SkippingLoop()
    server = make_server(app, settings)
    server.config.get_loop_factory = lambda: lambda: loop
    url = url_of(listener)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    until(lambda: server.started)
    try:
        yield Served(url, client, client.engine, settings, app.state.service, loop, server.server_state.connections)
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
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
