"""Whatever vLLM does with its blocks, nothing wrong is ever read from them, saved, or loaded into them."""

import random

import pytest
from connectors.vllm.small_engine import FULL, MIXED, TOKENS, Request, SmallEngine

from kvire.connectors.vllm.groups import Group
from kvire.store.tiered import TieredStore


@pytest.mark.parametrize("groups", [FULL, MIXED], ids=["one group", "a group with a window"])
def test_another_engine_loads_what_the_first_computed(store: TieredStore, groups: tuple[Group, ...]) -> None:
    prompt = list(range(30))
    first = SmallEngine(store, groups)
    assert first.run(Request("a", list(prompt))).stored_tokens == 0
    first.close()
    assert store.flush(10)
    second = SmallEngine(store, groups)
    again = second.run(Request("b", list(prompt)))
    assert (again.cached_tokens, again.stored_tokens) == (0, 28)
    second.close()


def test_one_token_is_always_computed(store: TieredStore) -> None:
    for tokens in (0, 24):
        engine = SmallEngine(store)
        assert engine.scheduler.match(Request("a", list(range(28))), 0) == tokens
        engine.run(Request("b", list(range(28))))
        engine.close()
        assert store.flush(10)


def test_what_a_window_has_left_is_neither_loaded_nor_saved(store: TieredStore) -> None:
    prompt = list(range(30))
    first = SmallEngine(store, MIXED)
    first.run(Request("a", list(prompt)))
    assert store.flush(10)
    store.clear()
    first.scheduler._offered.clear()  # as if it had been longer ago
    again = first.run(Request("b", [*prompt, 1, 2, 3]))
    assert again.cached_tokens == 28, "on the device, where the window's early blocks are no more"
    assert store.flush(10)
    first.close()
    second = SmallEngine(store, MIXED)
    shorter = second.run(Request("c", prompt[:10]))
    assert shorter.stored_tokens == 0, "its window is not there"
    longer = second.run(Request("d", [*prompt, 1, 2, 3]))
    assert longer.cached_tokens + longer.stored_tokens == 32
    second.close()
    third = SmallEngine(store, MIXED)
    third.run(Request("e", [*prompt, 1, 2, 3]))
    assert third.worker.take_counts()["loaded_blocks", "disk"] == 8 + 2
    third.close()


def test_answers_are_kept_too(store: TieredStore) -> None:
    engine = SmallEngine(store)
    turn = engine.run(Request("a", list(range(10))), answer=11)
    engine.close()
    assert store.flush(10)
    other = SmallEngine(store)
    assert other.run(Request("b", [*turn.all_token_ids, 7])).stored_tokens == 20
    other.close()


def test_a_salt_shares_nothing(store: TieredStore) -> None:
    prompt = list(range(30))
    for salt, hit in (("one", 0), ("other", 0), ("one", 28), (None, 0)):
        engine = SmallEngine(store)
        assert engine.run(Request("a", list(prompt), cache_salt=salt)).stored_tokens == hit
        engine.close()
        assert store.flush(10)


def test_after_a_reset_nothing_stored_is_found(store: TieredStore) -> None:
    engine = SmallEngine(store)
    prompt = list(range(30))
    engine.run(Request("a", list(prompt)))
    assert store.flush(10)
    engine.cached.clear()
    engine.scheduler.reset()
    assert engine.run(Request("b", list(prompt))).stored_tokens == 0
    engine.close()


def test_a_block_that_is_gone_costs_the_rest_of_the_hit(store: TieredStore) -> None:
    prompt = list(range(30))
    first = SmallEngine(store)
    first.run(Request("a", list(prompt)))
    first.close()
    assert store.flush(10)
    engine = SmallEngine(store)
    request = engine.add(Request("b", list(prompt)))
    match = engine.scheduler.match

    def match_and_lose(which: Request, tokens: int) -> int | None:
        found = match(which, tokens)
        lost = engine.scheduler._tracked["b"].chain.record(3, 0, 0).id
        store._handles[0].tier.delete([lost], "room")
        return found

    engine.scheduler.match = match_and_lose
    while request.state != "running":
        engine.step()
    assert request.stored_tokens == 3 * TOKENS, "it is told as what it was, and found before the hole"
    counts = engine.scheduler.take_counts() + engine.worker.take_counts()
    assert counts["failed_blocks", "missing"] >= 1
    engine.run(request)
    assert store.flush(10)
    engine.close()
    other = SmallEngine(store)
    assert other.run(Request("c", list(prompt))).stored_tokens == 28, "what was computed anew is stored again"
    other.close()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))])
@pytest.mark.parametrize("groups", [FULL, MIXED], ids=["one group", "a group with a window"])
def test_traffic(store: TieredStore, groups: tuple[Group, ...], seed: int) -> None:
    """Shared prompts, too few blocks, chunks, drafts, requests given up, blocks that vanish, and new processes."""
    dice = random.Random(seed)
    hits = 0
    for round_number in range(3):
        engine = SmallEngine(store, groups, blocks=40, seed=seed + round_number)
        for number in range(250):
            if dice.random() < 0.25 and len(engine.requests) < 6:
                length = dice.randrange(1, 40)
                family = dice.randrange(3)
                prompt = [family * 10 + i // 5 for i in range(length)]
                engine.add(Request(f"{round_number}.{number}", prompt, cache_salt=dice.choice([None, None, "s"])))
            engine.step(budget=dice.randrange(1, 16), drafts=dice.choice([0, 0, 2]))
            for request in list(engine.requests.values()):
                if request.state != "gone" and dice.random() < (0.3 if request.num_tokens > 45 else 0.02):
                    hits += request.stored_tokens
                    engine.finish(request)
            if dice.random() < 0.1:
                entries = list(store._handles[0].tier.entries())
                store._handles[0].tier.delete([entry.id for entry in dice.sample(entries, len(entries) // 8)], "room")
        for request in list(engine.requests.values()):
            if request.state != "gone":
                engine.finish(request)
        while engine.requests:
            engine.step()
        assert sorted(engine.free) == list(range(1, 40)), "every block came back"
        engine.close()
        store.flush(10)
    assert hits, "else nothing was tried"
