"""The web application: both planes behind one middleware for faults and refusals."""

import asyncio
import traceback

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from trio_local import actor, control
from trio_local.protocol import DEFECT_STATUS, ApiError, pack
from trio_local.state import State

ACTOR_PREFIX = "/v1/"


class FaultMiddleware:
    """Delays every request and cuts some actor connections when such faults are on."""

    def __init__(self, app: ASGIApp, state: State) -> None:
        self.app = app
        self.state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            latency = self.state.faults.value("latency")
            if latency:
                await asyncio.sleep(latency)
            is_actor = scope["path"].startswith(ACTOR_PREFIX)
            if is_actor and self.state.faults.strikes("drop_connection"):
                await cut_connection(receive)
                return
        await self.app(scope, receive, send)


async def cut_connection(receive: Receive) -> None:
    """Close the client's connection before any answer.

    ASGI cannot say this, and returning without an answer makes uvicorn send a 500; but its
    `receive` is a method of the object that holds the connection.
    """
    receive.__self__.transport.close()  # type: ignore[attr-defined]
    while (await receive())["type"] != "http.disconnect":
        pass


def refusal(request: Request, error: ApiError) -> Response:
    """An error in the shape and encoding the asking client reads."""
    state: State = request.app.state.backend
    path = request.url.path
    state.recorder.write(
        "refused",
        method=request.method,
        path=path,
        status=error.status,
        code=error.code,
        message=error.message,
    )
    if not path.startswith(ACTOR_PREFIX):
        return JSONResponse(error.control_body(), error.status)
    accepts = request.headers.get("accept", "")
    if "application/msgpack" in accepts and not path.endswith("/sample"):
        return Response(pack(error.actor_body()), error.status, media_type="application/msgpack")
    return JSONResponse(error.actor_body(), error.status)


async def on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return refusal(request, error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, in our own shape."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    message = f"{request.method} {request.url.path}: {error.detail}"
    return refusal(request, ApiError(error.status_code, code, message))


async def on_defect(request: Request, error: Exception) -> Response:
    """A defect of ours: logged whole, answered in one sentence."""
    traceback.print_exception(error)
    return refusal(
        request, ApiError(DEFECT_STATUS, "internal_error", f"{type(error).__name__}: {error}")
    )


def build_app(state: State) -> Starlette:
    """The application that serves `state`."""
    app = Starlette(
        routes=[*control.ROUTES, *actor.ROUTES],
        exception_handlers={
            ApiError: on_api_error,
            HTTPException: on_http_exception,
            Exception: on_defect,
        },
    )
    # A path with a slash too many is an unknown path, not a redirect.
    app.router.redirect_slashes = False
    app.state.backend = state
    app.add_middleware(FaultMiddleware, state=state)
    return app
