"""Deterministic mode: wherever and however a token is computed, its KV and its logits are the same bits."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness.engines import BLOCK, Answer, drive, request, tiny_engine, words
from models.tiny import EACH_FAMILY, FAMILIES, WINDOW, make_tiny

from kvire.attention.blockwise import Piece
from kvire.attention.cpu import best_attention, native_available
from kvire.attention.tiled_model import pack_tiles
from kvire.core.config import EngineConfig
from kvire.core.errors import ConfigError
from kvire.core.spec import KVSpec
from kvire.engine.build import build_engine
from kvire.engine.engine import Engine
from kvire.engine.packing import build_batch
from kvire.engine.request import Request
from kvire.engine.scheduler import Chunk
from kvire.models.loader import load_model

KINDS = ["portable", "native"] if native_available() else ["portable"]
MakeEngine = Callable[..., Engine]  # options of EngineConfig -> an engine of one model


class Bits:
    """The bits of every token that the watched engines compute, by the tokens up to it; notes what differs."""

    def __init__(self) -> None:
        self.kv: dict[tuple[int, ...], bytes] = {}
        self.logits: dict[tuple[int, ...], bytes] = {}
        self.computed: list[tuple[int, ...]] = []
        self.differing: set[tuple[int, ...]] = set()

    def watch(self, engine: Engine) -> Engine:
        run = engine.run

        def watched(chunks: list[Chunk]) -> torch.Tensor:
            batch = build_batch(chunks, engine.pool.block_size)
            logits = run(chunks)
            prefixes = [tuple(c.seq.token_ids[: c.seq.num_computed + i + 1]) for c in chunks for i in range(c.count)]
            for row, prefix in enumerate(prefixes):
                self.computed.append(prefix)
                self._note(self.kv, prefix, _kv_bytes(engine, [int(slots[row]) for slots in batch.slots]))
            for row, bits in zip(batch.logits_rows.tolist(), logits, strict=True):
                self._note(self.logits, prefixes[row], bits.numpy().tobytes())
            return logits

        engine.run = watched  # type: ignore[method-assign]
        return engine

    def _note(self, known: dict[tuple[int, ...], bytes], prefix: tuple[int, ...], bits: bytes) -> None:
        if known.setdefault(prefix, bits) != bits:
            self.differing.add(prefix)


def _kv_bytes(engine: Engine, slots: list[int]) -> bytes:
    """K and V of one token in all layers; slots: where it lies in each group."""
    paged, size = engine.paged, engine.pool.block_size
    parts = []
    for group, slot in zip(paged.spec.groups, slots, strict=True):
        for layer in group.layers:
            parts += [paged.k(layer)[slot // size, slot % size], paged.v(layer)[slot // size, slot % size]]
    return b"".join(part.numpy().tobytes() for part in parts)


def traffic(seed: int, count: int) -> list[Request]:
    """Prompts of 1 to about 110 tokens that share prefixes, greedy and sampled, some with two answers."""
    rng = random.Random(seed)
    stems = [words(seed + 1, 100), words(seed + 2, 70)]
    requests = []
    for i in range(count):
        prompt = rng.choice(stems)[: rng.randrange(90)] + words(rng.randrange(10**6), rng.randint(1, 20))
        requests.append(
            request(
                prompt, max_tokens=rng.randint(1, 40), temperature=rng.choice([0.0, 1.0]), seed=i, n=1 + (i % 4 == 3)
            )
        )
    return requests


def compare(make: MakeEngine, seed: int, *, waves: int = 3, per_wave: int = 5) -> tuple[Bits, Engine]:
    """Random traffic, then each request alone with nothing cached, then each whole conversation as a prompt."""
    bits, rng = Bits(), random.Random(seed)
    mixed = bits.watch(make(max_batch_tokens=rng.randint(20, 60), max_num_seqs=6))
    requests = traffic(seed, waves * per_wave)
    answers: dict[tuple[str, int], Answer] = {}
    for wave in range(waves):
        answers |= drive(mixed, requests[wave * per_wave : (wave + 1) * per_wave])
    in_company = len(bits.computed)

    alone = bits.watch(make(prefix_cache=False))
    for one in requests:
        again = drive(alone, [one])
        if mixed.config.deterministic:
            assert all(again[key].token_ids == answers[key].token_ids for key in again)
        for index in range(one.params.n):
            conversation = [*one.token_ids, *answers[one.request_id, index].token_ids]
            drive(alone, [request(conversation, max_tokens=1, prompt_logprobs=0)])
    # Nothing is vacuous: every token of the traffic was computed again, and every decode as part of a prompt too.
    assert set(bits.computed[:in_company]) <= set(bits.computed[in_company:])
    assert mixed.stats.device_tokens > 0
    return bits, mixed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_kv_and_logits_do_not_depend_on_how_they_came_about(seed: int, kind: str) -> None:
    def make(**options: object) -> Engine:
        backend = best_attention(kind, deterministic=True)
        return tiny_engine(12, backend=backend, deterministic=True, **options)

    bits, mixed = compare(make, seed, waves=2, per_wave=6)
    assert not bits.differing
    assert mixed.scheduler.preemptions > 0


def test_fast_mode_differs_in_some_bits() -> None:
    """So the tests here can fail."""
    bits, _ = compare(lambda **options: tiny_engine(17, **options), 0)
    assert bits.differing


def engines_of(path: Path, kind: str, block_size: int = BLOCK) -> MakeEngine:
    """Engines whose pool is too small for the traffic all at once."""
    spec = KVSpec(load_model(path).groups, block_size=block_size)
    kv_memory = max(17 * BLOCK, 8 * block_size) * spec.bytes_per_token

    def make(**options: object) -> Engine:
        config = EngineConfig(
            deterministic=True, attention=kind, block_size=block_size, kv_memory=kv_memory, max_model_len=160, **options
        )
        return build_engine(str(path), config)[0]

    return make


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", EACH_FAMILY)
def test_every_dense_family(family: str, kind: str, tmp_path: Path) -> None:
    """With sequences that leave their windows behind; mixtures of experts are refused."""
    dense = {"first_k_dense_replace": 99} if family in ("deepseek_v2", "deepseek_v3") else {}
    path = make_tiny(family, tmp_path / family, **dense)
    make = engines_of(path, kind)
    if not dense and has_experts(path):
        with pytest.raises(ConfigError, match="mixture-of-experts"):
            make()
        return
    bits, _ = compare(make, 5, waves=2, per_wave=4)
    assert not bits.differing
    assert max(map(len, bits.computed)) > 3 * WINDOW


def has_experts(path: Path) -> bool:
    """Whether a family's tiny config asks for experts, under whatever name."""
    config = json.loads((path / "config.json").read_text())
    return any("experts" in name and isinstance(n, int) and n > 1 for name, n in config.items())


