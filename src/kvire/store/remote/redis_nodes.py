"""The server of each key: one server, or the nodes of a cluster; and idle connections to each."""

import binascii
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from kvire.core.errors import TierUnavailable
from kvire.store.remote.deadline import Deadline
from kvire.store.remote.redis_address import Address
from kvire.store.remote.redis_wire import Login, RedisReply, RedisRequest, ReplyError, Wire, command
from kvire.store.tier import Buffer

MAX_IDLE = 8  # connections kept per server; more are closed after use
MAX_REDIRECTS = 3
SLOTS = 1 << 14


def slot_of(key: str) -> int:
    """A cluster's slot of a key without braces: CRC-16/XMODEM, by the cluster specification."""
    return binascii.crc_hqx(key.encode(), 0) % SLOTS


class RedisServer:
    """One address and its idle connections. Thread-safe."""

    def __init__(self, address: Address, login: Login) -> None:
        self.address = address
        self._login = login
        self._idle: list[Wire] = []
        self._lock = threading.Lock()
        self._closed = False

    @contextmanager
    def wire(self, deadline: Deadline) -> Iterator[Wire]:
        """A connection for one exchange.

        An error closes it: half a reply may still arrive.
        """
        wire = self._take() or Wire.connect(self.address, self._login, deadline)
        try:
            yield wire
        except BaseException:
            wire.close()
            raise
        self._give(wire)

    def close(self) -> None:
        """Close idle connections now and used ones after their use."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for wire in idle:
            wire.close()

    def _take(self) -> Wire | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                wire = self._idle.pop()
            if wire.is_idle():
                return wire
            wire.close()  # the server closed it meanwhile

    def _give(self, wire: Wire) -> None:
        with self._lock:
            if not self._closed and len(self._idle) < MAX_IDLE:
                self._idle.append(wire)
                return
        wire.close()


class Nodes:
    """The servers behind one URL. Thread-safe; opens nothing before the first call.

    cluster: whether keys are spread over many nodes by their slot; `addresses` are then the first
        nodes to ask for the others.
    """

    def __init__(self, addresses: Sequence[Address], login: Login, *, cluster: bool) -> None:
        self._login = login
        self._cluster = cluster
        self._lock = threading.Lock()
        self._servers = {str(address): RedisServer(address, login) for address in addresses}
        self._seeds = tuple(self._servers)
        self._by_slot: dict[int, RedisServer] = {}
        self._stale = cluster

    def call(self, requests: Sequence[tuple[str, RedisRequest]], deadline: Deadline) -> list[RedisReply]:
        """The reply to each (key, request), sent together to each server.

        Raises TierUnavailable.
        """
        by_server: dict[RedisServer, list[int]] = {}
        for place, (key, _) in enumerate(requests):
            by_server.setdefault(self._server(key, deadline), []).append(place)
        replies: list[RedisReply] = [None] * len(requests)
        with self._noticing_failures(), ExitStack() as wires:
            asked = [(wires.enter_context(server.wire(deadline)), places) for server, places in by_server.items()]
            for wire, places in asked:
                wire.send(_joined([requests[place][1] for place in places]), deadline)
            for wire, places in asked:
                for place in places:
                    replies[place] = wire.read_reply(deadline)
        for place, reply in enumerate(replies):
            if isinstance(reply, ReplyError) and (server := self._redirected(reply)):
                replies[place] = self._follow(server, reply, requests[place][1], None, deadline)
        return replies

    def fetch(self, key: str, buffers: Sequence[Buffer], deadline: Deadline) -> int | ReplyError | None:
        """Read the value of a key into `buffers`, as Wire.read_value does."""
        request = (command("GET", key),)
        with self._noticing_failures(), self._server(key, deadline).wire(deadline) as wire:
            wire.send(request, deadline)
            reply = wire.read_value(buffers, deadline)
        if isinstance(reply, ReplyError) and (server := self._redirected(reply)):
            followed = self._follow(server, reply, request, buffers, deadline)
            assert followed is None or isinstance(followed, (int, ReplyError))
            return followed
        return reply

    def primaries(self, deadline: Deadline) -> list[RedisServer]:
        """All servers to list keys from."""
        if not self._cluster:
            return list(self._servers.values())
        self._refresh_if_stale(deadline)
        return list(dict.fromkeys(self._by_slot.values()))

    def close(self) -> None:
        """Close all connections."""
        for server in list(self._servers.values()):
            server.close()

    def _server(self, key: str, deadline: Deadline) -> RedisServer:
        if not self._cluster:
            return self._servers[self._seeds[0]]
        self._refresh_if_stale(deadline)
        if (server := self._by_slot.get(slot_of(key))) is None:
            self._stale = True
            raise TierUnavailable("no node of the cluster serves this key's slot")
        return server

    def _follow(
        self,
        server: RedisServer,
        error: ReplyError,
        request: RedisRequest,
        buffers: Sequence[Buffer] | None,
        deadline: Deadline,
    ) -> RedisReply:
        """Follow a redirection of the cluster: the slot has moved, or is moving."""
        for _ in range(MAX_REDIRECTS):
            with self._noticing_failures(), server.wire(deadline) as wire:
                if error.code == "ASK":
                    wire.send((command("ASKING"),), deadline)
                    wire.read_reply(deadline)
                wire.send(request, deadline)
                reply = wire.read_reply(deadline) if buffers is None else wire.read_value(buffers, deadline)
            if not isinstance(reply, ReplyError) or (elsewhere := self._redirected(reply)) is None:
                return reply
            server, error = elsewhere, reply
        raise TierUnavailable(f"the cluster sends from node to node: {error.text}")

    def _redirected(self, error: ReplyError) -> RedisServer | None:
        """The target of "MOVED slot host:port" or "ASK slot host:port"; None for any other
        error.
        """
        words = error.text.split(" ")
        if not self._cluster or error.code not in {"MOVED", "ASK"} or len(words) != 3:
            return None
        self._stale |= error.code == "MOVED"
        host, _, port = words[2].rpartition(":")
        return self._known(host, int(port)) if host and port.isdigit() else None

    def _known(self, host: str, port: int) -> RedisServer:
        with self._lock:
            address = Address(host, port)
            return self._servers.setdefault(str(address), RedisServer(address, self._login))

    @contextmanager
    def _noticing_failures(self) -> Iterator[None]:
        """Refresh the table of nodes after a failure: a node without an answer may have been
        replaced.
        """
        try:
            yield
        except TierUnavailable:
            self._stale = self._cluster
            raise

    def _refresh_if_stale(self, deadline: Deadline) -> None:
        """Refresh the table from any server, previously known primaries first."""
        if not self._stale:
            return
        with self._lock:
            servers = list(dict.fromkeys([*self._by_slot.values(), *(self._servers[seed] for seed in self._seeds)]))
        for place, server in enumerate(servers):
            share = Deadline(deadline.left_s() / (len(servers) - place))
            try:
                with server.wire(share) as wire:
                    wire.send((command("CLUSTER", "SLOTS"),), share)
                    by_slot = self._table(wire.read_reply(share), server)
            except TierUnavailable:
                if place == len(servers) - 1:
                    raise
                continue
            self._by_slot, self._stale = by_slot, False
            self._forget_all_but({*by_slot.values()})
            return

    def _forget_all_but(self, serving: set[RedisServer]) -> None:
        with self._lock:
            gone = [name for name, server in self._servers.items() if server not in serving and name not in self._seeds]
            servers = [self._servers.pop(name) for name in gone]
        for server in servers:
            server.close()

    def _table(self, ranges: RedisReply, asked: RedisServer) -> dict[int, RedisServer]:
        """Server by slot, from the reply to CLUSTER SLOTS.

        The reply is [[first, last, [host, port, ...], replicas...], ...].
        """
        by_slot: dict[int, RedisServer] = {}
        match ranges:
            case [*rows] if rows:
                for row in rows:
                    match row:
                        case [int(first), int(last), [bytes() | None as host, int(port), *_], *_] if (
                            0 <= first <= last < SLOTS and 0 < port < 1 << 16
                        ):
                            node = self._known(host.decode("utf-8", "replace") if host else asked.address.host, port)
                            by_slot.update(dict.fromkeys(range(first, last + 1), node))
                        case _:
                            raise TierUnavailable(f"{asked.address} describes its cluster in an unknown way")
                return by_slot
            case ReplyError():
                raise TierUnavailable(f"{asked.address} is no node of a cluster: {ranges.text}; use redis:// for it")
            case _:
                raise TierUnavailable(f"{asked.address} belongs to a cluster without slots")


def _joined(requests: Sequence[RedisRequest]) -> RedisRequest:
    """One send for many small requests."""
    if len(requests) == 1:
        return requests[0]
    return (b"".join(bytes(part) for request in requests for part in request),)
