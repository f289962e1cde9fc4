"""Through a real vLLM: the same tokens with and without the store, whatever happens to it, and honest figures."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from connectors.store_commands import sound_and_whole
from connectors.vllm.checks import overlapping
from models.tiny import make_tiny

BLOCK = 32
SMALL = {"block_size": BLOCK}


def prompts(count: int, seed: int = 0, shared: int = 100) -> list[list[int]]:
    """Prompts of some hundred tokens; groups of four have their first `shared` tokens in common."""
    dice = random.Random(seed)
    found: list[list[int]] = []
    for number in range(count):
        begin = random.Random(f"{seed}/{number // 4}")
        rest = [dice.randrange(256) for _ in range(dice.randrange(1, 200))]
        found.append([begin.randrange(256) for _ in range(shared)] + rest)
    return found


def options(folder: Path, **more: Any) -> dict[str, Any]:
    return {"store": str(folder / "store"), "key_file": str(folder / "keys" / "k.json"), "disk_size": "200MB"} | more


def whole(prompt: list[int]) -> int:
    """Tokens of a prompt that can be had from a store: full blocks, and one is always computed."""
    return (len(prompt) - 1) // BLOCK * BLOCK


Start = Callable[..., Any]


@pytest.mark.parametrize("spawns", [False, True], ids=["one process", "processes"])
def test_a_restarted_engine_gives_the_same_tokens_and_tells_what_it_loaded(
    llama: Path, tmp_path: Path, start: Start, *, spawns: bool
) -> None:
    """And `kvire store` reads what vLLM wrote. S21: the two engines have different hash seeds."""
    asked = overlapping(40, seed=0)
    with start(llama, None, arguments=SMALL) as alone:
        expected = alone("generate", prompts=asked)["tokens"]
    seed = {"PYTHONHASHSEED": "1"}
    with start(llama, options(tmp_path), arguments=SMALL, spawns=spawns, environment=seed) as cold:
        assert cold("generate", prompts=asked)["tokens"] == expected
    seed = {"PYTHONHASHSEED": "12345"}
    with start(llama, options(tmp_path), arguments=SMALL, spawns=spawns, environment=seed) as warm:
        again = warm("generate", prompts=asked)
        figures = warm("metrics")
        assert again["tokens"] == expected
        assert again["cached"] == [whole(prompt) for prompt in asked]
        assert figures["kvire_matched_tokens disk"] == sum(again["cached"])
        assert figures["prompt_tokens"] == sum(map(len, asked))
        assert figures["external_prefix_cache_hits"] == sum(again["cached"])
    stored = {tuple(prompt[:stop]) for prompt in asked for stop in range(BLOCK, len(prompt) + 1, BLOCK)}
    sound_and_whole(tmp_path / "store", tmp_path / "keys" / "k.json", engine="vllm 0.", least_blocks=len(stored))


def test_what_vllm_does_to_requests(llama: Path, tmp_path: Path, start: Start) -> None:
    """Chunks, too few blocks (preemption), answers that are continued, requests given up while they are loaded."""
    asked = prompts(16, seed=1)
    chunks = SMALL | {"max_num_batched_tokens": 96, "max_num_seqs": 8, "max_model_len": 512}
    with start(llama, None, arguments=SMALL) as alone:
        first = alone("generate", prompts=asked, max_tokens=70)["tokens"]
        longer = [prompt + answer for prompt, answer in zip(asked, first, strict=True)]
        second = alone("generate", prompts=longer)["tokens"]
    with start(llama, options(tmp_path), arguments=chunks, kv_bytes=1 << 20) as cold:
        assert cold("generate", prompts=asked, max_tokens=70)["tokens"] == first
        assert cold("metrics")["num_preemptions"] > 0
    with start(llama, options(tmp_path), arguments=chunks | {"enable_prefix_caching": False}) as warm:
        given_up = warm("generate", prompts=longer, aborts={str(i): 1 + i % 3 for i in range(0, 16, 2)})
        assert given_up["tokens"][1::2] == second[1::2]
        again = warm("generate", prompts=longer)
        assert again["tokens"] == second
        # the last token of an answer was not computed, so a block that it completes may not be there
        assert all(n >= whole(prompt[:-1]) for n, prompt in zip(again["cached"], longer, strict=True))


def test_drafts_that_are_rejected_are_never_kept(llama: Path, tmp_path: Path, start: Start) -> None:
    asked = [prompt * 2 for prompt in prompts(8, seed=2)]
    ngram = SMALL | {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}}
    with start(llama, None, arguments=SMALL) as alone:
        first = alone("generate", prompts=asked, max_tokens=80)["tokens"]
        longer = [prompt + answer for prompt, answer in zip(asked, first, strict=True)]
        second = alone("generate", prompts=longer)["tokens"]
    with start(llama, options(tmp_path), arguments=ngram) as drafting:
        assert drafting("generate", prompts=asked, max_tokens=80)["tokens"] == first
        assert drafting("metrics")["spec_decode_num_draft_tokens"] > 0
    with start(llama, options(tmp_path), arguments=SMALL) as warm:
        again = warm("generate", prompts=longer)
        assert again["tokens"] == second
        assert min(again["cached"]) > 64 + 2 * 100


def test_groups_with_windows(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, start: Start) -> None:
    """And events tell of each group's share of a block by itself."""
    shape = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 64}
    gemma = make_tiny("gemma3_text", tmp_path_factory.mktemp("gemma"), **shape)
    asked = prompts(12, seed=3)
    with start(gemma, None, arguments=SMALL) as alone:
        expected = alone("generate", prompts=asked, max_tokens=40)["tokens"]
    with start(gemma, options(tmp_path), arguments=SMALL) as cold:
        assert cold("generate", prompts=asked, max_tokens=40)["tokens"] == expected
    with start(gemma, options(tmp_path), arguments=SMALL, events=f"ipc://{tmp_path}/events") as warm:
        again = warm("generate", prompts=asked, max_tokens=40)
        assert again["tokens"] == expected
        assert again["cached"] == [whole(prompt) for prompt in asked]
        came = warm("events")
    assert {event[0] for event in came} == {"BlockStored"}
    assert {tuple(event[5:]) for event in came} == {("full_attention", None), ("sliding_window", 64)}
    assert len({(event[1], event[4]) for event in came}) == len(came), "each share once"
    groups = {(event[4], event[5]) for event in came}
    assert sorted(index for index, _ in groups) == list(range(len(groups)))
    blocks = {tuple(prompt[:stop]) for prompt in asked for stop in range(BLOCK, len(prompt) + 1, BLOCK)}
    for index, kind in groups:
        if kind == "full_attention":
            assert sum(event[4] == index for event in came) >= len(blocks)


