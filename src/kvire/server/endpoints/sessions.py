"""Chats that the server keeps, and /v1/sessions: the caller's chats, listed and removed.

In /v1/chat/completions a request sends only new messages, and the server adds the history (`Turn`).
A session belongs to the key's holder (the tenant); no other tenant can see, continue or remove it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, ParamSpec, Self, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvire.core.errors import StoreError
from kvire.models.chat import ChatPrompt
from kvire.server.errors import ApiError
from kvire.server.json_text import json_response
from kvire.server.service import Service, service_of, tenant_of
from kvire.sessions.folder import SessionConflictError, Sessions
from kvire.sessions.session_file import Session, SessionError, check_name

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger("kvire.server")
router = APIRouter()


@router.get("/v1/sessions", response_model=None)
async def list_sessions(request: Request) -> Response:
    """Names of the caller's sessions."""
    names = await off_the_loop(sessions_of(service_of(request)).names, tenant_of(request))
    return json_response({"object": "list", "data": [{"id": name, "object": "session"} for name in names]})


@router.delete("/v1/sessions/{name}", response_model=None)
async def delete_session(request: Request, name: str) -> Response:
    """Remove one of the caller's sessions.

    Its blocks are evicted when their room is needed.
    """
    service, tenant = service_of(request), tenant_of(request)
    sessions = sessions_of(service)
    try:
        check_name(name)
    except SessionError as error:
        raise ApiError(400, str(error), param="name") from None
    if (tenant, name) in service.sessions_in_use:
        raise in_use()
    if not await off_the_loop(sessions.delete, tenant, name):
        raise ApiError(404, "there is no session of this name", param="name", code="session_not_found")
    return json_response({"id": name, "object": "session", "deleted": True})


class SessionResponse(Response):
    """Answers while it holds the session, so that requests continue it one at a time.

    answer: makes the response.
    """

    def __init__(self, service: Service, tenant: str, name: str, answer: Callable[[], Awaitable[Response]]) -> None:
        super().__init__()
        self._in_use = service.sessions_in_use
        self._held = (tenant, name)
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError 409 before anything is sent if another request holds the session."""
        if self._held in self._in_use:
            raise in_use()
        self._in_use.add(self._held)
        try:
            response = await self._answer()
            await response(scope, receive, send)
        finally:
            self._in_use.discard(self._held)


class Turn:
    """One request's addition to a session.

    messages: the history and the new ones, without the answer.
    """

    def __init__(self, service: Service, sessions: Sessions, tenant: str, session: Session, new: Sequence[Any]) -> None:
        self.messages: list[dict[str, Any]] = [*session.messages, *new]
        self._service = service
        self._sessions = sessions
        self._tenant = tenant
        self._session = session
        self._prompt = ChatPrompt((), 0)

    @classmethod
    async def begin(cls, service: Service, tenant: str, name: str, new: Sequence[Any]) -> Self:
        """The next turn of a session, which may be its first. Raises ApiError."""
        sessions = sessions_of(service)
        session = await off_the_loop(sessions.load, tenant, name)
        return cls(service, sessions, tenant, session or Session(name), new)

    async def encode(self, tools: list[dict[str, Any]], options: dict[str, bool]) -> tuple[int, ...]:
        """Token ids of the prompt, beginning with the session's own where the text is still the
        same.

        Raises ApiError, RequestError or QueueFullError.
        """
        known = self._session.known_ids(self._model)
        self._prompt = await self._service.continue_chat(self.messages, known, tools, options)
        return self._prompt.token_ids

    async def keep(self, answer: dict[str, Any], token_ids: Sequence[int]) -> None:
        """The answer is complete: it joins the session, durably.

        Raises ApiError, 409 if others continued it.
        """
        changed = replace(
            self._session,
            messages=(*self.messages, answer),
            token_ids=(*self._prompt.token_ids, *token_ids),
            model=self._model,
        )
        self._session = await off_the_loop(self._sessions.save, self._tenant, changed)

    def report(self) -> dict[str, Any]:
        """For the kvire object."""
        return {
            "name": self._session.name,
            "messages": len(self._session.messages),
            "tokens_lost": self._prompt.tokens_lost,
        }

    @property
    def _model(self) -> str:
        return self._service.client.engine.namespace.weights


def sessions_of(service: Service) -> Sessions:
    """Where the server keeps chats. Raises ApiError 400 if it keeps none."""
    if service.sessions is None:
        message = "this server keeps no sessions: it was started without a store on its own disk (--store)"
        raise ApiError(400, message, param="session", code="no_store")
    return service.sessions


def in_use() -> ApiError:
    """The answer to a request for a session that another one holds."""
    message = "another request is continuing this session; wait for its end"
    return ApiError(409, message, param="session", code="session_in_use")


async def off_the_loop(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of a Sessions call, off the event loop; errors in the client's form."""
    try:
        return await asyncio.to_thread(call, *args, **kwargs)
    except SessionConflictError as error:
        raise ApiError(409, str(error), param="session", code="session_conflict") from error
    except SessionError as error:
        raise ApiError(422, str(error), param="session", code="session_unusable") from error
    except StoreError as error:
        log.exception("the keys of a tenant cannot be used")
        message = "sessions cannot be used: the server's log says why"
        raise ApiError(500, message, kind="server_error", param="session", code="session_unusable") from error
