"""All errors in the OpenAI API's form: {"error": {message, type, param, code}}."""

import logging
import traceback
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvire.core.errors import EngineClosedError, GenerationError, KvireError, QueueFullError
from kvire.server.json_text import json_response

log = logging.getLogger("kvire.server")

RETRY_AFTER_S = 1
MAX_MESSAGE_CHARS = 400  # some messages repeat a number, and a number may have thousands of digits


class ApiError(KvireError):
    """An answer other than 200.

    param: the field at fault.
    code: an identifier for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message if len(message) <= MAX_MESSAGE_CHARS else message[:MAX_MESSAGE_CHARS] + "...")
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers or {}

    def as_dict(self) -> dict[str, Any]:
        """The body."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The whole answer."""
        return json_response(self.as_dict(), self.status, self.headers)


class ClientGoneError(Exception):
    """The client closed its connection before the answer."""


def api_error(error: Exception) -> ApiError:  # noqa: PLR0911 - a table
    """An error as the client may see it."""
    match error:
        case ApiError():
            return error
        case QueueFullError():
            headers = {"Retry-After": str(RETRY_AFTER_S)}
            return ApiError(429, str(error), kind="rate_limit_error", code="queue_full", headers=headers)
        case GenerationError():
            return ApiError(500, f"the answer broke off: {error}", kind="server_error", code="generation_failed")
        case EngineClosedError():
            message = "the engine has stopped and answers nothing more; the server must be restarted"
            return ApiError(503, message, kind="server_error", code="engine_stopped")
        case TimeoutError():
            message = "the request took longer than this server allows (request_timeout_s); it was cancelled"
            return ApiError(504, message, kind="timeout_error", code="timeout")
        case HTTPException():
            return _http_error(error)
        case KvireError():
            return ApiError(400, str(error))
        case RequestValidationError():
            return ApiError(400, "the request's address or headers are not valid")
    return ApiError(500, "an error inside the server; its log says where", kind="server_error", code="internal_error")


def _http_error(error: HTTPException) -> ApiError:
    messages = {404: "there is nothing at this path", 405: "this path does not take this method"}
    codes = {404: "not_found", 405: "method_not_allowed"}
    status = error.status_code
    headers = dict(error.headers or {})
    return ApiError(status, messages.get(status, error.detail), code=codes.get(status), headers=headers)


async def handle(_: Request, error: Exception) -> Response:
    """Exception handler of the app."""
    return api_error(error).response()


HANDLED = (HTTPException, KvireError, TimeoutError, RequestValidationError)


def log_failure(error: BaseException) -> None:
    """Type and place of an error. Not its message, which can hold text of a request."""
    log.error("%s inside the server\n%s", type(error).__name__, "".join(traceback.format_tb(error.__traceback__)))


class ErrorBoundary:
    """Unexpected errors: logged without text of the request, answered in the usual shape."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app; all its exceptions end here."""
        started = False

        async def noting_send(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, noting_send)
        except ClientGoneError:
            if not started:
                await Response(status_code=499)(scope, receive, send)
        except Exception as error:
            if scope["type"] != "http":
                raise
            log_failure(error)
            if not started:
                await api_error(error).response()(scope, receive, send)