def test_most_families_are_dense(tmp_path: Path) -> None:
    """The test above refuses some, not all."""
    paths = [make_tiny(family, tmp_path / family, tokenizer=False) for family in FAMILIES]
    assert 0 < sum(map(has_experts, paths)) < len(paths) / 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block_size", [8, 32, 64])
def test_every_block_size(block_size: int, kind: str, tmp_path: Path) -> None:
    """Native modules choose their kernels by the number of rows: up to 16, in between, from 64 on."""
    bits, _ = compare(engines_of(make_tiny("llama", tmp_path), kind, block_size), 7, waves=2, per_wave=4)
    assert not bits.differing


def test_the_namespace_tells_the_modes_apart(tmp_path: Path) -> None:
    path = str(make_tiny("llama", tmp_path))
    options = {"kv_memory": "1MiB", "device": "cpu"}
    fast, exact = (build_engine(path, EngineConfig(deterministic=d, **options))[0] for d in (False, True))
    assert fast.root != exact.root
    assert exact.namespace.numerics.startswith("float32/deterministic/")


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16", "int8"])
def test_the_pool_keeps_float32(kv_dtype: str) -> None:
    with pytest.raises(ConfigError, match="deterministic mode promises the bits of a float32"):
        EngineConfig(deterministic=True, kv_dtype=kv_dtype)


def test_pieces_share_a_tile_where_their_rows_allow_it() -> None:
    def piece(sequence: int, first: int, count: int) -> Piece:
        return Piece(sequence, slice(0, count), first)

    long = [piece(0, 13, 3), piece(0, 16, 16), piece(0, 32, 5)]
    others = [piece(1, 20, 4), piece(2, 7, 1), piece(3, 4, 1)]
    tiles = pack_tiles(long + others, 16)
    assert [[(p.sequence, p.first) for p in tile] for tile in tiles] == [
        [(0, 13), (1, 20)],
        [(0, 16)],
        [(0, 32), (2, 7)],
        [(3, 4)],
    ]
