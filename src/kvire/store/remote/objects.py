"""Blocks in an object store: S3, Google's, Azure's, a shared folder, or memory for trials.

An object per block, with the whole frame as content; a put replaces it at once or not at all.
obstore handles the protocol, in a thread of its own with an event loop, so that each call can be
given up at its deadline whatever the store does. The store does not record uses, so a block's time
to live counts from its write; an expired one counts as missing, but is listed and takes room until
it is removed by a call or a lifecycle rule of the bucket.
"""

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, ObjectStore

from kvire.core.errors import BlockMissing, FrameDamaged, TierUnavailable
from kvire.store.disk.files import FILE_MODE, FOLDER_MODE
from kvire.store.remote.backend import BATCH, BLOCKS, HEAD_BYTES, PINS, STAMP_BYTES, StoredObject, Value, stamped
from kvire.store.remote.deadline import Deadline
from kvire.store.tier import Buffer

T = TypeVar("T")
MAX_PARALLEL = 32  # small requests under way per call


class ObjectBackend:
    """remote_backend.Backend over an obstore store."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def exists(self, names: Sequence[str], deadline: Deadline) -> list[bool]:
        """The stamp of each, many at a time."""
        return self._run(_parallel(self._exists, names), deadline)

    def get(self, name: str, buffers: Sequence[Buffer], deadline: Deadline) -> int:
        """GET. The length is known before anything is received."""
        capacity = sum(len(buffer) for buffer in buffers)
        # copied by the caller's thread: after a deadline no thread writes into `buffers`
        content = memoryview(self._run(self._get(name, capacity), deadline))
        length = taken = len(content)
        for buffer in buffers:
            part = content[length - taken :][: len(buffer)]
            buffer[: len(part)] = part
            taken -= len(part)
        return length

    def put(self, name: str, value: Value, ttl_s: float | None, deadline: Deadline) -> str | None:
        """PUT, of a copy: the request may outlive a deadline, and with it the caller's right to
        `value`.
        """
        del ttl_s  # the stamp says it
        self._run(self._put(name, b"".join(value)), deadline)
        return None

    def touch(self, names: Sequence[str], ttl_s: float | None, deadline: Deadline) -> None:
        """Nothing: an object store does not record uses."""

    def keep(self, names: Sequence[str], ttl_s: float | None, deadline: Deadline) -> None:
        """Nothing: the mark of a pin is enough."""

    def remove(self, names: Sequence[str], deadline: Deadline) -> None:
        """One request for many where the store supports that."""
        self._run(self._remove(list(names)), deadline)

    def names(self, prefix: str, timeout_s: float) -> Iterator[list[str]]:
        """The store's listing."""
        listing = obstore.list(self._store, prefix=prefix, chunk_size=BATCH)
        while batch := self._run(_next(listing), Deadline(timeout_s)):
            yield [str(meta["path"]) for meta in batch]

    def describe(self, names: Sequence[str], deadline: Deadline) -> list[StoredObject]:
        """The first bytes of each."""
        found = self._run(_parallel(self._describe, names), deadline)
        return [stored for stored in found if stored is not None]

    def close(self) -> None:
        """End the thread, and with it all requests in progress. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        del self._store  # it owns the connections

    async def _exists(self, name: str) -> bool:
        head = await self._head(name, STAMP_BYTES)
        return head is not None and await self._is_alive(name, head[1])

    async def _get(self, name: str, capacity: int) -> Any:
        try:
            result = await obstore.get_async(self._store, name)
            if result.meta["size"] > capacity:
                # obstore may hold the result until its next call; here that would be an open
                # connection
                result.stream()
                raise FrameDamaged("length")
            content = await result.bytes_async()
        except FileNotFoundError:
            raise BlockMissing(name) from None
        if not await self._is_alive(name, memoryview(content)):
            raise BlockMissing(name)
        return content

    async def _put(self, name: str, value: bytes) -> None:
        await obstore.put_async(self._store, name, value, use_multipart=False)

    async def _describe(self, name: str) -> StoredObject | None:
        head = await self._head(name, HEAD_BYTES)
        if head is None:
            return None
        return StoredObject(name, head[1], head[0], stamped(head[1])[1])

    async def _head(self, name: str, length: int) -> tuple[int, bytes] | None:
        """Size and first bytes of an object; None if there is none."""
        try:
            try:
                result = await obstore.get_async(self._store, name, options={"range": (0, length)})
                return result.meta["size"], bytes(await result.bytes_async())
            except BaseError:
                if (await obstore.head_async(self._store, name))["size"]:
                    raise
                return 0, b""  # of nothing no range can be had
        except FileNotFoundError:
            return None

    async def _is_alive(self, name: str, value: bytes | Buffer) -> bool:
        _, expires = stamped(value)
        if expires is None or time.time() < expires:
            return True
        return await self._head(PINS + name.removeprefix(BLOCKS), STAMP_BYTES) is not None

    async def _remove(self, names: list[str]) -> None:
        try:
            await obstore.delete_async(self._store, names)
        except FileNotFoundError:  # a folder stops at the first that is not there
            await _parallel(self._remove_one, names)

    async def _remove_one(self, name: str) -> None:
        try:
            await obstore.delete_async(self._store, name)
        except FileNotFoundError:
            return

    def _run(self, work: Coroutine[Any, Any, T], deadline: Deadline) -> T:
        """The outcome of `work`, which is given up at the deadline.

        Every error becomes TierUnavailable.
        """
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._running_loop())
        except RuntimeError as error:  # closed at this very moment
            raise TierUnavailable("the object store is closed") from error
        try:
            return future.result(deadline.left_s())
        except (BlockMissing, FrameDamaged, TierUnavailable):
            raise
        except TimeoutError:
            raise TierUnavailable(f"no answer within {deadline.timeout_s:g} s") from None
        except Exception as error:
            raise TierUnavailable(_first_line(error)) from error
        finally:
            future.cancel()
            del future  # an error holds this frame, and would hold itself, with the connection that it came from

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._closed:
                raise TierUnavailable("the object store is closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_serve, args=(self._loop,), name="object store", daemon=True)
                self._thread.start()
            return self._loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    for task in (tasks := asyncio.all_tasks(loop)):
        task.cancel()
    loop.run_until_complete(asyncio.wait(tasks) if tasks else asyncio.sleep(0))
    loop.close()


class FolderBackend(ObjectBackend):
    """Objects as files of a folder on a shared disk: readable and writable by their owner only.

    The store itself applies the umask; so the folder above all files is closed to others before
    anything is written there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._top = folder / BLOCKS.partition("/")[0]
        self._make_folders()
        if self._top.stat().st_uid == os.geteuid():  # else its owner says who may share it
            self._top.chmod(FOLDER_MODE)
        super().__init__(LocalStore(folder, mkdir=True))

    async def _put(self, name: str, value: bytes) -> None:
        self._make_folders()  # they may have been removed
        await super()._put(name, value)
        path = self._folder / name
        path.chmod(FILE_MODE)
        path.parent.chmod(FOLDER_MODE)

    def _make_folders(self) -> None:
        self._folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        self._top.mkdir(mode=FOLDER_MODE, exist_ok=True)


async def _parallel(work: Callable[[str], Awaitable[T]], names: Sequence[str]) -> list[T]:
    room = asyncio.Semaphore(MAX_PARALLEL)

    async def one(name: str) -> T:
        async with room:
            return await work(name)

    return await asyncio.gather(*map(one, names))


async def _next(listing: Any) -> Any:
    return await anext(listing, None)


def _first_line(error: Exception) -> str:
    """The first line of obstore's message; the rest holds whole responses and requests."""
    return (str(error).partition("\n")[0] or type(error).__name__)[:300]
