"""The application: routes, guards, errors."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.responses import Response

from kvire.engine.client import EngineClient
from kvire.server import chat, completions
from kvire.server.auth import ApiKeys, Doorkeeper
from kvire.server.errors import HANDLED, ErrorBoundary, handle
from kvire.server.json_text import json_response
from kvire.server.metrics import RequestCounter, waiting
from kvire.server.options import ServerOptions
from kvire.server.service import Service, service_of
from kvire.sessions.folder import Sessions

router = APIRouter()


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
    for each in (router, chat.router, completions.router):
        app.include_router(each)
    for error in HANDLED:
        app.add_exception_handler(error, handle)
    app.add_middleware(Doorkeeper, keys=ApiKeys(options.api_keys))  # the one added last sees a request first
    app.add_middleware(ErrorBoundary)
    app.add_middleware(RequestCounter, metrics=service.metrics)
    return app


@router.get("/health", response_model=None)
async def health(request: Request) -> Response:
    """Whether requests would be answered; open to every client."""
    service = service_of(request)
    engine, failed = service.client.engine, service.client.failure is not None
    state = {
        "status": "failed" if failed else "ok",
        "model": service.model_name,
        "queue": {
            "waiting": waiting(service.client),
            "max": engine.config.max_queue,
            "running": len(engine.scheduler.running),
        },
    }
    return json_response(state, 503 if failed else 200)


@router.get("/metrics", response_model=None)
async def metrics(request: Request) -> Response:
    """For Prometheus; needs a key where there are keys."""
    return Response(service_of(request).metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/v1/models", response_model=None)
async def models(request: Request) -> Response:
    """The one model."""
    return json_response({"object": "list", "data": [_model_card(service_of(request))]})


@router.get("/v1/models/{name:path}", response_model=None)
async def model(request: Request, name: str) -> Response:
    """The one model, if it has this name."""
    service = service_of(request)
    service.check_model(name)
    return json_response(_model_card(service))


def _model_card(service: Service) -> dict[str, object]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "kvire",
        "max_model_len": service.max_model_len,
    }
