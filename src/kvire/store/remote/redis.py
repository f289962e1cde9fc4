"""Blocks in Redis or Valkey, one server or a cluster: a key per block; its value is the frame.

A read goes from the socket straight into the caller's buffers, at two thirds of the speed of a bare
socket (docs/adr/0014-remote-tiers.md). The server's `maxmemory-policy` controls eviction.
"""

import time
from collections.abc import Iterator, Sequence

from kvire.core.errors import BlockMissing, FrameDamaged, TierUnavailable
from kvire.store.remote.backend import BATCH, HEAD_BYTES, StoredObject, Value
from kvire.store.remote.deadline import Deadline
from kvire.store.remote.redis_nodes import Nodes, RedisServer
from kvire.store.remote.redis_wire import RedisReply, RedisRequest, ReplyError, command, command_with_value
from kvire.store.tier import Buffer

SCAN_COUNT = 1000  # buckets that one SCAN looks at


class RedisBackend:
    """remote_backend.Backend over `nodes`."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes

    def exists(self, names: Sequence[str], deadline: Deadline) -> list[bool]:
        """EXISTS of each, in one round trip per node."""
        return [_whole(reply) > 0 for reply in self._each("EXISTS", names, (), deadline)]

    def get(self, name: str, buffers: Sequence[Buffer], deadline: Deadline) -> int:
        """GET."""
        reply = self._nodes.fetch(name, buffers, deadline)
        if reply is None:
            raise BlockMissing(name)
        if isinstance(reply, ReplyError):
            if reply.code == "WRONGTYPE":
                raise FrameDamaged("type")
            raise TierUnavailable(reply.text)
        return reply

    def put(self, name: str, value: Value, ttl_s: float | None, deadline: Deadline) -> str | None:
        """SET. A pinned block without expiry keeps having none."""
        if ttl_s is None:
            return _refusal(self._one(name, command_with_value(("SET", name), value), deadline))
        life = ("PX", _milliseconds(ttl_s))
        reply = self._one(name, command_with_value(("SET", name), value, ("NX", *life)), deadline)
        if reply is None:  # it is there
            reply = self._one(name, command_with_value(("SET", name), value, ("KEEPTTL", "XX")), deadline)
            self.touch([name], ttl_s, deadline)
        return "refused" if reply is None else _refusal(reply)

    def touch(self, names: Sequence[str], ttl_s: float | None, deadline: Deadline) -> None:
        """TOUCH; a pinned block, without expiry, counts as living longest, so GT leaves it
        unchanged.
        """
        self._each("TOUCH", names, (), deadline)
        if ttl_s is not None:
            self._each("PEXPIRE", names, (_milliseconds(ttl_s), "GT"), deadline)

    def keep(self, names: Sequence[str], ttl_s: float | None, deadline: Deadline) -> None:
        """PERSIST or PEXPIRE."""
        if ttl_s is None:
            self._each("PERSIST", names, (), deadline)
        else:
            self._each("PEXPIRE", names, (_milliseconds(ttl_s),), deadline)

    def remove(self, names: Sequence[str], deadline: Deadline) -> None:
        """UNLINK."""
        for reply in self._each("UNLINK", names, (), deadline):
            _whole(reply)

    def names(self, prefix: str, timeout_s: float) -> Iterator[list[str]]:
        """SCAN of every node that owns slots, without the duplicates that SCAN may return."""
        for server in self._nodes.primaries(Deadline(timeout_s)):
            cursor, found, told = "0", list[str](), set[str]()
            while True:
                cursor, more = self._scan(server, cursor, prefix, Deadline(timeout_s))
                found += [name for name in dict.fromkeys(more) if name not in told]
                told.update(more)
                while len(found) >= BATCH or (found and cursor == "0"):
                    yield found[:BATCH]
                    found = found[BATCH:]
                if cursor == "0":
                    break

    def describe(self, names: Sequence[str], deadline: Deadline) -> list[StoredObject]:
        """STRLEN, PTTL and GETRANGE; a server older than Redis 7.2 counts that as a use."""
        sizes = self._each("STRLEN", names, (), deadline)
        lives_ms = self._each("PTTL", names, (), deadline)
        heads = self._each("GETRANGE", names, (0, HEAD_BYTES - 1), deadline)
        told = zip(names, sizes, lives_ms, heads, strict=True)
        return [stored for row in told if (stored := _stored(*row)) is not None]

    def close(self) -> None:
        """Close all connections."""
        self._nodes.close()

    def _each(self, verb: str, names: Sequence[str], tail: Sequence[str | int], deadline: Deadline) -> list[RedisReply]:
        """The replies to `verb name tail` for each name."""
        return self._nodes.call([(name, (command(verb, name, *tail),)) for name in names], deadline)

    def _one(self, name: str, request: RedisRequest, deadline: Deadline) -> RedisReply:
        return self._nodes.call([(name, request)], deadline)[0]

    @staticmethod
    def _scan(server: RedisServer, cursor: str, prefix: str, deadline: Deadline) -> tuple[str, list[str]]:
        with server.wire(deadline) as wire:
            wire.send((command("SCAN", cursor, "MATCH", prefix + "*", "COUNT", SCAN_COUNT),), deadline)
            reply = wire.read_reply(deadline)
        match reply:
            case [bytes(following), [*names]]:
                return following.decode(), [
                    name.decode("ascii", "replace") for name in names if isinstance(name, bytes)
                ]
            case _:
                raise TierUnavailable(_said(reply))


def _stored(name: str, size: RedisReply, life_ms: RedisReply, head: RedisReply) -> StoredObject | None:
    if (life := _whole(life_ms)) == -2:
        return None  # removed since it was listed
    expires = time.time() + life / 1000 if life >= 0 else None
    if not isinstance(head, bytes) or not isinstance(size, int):
        return StoredObject(name, b"", 0, expires)  # no string: another program's, under a block's name
    return StoredObject(name, head, size, expires)


def _whole(reply: RedisReply) -> int:
    if not isinstance(reply, int):
        raise TierUnavailable(_said(reply))
    return reply


def _refusal(reply: RedisReply) -> str | None:
    if not isinstance(reply, ReplyError):
        return None
    return "full" if reply.code == "OOM" else "refused"


def _said(reply: RedisReply) -> str:
    return reply.text if isinstance(reply, ReplyError) else "an answer that does not belong to the question"


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
