"""What /metrics and /health say."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from harness.engines import held
from harness.waiting import until
from server.serving import BLOCK, running, slow_model, tiny_engine, words


def samples(served) -> dict[str, float]:
    text = served.request("GET", "/metrics").data.decode()
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def complete(served, prompt, **more):
    answer = served.post("/v1/completions", {"prompt": prompt, "max_tokens": 1, "ignore_eos": True} | more)
    assert answer.status == 200
    return answer.json


@pytest.mark.parametrize("deterministic", [False, True])
def test_s27_a_shared_prefix_shorter_than_a_block_is_told_from_none(deterministic):
    """0.9 blocks shared by 100 prompts: where only whole blocks are reused they never hit, and metrics say why."""
    with running(tiny_engine(deterministic=deterministic)) as served:
        assert samples(served)["kvire_block_size_tokens"] == BLOCK
        for i in range(20):
            complete(served, [i] * 40)  # nothing in common
        miss = 'kvire_cache_misses_total{reason="%s"}'
        before = samples(served)
        assert before[miss % "never_stored"] == 20 and before[miss % "shorter_than_block"] == 0
        shared = round(0.9 * BLOCK)
        for i in range(100):
            complete(served, [*words(1, shared), 100 + i % 100, *words(i + 10, 30)])
        after = samples(served)
        assert after[miss % ("shorter_than_block" if deterministic else "diverged")] == 99
        assert after[miss % "never_stored"] == 21
        reused = after['kvire_prompt_tokens_total{source="device"}']
        assert reused == 0 if deterministic else reused >= 99 * shared
        for i in range(100):
            complete(served, [*words(2, round(1.1 * BLOCK)), 100 + i % 100, *words(i + 1000, 30)])
        last = samples(served)
        assert last[miss % "diverged"] == (99 if deterministic else 198)
        more = last['kvire_prompt_tokens_total{source="device"}'] - reused
        assert more == 99 * BLOCK if deterministic else more >= 99 * round(1.1 * BLOCK)


def test_tokens_by_source_add_up_and_only_grow(fresh):
    total, last = 0, {}
    for i in range(12):
        answer = complete(fresh, words(i % 4, 50 + i), n=1 + i % 3, max_tokens=3)
        total += answer["usage"]["prompt_tokens"]
        now = samples(fresh)
        device, computed = (now[f'kvire_prompt_tokens_total{{source="{source}"}}'] for source in ("device", "computed"))
        assert device + computed == total
        assert all(now[name] >= value for name, value in last.items() if name.endswith("_total"))
        last = now
    assert last["kvire_generated_tokens_total"] == sum(3 * (1 + i % 3) for i in range(12))
    assert last["kvire_prompts_total"] == 12
    assert last["kvire_ttft_seconds_count"] == last["kvire_tpot_seconds_count"] == 12


def test_gauges_of_pool_and_queue():
    options = {"blocks": 256, "max_num_seqs": 2}
    with running(tiny_engine(model=slow_model(), **options)) as served, ThreadPoolExecutor(1) as pool:
        idle = samples(served)
        assert idle["kvire_pool_blocks"] == idle["kvire_pool_free_blocks"] == 256
        assert idle['kvire_engine_info{block_size="16",kv_dtype="float32",model="tiny"}'] == 1
        streams = [
            served.openai().completions.create(model="tiny", prompt=words(i, 40), max_tokens=1500, stream=True)
            for i in range(2)
        ]
        for stream in streams:
            next(iter(stream))
        with held(served.engine):
            waiting = pool.submit(complete, served, words(9, 40))
            until(lambda: served.client.in_flight == 3)
            busy, health = samples(served), served.request("GET", "/health").json
        assert busy["kvire_running_sequences"] == health["queue"]["running"] == 2
        assert busy["kvire_queue_requests"] == health["queue"]["waiting"] == 1
        assert busy["kvire_pool_free_blocks"] <= 250
        for stream in streams:
            stream.close()
        waiting.result()
        served.wait_until_idle()
        done = samples(served)
        assert done["kvire_running_sequences"] == done["kvire_queue_requests"] == 0
        assert done["kvire_pool_remembered_blocks"] > 0 and done["kvire_pool_free_blocks"] == 256


def test_evictions_preemptions_and_recomputed_tokens_are_counted():
    with running(tiny_engine(blocks=10)) as served:
        served.together(*(partial(complete, served, words(i, 40), max_tokens=100) for i in range(2)))
        complete(served, words(3, 150))
        counted = samples(served)
    assert counted["kvire_preemptions_total"] > 0
    assert counted["kvire_recomputed_tokens_total"] > 0
    assert counted["kvire_evictions_total"] > 0
    assert counted["kvire_collisions_total"] == 0


def test_requests_are_counted_by_route_and_status_and_paths_are_not_labels(fresh):
    complete(fresh, [1, 2, 3])
    fresh.post("/v1/completions", {"prompt": []})
    fresh.request("GET", "/v1/completions")
    fresh.request("GET", "/v1/models/some/name")
    for i in range(30):
        fresh.request("GET", f"/scan/{i}")
    counted = {name: value for name, value in samples(fresh).items() if name.startswith("kvire_http_requests_total")}
    assert counted == {
        'kvire_http_requests_total{route="/v1/completions",status="200"}': 1,
        'kvire_http_requests_total{route="/v1/completions",status="400"}': 1,
        'kvire_http_requests_total{route="/v1/completions",status="405"}': 1,
        'kvire_http_requests_total{route="/v1/models/{name:path}",status="404"}': 1,
        'kvire_http_requests_total{route="other",status="404"}': 30,
    }


def test_two_servers_in_one_process_do_not_meet(fresh):
    with running(tiny_engine()) as other:
        complete(fresh, words(1, 30))
        assert samples(fresh)["kvire_prompts_total"] == 1
        assert samples(other)["kvire_prompts_total"] == 0


@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_both_are_open_on_loopback(fresh, path):
    answer = fresh.request("GET", path)
    assert answer.status == 200
    if path == "/health":
        assert answer.json == {"status": "ok", "model": "tiny", "queue": {"waiting": 0, "max": 256, "running": 0}}
