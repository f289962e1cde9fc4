"""/v1/models: the one that is served."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from kvire.server.json_text import json_response
from kvire.server.service import Service, service_of

router = APIRouter()


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
