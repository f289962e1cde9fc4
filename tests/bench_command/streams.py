"""A server that answers every request with what a test wrote down, chunk by chunk."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import sleep
from typing import Any

Script = Sequence[float | str | dict[str, Any]]  # pauses in seconds, lines as they are, or events


@contextmanager
def scripted(script: Script, status: int = 200) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(its URL, the bodies that it was sent)."""
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status)
            self.end_headers()
            for part in script:
                if isinstance(part, float):
                    sleep(part)
                    continue
                line = part if isinstance(part, str) else f"data: {json.dumps(part)}"
                self.wfile.write(f"{line}\n\n".encode())
                self.wfile.flush()

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"data": []}')

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", bodies
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def piece(text: str | None = None, **delta: Any) -> dict[str, Any]:
    """One chunk of a streamed chat."""
    content = {} if text is None else {"content": text}
    return {"choices": [{"index": 0, "delta": {**content, **delta}, "finish_reason": None}]}


END = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
DONE = "data: [DONE]"


def usage(prompt: int, completion: int, cached: int | None = None) -> dict[str, Any]:
    """The chunk that counts."""
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion, **details}}