def test_tenants_by_cache_salt_share_nothing(llama: Path, tmp_path: Path, start: Start) -> None:
    """S20: on the device and in the store."""
    asked = prompts(4, seed=4)
    with start(llama, options(tmp_path), arguments=SMALL) as engine:
        for salt, hits in (("a", False), ("b", False), ("a", True), (None, False)):
            answer = engine("generate", prompts=asked, salts=[salt] * 4)
            assert engine("forget_device")
            expected = [whole(prompt) for prompt in asked] if hits else [0] * 4
            assert [max(0, n - 96) for n in answer["cached"]] == [max(0, n - 96) for n in expected], salt
        assert engine("forget_device", connector=True)
        assert engine("generate", prompts=asked[:1], salts=["a"])["cached"] == [0], "not after a reset"
    with start(llama, options(tmp_path), arguments=SMALL) as other:
        assert other("generate", prompts=asked[:1], salts=["a"])["cached"] == [whole(asked[0])]


def test_another_model_or_shape_finds_nothing(llama: Path, tmp_path: Path, start: Start) -> None:
    """S22, S23: other dtypes of the same size, block sizes, and weights under the same name; and back."""
    model = tmp_path / "model"
    shutil.copytree(llama, model)
    asked = prompts(4, seed=5)
    arguments = SMALL | {"enable_prefix_caching": False, "dtype": "bfloat16"}
    with start(model, options(tmp_path), arguments=arguments) as first:
        first("generate", prompts=asked)
    for other, differs in (({"block_size": 64}, "block_size,spec"), ({"dtype": "float16"}, "kv_dtype,numerics,spec")):
        with start(model, options(tmp_path), arguments=arguments | other) as engine:
            assert engine("generate", prompts=asked)["cached"] == [0] * 4
            engine("generate", prompts=asked[:1])  # what the connector counted comes with a later step
            found = {name: n for name, n in engine("metrics").items() if name.startswith("kvire_foreign_requests")}
            assert [name.split()[1] for name in found] == [differs], found
    make_tiny("llama", model, seed=1, head_dim=32)  # a fine-tune in place
    with start(model, None, arguments=arguments) as alone:
        expected = alone("generate", prompts=asked)["tokens"]
    with start(model, options(tmp_path), arguments=arguments) as tuned:
        answer = tuned("generate", prompts=asked)
        assert answer["cached"] == [0] * 4
        assert answer["tokens"] == expected
    shutil.copytree(llama, model, dirs_exist_ok=True)
    with start(model, options(tmp_path), arguments=arguments) as back:
        assert back("generate", prompts=asked)["cached"] == [whole(prompt) for prompt in asked]


def test_events_tell_of_blocks_in_the_store(llama: Path, tmp_path: Path, start: Start) -> None:
    [prompt] = prompts(1, seed=6)
    blocks = [prompt[begin : begin + BLOCK] for begin in range(0, whole(prompt), BLOCK)]
    endpoint = f"ipc://{tmp_path}/events"
    with start(llama, options(tmp_path), arguments=SMALL, events=endpoint) as engine:
        engine("generate", prompts=[prompt], max_tokens=2)
        came = engine("events")
        assert [(kind, tokens) for kind, _, _, tokens, *_ in came] == [("BlockStored", block) for block in blocks]
        assert [parent for _, _, parent, *_ in came] == [None, *(event[1] for event in came[:-1])]
        assert all(event[4:] == [0, "full_attention", None] for event in came)
        shutil.rmtree(tmp_path / "store")
        engine("forget_device")
        engine("generate", prompts=[prompt], max_tokens=2)
        assert ["BlockRemoved", came[0][1]] in [event[:2] for event in engine("events")]
