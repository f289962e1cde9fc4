"""The files that a request with a disk hit passes from HTTP to its first token, and their number.

    python tools/trace_request.py [--model smollm2] [--json FILE]

A server that has measured its speed answers one chat request whose prompt's KV is on disk. Every
file of Kvire with a call on the way is noted, from the first byte of the request until the first
token leaves, on all threads that the answer waits for. Printed, in order of the
first call:

files: with at least one call.
hops: those of them that pass the request on, by a call into a file that had no call yet.

docs/architecture.md tells the way in words.
"""

import argparse
import http.client
import json
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import kvire
from kvire.core.config import StoreConfig
from kvire.llm import LLM
from kvire.server.app import create_app
from kvire.server.options import ServerOptions
from kvire.server.run import bind, make_server

PACKAGE = str(Path(kvire.__file__).parent) + "/"
BESIDE = ("disk upkeep", "kvire write", "kvire explain")  # names of threads that no answer waits for
DOCUMENT = "The harbour of Ardle closes at nine in the evening, except on the day of the fair. " * 80
OTHER = "A prompt of its own, from which the server learns how fast it computes. " * 30


@dataclass
class Trace:
    """Of calls between files while `is_on`.

    entered: each file in order of its first call, with the file that called it first and the
        thread's name.
    """

    is_on: bool = False
    entered: dict[str, tuple[str | None, str]] = field(default_factory=dict)

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """What threading.setprofile wants."""
        if not self.is_on or event != "call":
            return
        name, thread = _file(frame), threading.current_thread().name
        if name is not None and name not in self.entered and not thread.startswith(BESIDE):
            self.entered[name] = (_caller(frame, name), thread)

    @property
    def hops(self) -> list[str]:
        """Files that brought the request into another one."""
        passing = {caller for caller, _ in self.entered.values()}
        return [name for name in self.entered if name in passing]


def _file(frame: FrameType) -> str | None:
    """Path below the package of the code that runs in a frame; None if it is not ours."""
    path = frame.f_code.co_filename
    return path.removeprefix(PACKAGE) if path.startswith(PACKAGE) else None


def _caller(frame: FrameType, name: str) -> str | None:
    """The nearest other file of ours below a frame; None at the bottom of a thread."""
    below = frame.f_back
    while below is not None:
        if (other := _file(below)) is not None and other != name:
            return other
        below = below.f_back
    return None


@contextmanager
def served(model: str, store: Path) -> Iterator[int]:
    """A server in this process; gives its port."""
    options = ServerOptions(port=0)
    config = StoreConfig(path=store, key_file=store.with_name("keyring.json"))
    with bind(options) as listener, LLM(model, store=config, kv_memory="256MiB") as llm:
        server = make_server(create_app(llm.client, model, options, llm.sessions), options)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="server")
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


def ask(port: int, prompt: str, trace: Trace | None = None) -> dict[str, Any]:
    """Usage of one streamed answer; `trace` is on until its first token has come."""
    body = {
        "model": "smollm2", "messages": [{"role": "user", "content": prompt}], "max_tokens": 4,
        "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", port)
    if trace is not None:
        trace.is_on = True
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    usage: dict[str, Any] = {}
    for line in connection.getresponse():
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if trace is not None and any(choice["delta"].get("content") for choice in event["choices"]):
            trace.is_on = False
        usage = event.get("usage") or usage
    connection.close()
    return usage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--json", type=Path, help="write the counts and files here as well")
    given = parser.parse_args()
    trace = Trace()
    threading.setprofile(trace)  # before any thread of a server starts
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        with served(given.model, store) as port:
            ask(port, DOCUMENT + "When does it close?")
        with served(given.model, store) as port:
            ask(port, OTHER)
            usage = ask(port, DOCUMENT + "Which harbour is it?", trace)
    reused = usage["prompt_tokens_details"]["cached_tokens"]
    if not reused:
        sys.exit("nothing was reused: the trace would not be that of a hit")
    for number, (name, (caller, thread)) in enumerate(trace.entered.items(), 1):
        print(f"{number:3} {name:40} from {caller or '(a thread begins)':32} {thread}")
    print(f"{len(trace.hops)} hops, {len(trace.entered)} files; {reused} of {usage['prompt_tokens']} tokens reused")
    if given.json is not None:
        report = {"model": given.model, "hops": len(trace.hops), "files": list(trace.entered)}
        given.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
