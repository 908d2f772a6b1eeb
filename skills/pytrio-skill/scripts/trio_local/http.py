"""Reading requests and writing refusals the same way on both planes."""

import json
import math
import re
from typing import Any

from starlette.requests import Request

from trio_local.protocol import MAX_NESTING, ApiError, check_nesting

SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


async def raw_body(request: Request) -> bytes:
    """The body's bytes. Raises ApiError 413 before a body over the limit is held in memory."""
    limit = request.app.state.backend.limits.max_body_bytes
    announced = request.headers.get("content-length", "")
    size = int(announced) if announced.isdecimal() else 0
    too_large = ApiError(413, "body_too_large", f"a body may have {limit} bytes")
    if size > limit:
        raise too_large
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise too_large
        parts.append(part)
    return b"".join(parts)


def require_content_type(request: Request, expected: str) -> None:
    """Raises ApiError 415 when the body is declared as something else."""
    declared = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if declared != expected:
        raise ApiError(
            415, "unsupported_media_type", f"content-type must be {expected}, got {declared!r}"
        )


async def json_body(request: Request) -> dict[str, Any]:
    """The body as a JSON object; an empty body is an empty object. Raises ApiError 4xx."""
    raw = await raw_body(request)
    if not raw:
        return {}
    require_content_type(request, "application/json")
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
        if SURROGATE_ESCAPE.search(raw):
            # Half of a pair is a str that can be kept but never written again.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise ApiError(400, "invalid_request", f"body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(
            400, "invalid_request", f"body must be an object, got {type(value).__name__}"
        )
    if raw.count(b"[") + raw.count(b"{") > MAX_NESTING:
        check_nesting(value)
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def strict_page(request: Request, default_limit: int) -> tuple[int, int]:
    """`offset` and `limit` of a list request. Raises ApiError 422."""
    try:
        offset = int(request.query_params.get("offset", 0))
        limit = int(request.query_params.get("limit", default_limit))
    except ValueError:
        raise ApiError(422, "invalid_request", "offset and limit must be whole numbers") from None
    if not (0 <= offset < math.inf and 1 <= limit <= 1000):
        raise ApiError(422, "invalid_request", "offset must be 0 or more, limit 1 to 1000")
    return offset, limit
