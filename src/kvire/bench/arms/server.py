"""A `kvire serve` of our own: started, asked for its counters, stopped, started again."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic, sleep
from urllib.parse import urlsplit

from kvire.bench.client import Endpoint, connect, get
from kvire.core.errors import ConfigError

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0
FLUSH_TIMEOUT_S = 120.0
PROGRAM = (sys.executable, "-m", "kvire.cli.main")
METRIC = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$")
TIER = re.compile(r'(?:tier|source)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Counters:
    """What /metrics says, by name and, where there are any, by tier or source; other labels are
    left out.
    """

    values: dict[str, dict[str, float]]

    def of(self, name: str, tier: str = "") -> float:
        """0 where it is not told."""
        return self.values.get(name, {}).get(tier, 0.0)

    def total(self, name: str) -> float:
        """Over all tiers."""
        return sum(self.values.get(name, {}).values())

    def beyond(self, name: str, tiers: Sequence[str]) -> float:
        """Over all tiers but these: a remote tier's name is its address."""
        return sum(value for tier, value in self.values.get(name, {}).items() if tier not in tiers)


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server's process.

    endpoint: its address and model.
    pid: of the process.
    """

    endpoint: Endpoint
    pid: int

    def counters(self) -> Counters:
        """Read /metrics. Raises ConfigError."""
        return parse_metrics(get(self.endpoint, "/metrics").decode())

    def read_bytes(self) -> int | None:
        """What the process has caused to be read from storage, by /proc/PID/io; None where that is
        not told.
        """
        try:
            lines = Path(f"/proc/{self.pid}/io").read_text(encoding="ascii").splitlines()
        except OSError:
            return None
        return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), None)

    def flush(self) -> bool:
        """Wait until no block waits to be written to a tier; False if that takes too long."""
        end = monotonic() + FLUSH_TIMEOUT_S
        while monotonic() < end:
            if self.counters().total("kvire_store_queue_blocks") == 0:
                return True
            sleep(0.05)
        return False


class Traffic:
    """Whether a new process is asked by nobody else, by its own count of prompts.

    ours: our prompts so far.

    A failed request may be counted late or never, and would hide a foreign one.
    """

    def __init__(self) -> None:
        self.ours = True
        self._counted = self._open = 0.0  # open: prompts of ours that were not counted yet

    def check(self, counters: Counters, sent: int = 0) -> None:
        """Compare the server's count of prompts with ours.

        sent: requests since the last time.
        """
        self._open += sent
        more = counters.of("kvire_prompts_total") - self._counted
        self.ours = self.ours and more <= self._open
        self._open = max(0.0, self._open - more)
        self._counted += more


def parse_metrics(text: str) -> Counters:
    """Prometheus' text format."""
    values: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for line in text.splitlines():
        if match := METRIC.match(line):
            tier = TIER.search(match[2] or "")
            values[match[1]][tier[1] if tier else ""] += float(match[3])
    return Counters(values)


@contextmanager
def serving(
    model: str, options: Sequence[str], endpoint: Endpoint, program: Sequence[str] = PROGRAM
) -> Iterator[RunningServer]:
    """Start `kvire serve MODEL OPTIONS` on a free port, wait until it answers, and stop it properly
    at the end.

    endpoint: how to ask it, without an address yet.

    Raises ConfigError with the server's words if it does not start.
    """
    there = replace(endpoint, url=f"http://127.0.0.1:{free_port()}/v1", model=model)
    port = str(urlsplit(there.url).port)
    environment = {name: value for name, value in os.environ.items() if name != "KVIRE_API_KEY"}
    with process_answering([*program, "serve", model, "--port", port, *options], there, environment) as pid:
        yield RunningServer(there, pid)


@contextmanager
def process_answering(
    words: Sequence[str], endpoint: Endpoint, environment: Mapping[str, str], folder: Path | None = None
) -> Iterator[int]:
    """Start a server in a session of its own; the process id that leads it.

    Stopped with all its processes at the end.

    Waits until `endpoint` answers. Raises ConfigError with the server's words if it does not start.
    """
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(  # noqa: S603
            words, stdout=log, stderr=log, env=environment, cwd=folder, start_new_session=True
        )
        try:
            end = monotonic() + START_TIMEOUT_S
            while not _answers(endpoint):
                if process.poll() is not None or monotonic() > end:
                    log.seek(0)
                    said = log.read()[-2000:].decode(errors="replace").strip()
                    raise ConfigError(f"`{' '.join(words)}` did not start: {said}")
                sleep(0.05)
            yield process.pid
        finally:
            _stop(process)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _answers(endpoint: Endpoint) -> bool:
    connection = connect(replace(endpoint, timeout_s=5.0))
    try:
        connection.request("GET", f"{urlsplit(endpoint.url).path}/models")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Ask it to end, so that it writes its last blocks; insist if it does not."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
            return
