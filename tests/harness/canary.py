"""Forty clients, each with a secret; none may ever appear in another's answer.

Two models. SmolLM2 is told a secret word and asked for it. `secret_llama` makes every trace of a
secret surface: its weights are set by hand so that each token attends to the secrets in its
context, all alike, and answers with the one that it sees most. A presence penalty takes each secret
that was said out of the race, so an answer lists what the attended KV holds, a single foreign token
included.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from harness.differential import poison, poison_blank_blocks
from harness.engines import BLOCK, EOS, VOCAB, Answer, engine_of, request
from kvire.core.spec import KVGroup, KVSpec, LayerKind
from kvire.engine.engine import Engine
from kvire.engine.request import Failure, Request

CLIENTS, TURNS = 40, 20
SECRETS = range(64)  # token ids; client i's secret is token i
FILLER = range(64, 200)
NEUTRAL = range(200, 210)  # said when there is no secret left to say
SYSTEM_TOKENS = 2 * BLOCK + 5  # that all clients begin with, and may share
DEMAND_SHARE = 0.2  # of the blocks that all conversations would need at their end
WORDS = (  # noqa: SIM905
    "tiger lemon piano castle river garden hammer mirror pepper rocket saddle temple velvet window yellow anchor "
    "bottle candle dragon engine falcon guitar helmet island jacket kitten ladder marble needle orange pencil rabbit "
    "silver tomato turtle violin walnut wizard basket carrot"
).split()


def secret_llama() -> torch.nn.Module:
    """One layer, one head.

    Hidden: [secret i is here | attention found secret i | 1 | a secret is here].
    """
    found, one, is_secret = len(SECRETS), 2 * len(SECRETS), 2 * len(SECRETS) + 1
    hidden = head = 192
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=head,
        vocab_size=VOCAB,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 1e30},  # the slowest dimension does not turn at all
        bos_token_id=256,
        eos_token_id=EOS,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    still = head // 2 - 1
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.fill_(1.0 if "norm" in name else 0.0)
        layer = model.model.layers[0].self_attn
        model.model.embed_tokens.weight[:, one] = 1.0
        for token in SECRETS:
            model.model.embed_tokens.weight[token, token] = 1.0
            model.model.embed_tokens.weight[token, is_secret] = 1.0
            layer.v_proj.weight[token, token] = 1.0
            layer.o_proj.weight[found + token, token] = 1.0
            model.lm_head.weight[token, found + token] = 10.0
        layer.q_proj.weight[still, one] = 10.0
        layer.k_proj.weight[still, is_secret] = 10.0
        model.lm_head.weight[:, one] -= 1.0
        model.lm_head.weight[list(SECRETS), one] = 0.0
        for rank, token in enumerate(NEUTRAL):
            model.lm_head.weight[token, one] = 0.01 - 0.001 * rank
    return model


SPEC = KVSpec((KVGroup(LayerKind.FULL, (0,), 1, 192, 192),), "float32", BLOCK)


def secret_engine(num_blocks: int, **options) -> Engine:
    """The model above over `num_blocks` blocks of 16 tokens."""
    return engine_of(secret_llama(), SPEC, num_blocks, **options)


class Talk(Protocol):
    """How clients talk: what all begin with, what each says, and which secrets an answer holds."""

    turn_tokens: int  # of one turn and its answer, at most
    params: dict[str, Any]

    def opening(self, rng: random.Random) -> list[int]:
        """What every conversation begins with."""

    def turn(self, rng: random.Random, secret: int) -> list[int]:
        """The client's next words."""

    def said(self, answer: list[int]) -> set[int]:
        """Secrets in an answer."""


class SecretTokens:
    """For secret_llama. Any sixteen consecutive tokens of a client hold its secret."""

    turn_tokens = 15
    params = {"max_tokens": 3, "presence_penalty": 100.0}  # noqa: RUF012

    def opening(self, rng: random.Random) -> list[int]:
        """Nobody's secret is in it."""
        return [rng.choice(FILLER) for _ in range(SYSTEM_TOKENS)]

    def turn(self, rng: random.Random, secret: int) -> list[int]:
        """Twelve tokens."""
        words = [rng.choice(FILLER) for _ in range(12)]
        words[rng.randrange(4)] = words[rng.randrange(6, 10)] = secret
        return words

    def said(self, answer: list[int]) -> set[int]:
        """Every secret has a token of its own."""
        return set(answer) & set(SECRETS)


