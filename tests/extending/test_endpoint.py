"""An endpoint is a file of server/endpoints, behind the guards that all are behind."""

from itertools import combinations

import pytest
from extending.page import shown
from server.serving import running, tiny_engine, words
from starlette.routing import Match

from kvire.core.discovery import parts
from kvire.server import endpoints

KEY = "k" * 32


def get(path: str) -> dict[str, str]:
    return {"type": "http", "path": path, "method": "GET"}


@pytest.fixture
def add_endpoint(add_file):
    add_file(endpoints.__name__, "cache", shown("async def cache"))


def test_an_endpoint_is_a_file(add_endpoint):
    with running(tiny_engine()) as served:
        assert served.request("GET", "/v1/cache").json == {"remembered_tokens": 0}
        served.post("/v1/completions", {"prompt": words(1, 64), "max_tokens": 1, "ignore_eos": True})
        assert served.request("GET", "/v1/cache").json["remembered_tokens"] >= 64
        assert (
            'kvire_http_requests_total{route="/v1/cache",status="200"} 2.0'
            in served.request("GET", "/metrics").data.decode()
        )


def test_it_needs_a_key_where_others_do(add_endpoint):
    with running(tiny_engine(), api_keys=(KEY,)) as served:
        assert served.request("GET", "/v1/cache").status == 401


def test_the_order_of_endpoints_does_not_matter():
    """No path of one matches another."""
    routes = [route for router in parts(endpoints, "router") for route in router.routes]
    assert len(routes) == 8
    for one, other in combinations(routes, 2):
        path = other.path.replace("{name}", "x").replace("{name:path}", "x")
        assert one.matches(get(path))[0] is Match.NONE, (one.path, other.path)
