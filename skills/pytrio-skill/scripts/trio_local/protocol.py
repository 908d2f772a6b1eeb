"""The wire format: the installed SDK's own protocol models, and errors in the shape it reads.

Every other module takes the protocol from here, so an SDK upgrade that changes the schema fails
in this one place.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgpack

TESTED_SDK_VERSIONS = ("0.2.8", "0.2.9")


def installed_sdk_version() -> str | None:
    """Version of the installed `pytrio` distribution, None when there is none."""
    try:
        return version("pytrio")
    except PackageNotFoundError:
        return None


def unsupported_sdk_reason(installed: str | None) -> str | None:
    """One line that says why the installed SDK cannot be used, None when it can."""
    tested = " and ".join(TESTED_SDK_VERSIONS)
    if installed is None:
        return f"pytrio is not installed; run: pip install pytrio=={TESTED_SDK_VERSIONS[-1]}"
    if installed not in TESTED_SDK_VERSIONS:
        return (
            f"pytrio {installed} is not supported: the dry run speaks the protocol of {tested}; "
            f"run: pip install pytrio=={TESTED_SDK_VERSIONS[-1]}"
        )
    return None


# The SDK repeats a request answered 500 for a quarter of an hour; our own defects should be seen
# at once, so they get a status that it does not repeat.
DEFECT_STATUS = 501


MAX_MESSAGE_LENGTH = 600
# No request of the SDK needs ten levels; recorders and serialisers end at some hundreds.
MAX_NESTING = 64


class ApiError(Exception):
    """A refusal with an HTTP status, a stable code and one sentence for the user."""

    def __init__(self, status: int, code: str, message: str) -> None:
        # Messages quote what was sent, which may be long.
        if len(message) > MAX_MESSAGE_LENGTH:
            message = message[: MAX_MESSAGE_LENGTH - 3] + "..."
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message

    def control_body(self) -> dict[str, Any]:
        """Body the SDK's control client reads: code and message at the top."""
        return {"code": self.code, "message": self.message}

    def actor_body(self) -> dict[str, Any]:
        """Body the SDK's actor client reads: code and message under `error`."""
        return {"error": {"code": self.code, "message": self.message}}


def pack(value: dict[str, Any]) -> bytes:
    """Encode one MessagePack map."""
    return msgpack.packb(value, use_bin_type=True)


def unpack(raw: bytes) -> dict[str, Any]:
    """Decode one MessagePack map. Raises ApiError 400 on anything else."""
    try:
        value = msgpack.unpackb(raw, raw=False)
    except Exception as error:  # msgpack raises a dozen unrelated types on bad bytes
        raise ApiError(400, "invalid_request", f"body is not MessagePack: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "invalid_request", f"body must be a map, got {type(value).__name__}")
    return value


def check_nesting(value: Any) -> None:
    """Raises ApiError 400 for data nested so deep that writing it again would fail."""
    level: list[Any] = [value]
    for _ in range(MAX_NESTING):
        level = [
            child
            for container in level
            for child in (container.values() if isinstance(container, dict) else container)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return
    raise ApiError(400, "invalid_request", f"data nested deeper than {MAX_NESTING} levels")


def validation_message(error: Exception) -> str:
    """Pydantic's findings in one line: `field: reason; ...`, at most five of them."""
    if not hasattr(error, "errors"):
        return str(error)
    findings = error.errors(include_url=False, include_context=False, include_input=False)
    lines = [f"{'.'.join(map(str, f['loc'])) or 'body'}: {f['msg']}" for f in findings[:5]]
    if len(findings) > 5:
        lines.append(f"and {len(findings) - 5} more")
    return "; ".join(lines)
