"""/v1/sessions: the caller's chats, listed and removed.

They grow by /v1/chat/completions (server/sessions.py).
"""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from kvire.server.errors import ApiError
from kvire.server.json_text import json_response
from kvire.server.service import service_of, tenant_of
from kvire.server.sessions import in_use, off_the_loop, sessions_of
from kvire.sessions.session_file import SessionError, check_name

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