class SecretWords:
    """For SmolLM2, in its chat format."""

    turn_tokens = 30
    params = {"max_tokens": 8, "ignore_eos": False}  # noqa: RUF012

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def opening(self, rng: random.Random) -> list[int]:
        """A system prompt."""
        return self._ids("<|im_start|>system\nYou repeat the secret word that you are told.")

    def turn(self, rng: random.Random, secret: int) -> list[int]:
        """The word, and the question."""
        question = rng.choice(("Say it.", "Repeat the word.", "What is it?", "Which word is it?"))
        says = f"My secret word is {WORDS[secret]}. {question}"
        return self._ids(f"<|im_end|>\n<|im_start|>user\n{says}<|im_end|>\n<|im_start|>assistant\n")

    def said(self, answer: list[int]) -> set[int]:
        """Words by their letters, however they are split into tokens."""
        text = self.tokenizer.decode(answer).lower()
        return {i for i, word in enumerate(WORDS) if word in text}

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text)["input_ids"]


@dataclass
class Client:
    """One conversation.

    secret: what only this client's prompts hold.
    """

    secret: int
    history: list[int] = field(default_factory=list)
    turns: int = 0


@dataclass
class CanaryTally:
    """What came out.

    foreign: responses with another client's secret;
    recalled: with the client's own.
    """

    responses: int = 0
    foreign: int = 0
    recalled: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    evictions: int = 0


def small_pool(talk: Talk, clients: int, turns: int) -> int:
    """Blocks of a pool that holds a fifth of what all conversations need at their end."""
    opening = len(talk.opening(random.Random(0)))
    return int(DEMAND_SHARE * clients * -(-(opening + turns * talk.turn_tokens) // BLOCK))


def run_canaries(
    engine: Engine, talk: Talk, seed: int, *, clients: int, turns: int, on_turn: Callable[[int], None] = lambda _: None
) -> CanaryTally:
    """Every client takes `turns` turns, all at once, in random order.

    on_turn: told how many responses there are.
    """
    rng, tally = random.Random(seed), CanaryTally()
    opening = talk.opening(rng)
    everybody = [Client(secret, list(opening)) for secret in SECRETS[:clients]]
    poison(engine)
    open_: dict[str, tuple[Client, Request, Answer]] = {}
    while open_ or any(client.turns < turns for client in everybody):
        busy = {id(client) for client, _, _ in open_.values()}
        idle = [client for client in everybody if client.turns < turns and id(client) not in busy]
        for client in rng.sample(idle, min(len(idle), rng.randint(0, 4))):
            client.history += talk.turn(rng, client.secret)
            one = request(client.history, **talk.params)
            engine.submit(one)
            open_[one.request_id] = (client, one, Answer())
        for output in engine.step():
            assert not isinstance(output, Failure), output.message
            client, one, answer = open_[output.request_id]
            answer.token_ids += output.token_ids
            answer.cache = output.cache or answer.cache
            if output.finish_reason is not None:
                del open_[output.request_id]
                _note(tally, client, one, answer, talk.said(answer.token_ids))
                on_turn(tally.responses)
        engine.pool.check()
        poison_blank_blocks(engine)
    tally.evictions = engine.pool.stats.evictions
    assert engine.pool.num_free == engine.pool.num_blocks, "all blocks are free at idle"
    return tally


def _note(tally: CanaryTally, client: Client, one: Request, answer: Answer, said: set[int]) -> None:
    tally.responses += 1
    tally.foreign += bool(said - {client.secret})
    tally.recalled += client.secret in said
    assert answer.cache is not None and answer.cache.prompt_tokens == len(one.token_ids)
    assert answer.cache.reused_tokens < len(one.token_ids)
    tally.prompt_tokens += answer.cache.prompt_tokens
    tally.reused_tokens += answer.cache.reused_tokens
    client.history += answer.token_ids
    client.turns += 1
