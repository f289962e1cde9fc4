"""The engine on its own thread: who hears what, and what is left behind."""

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from harness.engines import held, request, tiny_engine, words
from harness.waiting import until
from models.tiny import make_tiny

from kvire import LLM, AsyncLLM
from kvire.core.config import StoreConfig
from kvire.core.errors import EngineClosedError, RequestError
from kvire.engine.client import EngineClient
from kvire.engine.result import Collector


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny("llama", tmp_path_factory.mktemp("tiny")))


def test_streams_from_many_threads() -> None:
    with EngineClient(tiny_engine()) as client:
        answers: dict[int, list[int]] = {}

        def work(i: int) -> None:
            outputs = client.stream(request(words(i % 4, 40)))
            answers[i] = [token for output in outputs for token in output.token_ids]

        threads = [threading.Thread(target=work, args=(i,)) for i in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(answers[i] == answers[i % 4] for i in range(12))


def test_leaving_a_stream_frees_its_blocks() -> None:
    engine = tiny_engine()
    with EngineClient(engine) as client:
        for _ in client.stream(request(words(1, 40), max_tokens=3000)):
            break
        list(client.stream(request(words(2, 5), max_tokens=1)))
        assert client.in_flight == 0
        assert engine.pool.num_free == engine.pool.num_blocks


def test_a_closed_client_says_so_each_time_anew() -> None:
    client = EngineClient(tiny_engine()).start()
    client.close()
    errors = []
    for _ in range(2):
        with pytest.raises(EngineClosedError, match="closed") as error:
            list(client.stream(request(words(1, 4))))
        errors.append(error.value)
    assert errors[0] is not errors[1]


def test_when_the_model_fails_everybody_hears_of_it() -> None:
    engine = tiny_engine()

    def broken(batch):
        raise RuntimeError("out of cheese")

    engine.model.forward = broken
    with EngineClient(engine) as client, pytest.raises(EngineClosedError, match="out of cheese"):
        list(client.stream(request(words(1, 4))))


def test_a_script_may_end_in_the_middle_of_an_answer(tmp_path: Path) -> None:
    """Without close(), with an answer in flight, and with an exception of its own: no abort, no core dump."""
    tests = Path(__file__).parents[1]
    code = f"""
import sys; sys.path.insert(0, {str(tests)!r})
from harness.engines import *
from kvire.engine.client import EngineClient
from kvire.engine.result import Collector
stream = EngineClient(tiny_engine()).start().stream(request(words(1, 40), max_tokens=3000))
next(stream)
raise SystemExit(7)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 7, done.stderr


def test_llm_takes_prompts_one_by_one_or_many(tiny: str) -> None:
    with LLM(tiny, kv_memory="8MiB", max_queue=4) as llm:
        one = llm.generate("hello", max_tokens=4, temperature=0)
        many = llm.generate(["hello", list(llm.encode("hello")), "other"] * 5, max_tokens=4, temperature=0)
        assert len(many) == 15
        assert many[0].token_ids == many[1].token_ids == one.token_ids
        assert one.usage.total_tokens == 5 + len(one.token_ids)
        assert llm.generate([], max_tokens=4) == []
        assert list(llm.stream("hello", max_tokens=4, temperature=0))[-1].finish_reason == "length"
        samples = llm.generate("hello", max_tokens=6, n=3, seed=1, ignore_eos=True)
        assert len({tuple(part.token_ids) for part in samples.completions}) == 3
        for wrong in ({"temprature": 1}, {"max_tokens": "many"}):
            with pytest.raises(RequestError):
                llm.generate("x", **wrong)
        with pytest.raises(RequestError, match="UTF-8"):
            llm.generate("a\udcffb")
        with pytest.raises(RequestError):
            llm.generate([1.5])


def test_a_store_that_is_named_by_its_folder_keeps_its_limit(tiny: str, tmp_path: Path) -> None:
    lines = []
    for store in (StoreConfig(path=tmp_path / "store", disk_bytes=64 << 20), tmp_path / "store"):
        with LLM(tiny, kv_memory="8MiB", store=store) as llm:
            lines.append(llm.store_line)
    assert lines[0] == lines[1] and "at most 60 MiB" in str(lines[0])


def test_async_llm(tiny: str) -> None:
    async def talk() -> None:
        async with AsyncLLM(tiny, kv_memory="8MiB", max_queue=4) as llm:
            one = await llm.generate("hello", max_tokens=4, temperature=0)
            many = await llm.generate(["hello"] * 20, max_tokens=4, temperature=0)
            assert [r.token_ids for r in many] == [one.token_ids] * 20
            chat = await llm.chat([{"role": "user", "content": "hi"}], max_tokens=3, temperature=0)
            assert chat.cache.prompt_tokens == chat.usage.prompt_tokens
            stream = [output async for output in llm.stream("hello", max_tokens=4, temperature=0)]
            assert "".join(output.text for output in stream) == one.text
            with held(llm.client.engine):
                task = asyncio.create_task(llm.generate("hello", max_tokens=1500, ignore_eos=True))
                await asyncio.to_thread(until, lambda: llm.client.in_flight)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            with pytest.raises(RequestError):
                await llm.generate(["fine", "x" * 5000], max_tokens=4)
            await llm.generate("hello", max_tokens=1)
            assert llm.client.in_flight == 0

    asyncio.run(talk())


def test_the_time_to_the_first_token_is_told_apart() -> None:
    """One seat: whoever comes second waits for the whole answer of the first, and that is its queue."""
    with EngineClient(tiny_engine(max_num_seqs=1)) as client:
        asked = [request(words(i, 20), max_tokens=40) for i in range(2)]
        timings = {}

        def work(number: int) -> None:
            collector = Collector(asked[number])
            for output in client.stream(asked[number]):
                collector.add(output)
            timings[number] = collector.result().timing

        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for timing in timings.values():
        assert timing.ttft_s == pytest.approx(timing.queue_s + timing.load_s + timing.prefill_s)
        assert timing.load_s == 0 and timing.prefill_s > 0
    early, late = sorted(timings.values(), key=lambda timing: timing.queue_s)
    assert late.queue_s > 10 * early.tpot_s > 0
