"""/metrics: for Prometheus."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from kvire.server.service import service_of

router = APIRouter()


@router.get("/metrics", response_model=None)
async def metrics(request: Request) -> Response:
    """For Prometheus; needs a key where there are keys."""
    return Response(service_of(request).metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
