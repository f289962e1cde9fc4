"""`kvire doctor --url`: what a server's own metrics say, and what is no Kvire server."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from harness.engines import tiny_engine
from typer.testing import CliRunner

from kvire.cli.main import cli
from kvire.core.errors import ConfigError
from kvire.core.report import MissReason
from kvire.doctor.live import MISS_ADVICE, examine_server
from kvire.engine.client import EngineClient
from kvire.server.metrics import Metrics

BUSY = """
kvire_prompts_total 200.0
kvire_prompt_tokens_total{source="device"} 500.0
kvire_prompt_tokens_total{source="disk"} 300.0
kvire_prompt_tokens_total{source="computed"} 1200.0
kvire_cache_misses_total{reason="evicted"} 50.0
kvire_cache_misses_total{reason="damaged"} 1.0
kvire_saved_seconds 12.5
kvire_preemptions_total 3.0
kvire_recomputed_tokens_total 77.0
kvire_store_blocks{tier="disk"} 10.0
kvire_store_used_bytes{tier="disk"} 99.0
kvire_store_limit_bytes{tier="disk"} 100.0
kvire_store_evictions_total{tier="disk",reason="room"} 4.0
kvire_store_dropped_blocks_total{tier="disk"} 8.0
kvire_store_damaged_blocks_total{tier="disk"} 1.0
kvire_store_unavailable_total{tier="disk"} 2.0
kvire_store_refused_total{tier="disk",reason="wear"} 6.0
"""


@contextmanager
def answering(body: str, status: int = 200) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            given = self.headers.get("Authorization")
            self.send_response(status if given != "Bearer wrong" else 401)
            self.end_headers()
            self.wfile.write(body.encode() if self.path == "/metrics" else b"")

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_the_metrics_of_an_engine_are_read_with_their_real_names() -> None:
    with EngineClient(tiny_engine()) as client:
        client.engine.stats.requests, client.engine.stats.device_tokens = 4, 60
        client.engine.stats.computed_tokens = 20
        client.engine.stats.misses[MissReason.EVICTED] = 2
        exposition = Metrics(client, "tiny").text().decode()
    with answering(exposition) as url:
        values = examine_server(f"{url}/v1/")
    assert (values["prompts"], values["prompt_tokens"], values["misses"]) == (4, 80, {"evicted": 2})
    assert values["sources"]["device"] == {"tokens": 60, "share": 0.75}
    assert "no store" in values["findings"][-1]["what"]


def test_trouble_is_named_and_rare_misses_are_not() -> None:
    with answering(BUSY) as url:
        values = examine_server(url)
        text = " ".join(CliRunner().invoke(cli, ["doctor", "--url", url], env={"COLUMNS": "200"}).stdout.split())
        shown = json.loads(CliRunner().invoke(cli, ["doctor", "--url", url, "--json"]).stdout)
    assert [one["what"].rstrip(".") for one in values["findings"]] == [
        "50 prompts (25%): evicted",
        "3 answers had to make room, and 77 tokens were computed again",
        "disk: 8 blocks were not written because the write-behind buffer was full",
        "disk: 1 blocks were not what was written, and were removed",
        "disk: could not answer 2 times, or not in time",
        "disk: 6 blocks were not kept",
        "disk: is full, and 4 blocks had to go",
    ]
    assert "40.0% of 2,000 prompt tokens in 200 prompts were reused" in text
    assert all(one["what"] in text for one in values["findings"])
    assert shown == values


def test_every_reason_to_miss_has_advice() -> None:
    assert set(MISS_ADVICE) == set(MissReason) - {MissReason.COMPLETE}


@pytest.mark.parametrize(
    ("body", "status", "key", "said"),
    [
        ("<html>", 200, None, "Kvire server"),
        ("vllm_requests 3\n", 200, None, "no Kvire server"),
        (BUSY, 404, None, "404"),
        (BUSY, 200, "wrong", "--api-key"),
    ],
)
def test_what_is_no_kvire_server_is_said(body: str, status: int, key: str | None, said: str) -> None:
    with answering(body, status) as url, pytest.raises(ConfigError, match=said):
        examine_server(url, key)


@pytest.mark.parametrize(
    ("url", "said"),
    [("http://127.0.0.1:1", "nothing answers"), ("ftp://x", "http://host:port"), ("http://x:y", "port")],
)
def test_wrong_urls_are_explained(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        examine_server(url)
