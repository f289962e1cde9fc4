"""Servers that the tests of remote tiers share. Each test finds them empty or uses names of its own."""

from collections.abc import Iterator

import pytest
from store import servers


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with servers.redis_server(tmp_path_factory.mktemp("redis")) as port:
        yield f"redis://127.0.0.1:{port}/0"


@pytest.fixture(scope="session")
def cluster_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with servers.redis_cluster(tmp_path_factory.mktemp("cluster")) as ports:
        yield f"redis+cluster://127.0.0.1:{ports[0]}"


@pytest.fixture(scope="session")
def s3_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with servers.s3_server(tmp_path_factory.mktemp("s3")) as url:
        yield url
