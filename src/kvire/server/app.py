"""The application: endpoints, guards, errors."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from kvire.core.discovery import parts
from kvire.engine.client import EngineClient
from kvire.server import endpoints
from kvire.server.auth import ApiKeys, Doorkeeper
from kvire.server.errors import HANDLED, ErrorBoundary, handle
from kvire.server.metrics import RequestCounter
from kvire.server.options import ServerOptions
from kvire.server.service import Service
from kvire.sessions.folder import Sessions


def create_app(
    client: EngineClient, model_name: str, options: ServerOptions | None = None, sessions: Sessions | None = None
) -> FastAPI:
    """An app over a started engine; the engine stays the caller's to close.

    model_name: used if the options name none.
    sessions: keeps the chats of clients that ask for it; None: chats are not kept.
    """
    options = options or ServerOptions()
    service = Service(client, options.served_name or model_name, options, sessions)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.workers.close()

    # FastAPI cannot document bodies that it does not parse.
    app = FastAPI(title="Kvire", openapi_url=None, redirect_slashes=False, lifespan=lifespan)
    app.state.service = service
    for router in parts(endpoints, "router"):
        app.include_router(router)
    for error in HANDLED:
        app.add_exception_handler(error, handle)
    app.add_middleware(Doorkeeper, keys=ApiKeys(options.api_keys))  # the one added last sees a request first
    app.add_middleware(ErrorBoundary)
    app.add_middleware(RequestCounter, metrics=service.metrics)
    return app
