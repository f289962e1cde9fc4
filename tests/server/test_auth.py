"""Who is let in, and where the server listens."""

import hmac
import socket

import openai
import pytest
from server.serving import running, tiny_engine

from kvire.core.errors import ConfigError
from kvire.server.auth import ApiKeys
from kvire.server.options import ServerOptions
from kvire.server.run import bind, url_of, welcome, with_environment

KEYS = ("first-key", "klüc-ключ-鍵")
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


@pytest.fixture(scope="module")
def locked():
    with running(tiny_engine(), api_keys=KEYS) as served:
        yield served


def bearer(key: bytes) -> dict:
    return {"Authorization": b"Bearer " + key}


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens_also_other_than_ascii(locked, key):
    assert locked.post("/v1/chat/completions", CHAT, headers=bearer(key.encode())).status == 200
    assert locked.request("GET", "/metrics", headers=bearer(key.encode())).status == 200


@pytest.mark.parametrize(
    "header",
    [
        None,
        b"",
        b"Bearer",
        b"Bearer ",
        b"Bearer first-ke",
        b"Bearer first-key2",
        b"Bearer FIRST-KEY",
        b"Basic first-key",
        b"first-key",
        "Bearer klüc-ключ-鍵x".encode(),
        b"Bearer \xff\xfe",
        b"Bearer " + b"x" * 5000,
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/metrics", "/nothing", "/docs"])
def test_without_a_valid_key_everything_but_health_is_401(locked, header, path):
    headers = {} if header is None else {"Authorization": header}
    for method in ("GET", "POST"):
        answer = locked.request(method, path, CHAT, headers=headers)
        assert answer.status == 401
        assert answer.error["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
        assert "key" not in answer.error["message"].replace("API key", "").replace("<key>", "")
    assert locked.request("GET", "/health", headers=headers).status == 200


def test_the_openai_client_with_and_without_key(locked):
    ask = {"model": "tiny", "messages": CHAT["messages"], "max_tokens": 1}
    assert locked.openai("first-key").chat.completions.create(**ask).usage.completion_tokens == 1
    with pytest.raises(openai.AuthenticationError) as caught:
        locked.openai("wrong").chat.completions.create(**ask)
    assert caught.value.code == "invalid_api_key"


def test_every_key_is_compared_in_constant_time(monkeypatch):
    """compare_digest sees two digests of equal length for each key, however early one fits."""
    seen = []
    real = hmac.compare_digest
    monkeypatch.setattr("kvire.server.auth.hmac.compare_digest", lambda a, b: seen.append((a, b)) or real(a, b))
    keys = ApiKeys(["a", "bb", "ccc"])
    assert keys.tenant(b"Bearer a") and keys.tenant(b"Bearer zzzzzzzzz") is None
    assert len(seen) == 6
    assert all(isinstance(a, bytes) and len(a) == len(b) == 32 for a, b in seen)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "localhost:1"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Host": "127.0.0.2"}, 200),
        ({"Origin": "http://localhost:3000"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "localhost.evil.example"}, 403),
        ({"Host": "192.168.0.7:8000"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://[bad"}, 403),
    ],
)
def test_without_keys_web_pages_and_other_names_are_kept_out(shared, headers, status):
    answer = shared.post("/v1/chat/completions", CHAT, headers=headers)
    assert answer.status == status
    if status == 403:
        assert answer.error["code"] == "foreign_host" and "KVIRE_API_KEY" in answer.error["message"]
        assert shared.request("GET", "/metrics", headers=headers).status == 403
        assert shared.request("GET", "/health", headers=headers).status == 200


def test_with_keys_any_host_name_will_do(locked):
    headers = bearer(b"first-key") | {"Host": "llm.example.org", "Origin": "https://chat.example.org"}
    assert locked.post("/v1/chat/completions", CHAT, headers=headers).status == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_beyond_loopback_only_with_a_key(host):
    with pytest.raises(ConfigError, match=r"without an API key.*KVIRE_API_KEY.*127\.0\.0\.1"):
        bind(ServerOptions(host=host, port=0))
    with bind(ServerOptions(host=host, port=0, api_keys=("k",))) as listener:
        assert url_of(listener).startswith(("http://127.0.0.1:", "http://[::1]:"))
        assert any("unencrypted" in line for line in welcome(ServerOptions(), listener, "m"))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.1.2.3"])
def test_loopback_needs_no_key(host):
    with bind(ServerOptions(host=host, port=0)) as listener:
        assert listener.getsockname()[0].startswith("127.")


def test_a_port_in_use_and_an_unknown_host_are_explained():
    with bind(ServerOptions(port=0)) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1 port {port}.*another port"):
            bind(ServerOptions(port=port))
    with bind(ServerOptions(port=port)):
        pass  # free again at once
    with pytest.raises(ConfigError, match="cannot find the address"):
        bind(ServerOptions(host="no such host", port=0))


def test_keys_from_the_environment():
    assert with_environment(ServerOptions(), {}).api_keys == ()
    assert with_environment(ServerOptions(), {"KVIRE_API_KEY": "a, b"}).api_keys == ("a", "b")
    assert with_environment(ServerOptions(api_keys=("c",)), {"KVIRE_API_KEY": "a"}).api_keys == ("c",)
    for empty in ("", " ", "a,,b"):
        with pytest.raises(ConfigError, match="empty key"):
            with_environment(ServerOptions(), {"KVIRE_API_KEY": empty})


@pytest.mark.parametrize(
    "options",
    [
        {"api_keys": ("",)},
        {"api_keys": (" x",)},
        {"api_keys": "secret"},
        {"port": 70000},
        {"request_timeout_s": 0},
        {"request_timeout_s": float("nan")},
        {"max_body_bytes": 0},
        {"served_name": ""},
    ],
)
def test_options_that_cannot_work_are_refused(options):
    with pytest.raises(ConfigError):
        ServerOptions(**options)


def test_a_refused_upload_is_still_answered(locked):
    """The client may be sending megabytes while it is told 401."""
    with locked.begun("POST", "/v1/completions", b"x" * (4 * 1024 * 1024)) as response:
        assert response.status == 401


def test_the_listening_socket_is_tcp_on_loopback_only(shared):
    port = int(shared.url.rsplit(":", 1)[1])
    addresses = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), port, type=socket.SOCK_STREAM)}
    for address in addresses - {"127.0.0.1", "::1"}:
        if not address.startswith("127."):
            with pytest.raises(OSError, match=r"."):
                socket.create_connection((address, port), timeout=1).close()
