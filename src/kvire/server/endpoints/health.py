"""/health: for load balancers."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from kvire.server.json_text import json_response
from kvire.server.metrics import waiting
from kvire.server.service import service_of

router = APIRouter()


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
