"""What goes wrong, as the OpenAI API says it."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse
from pydantic import ValidationError

from comingle.serving.schemas import UNSUPPORTED

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


class Refused(Exception):
    """A request that is not answered."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.after = status, code, param, after

    def body(self) -> dict[str, Any]:
        """The standard's error body."""
        kind = KINDS.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """As it is sent."""
        headers = {} if self.after is None else {"Retry-After": str(max(1, round(self.after)))}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(), status_code=self.status, headers=headers)


def wrong(error: ValidationError) -> Refused:
    """Return the refusal of a request: an unsupported key if there is one, else its first problem."""
    problems = error.errors(include_url=False, include_input=False)
    first = next((one for one in problems if one["type"] in ("extra_forbidden", UNSUPPORTED)), problems[0])
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] in ("extra_forbidden", UNSUPPORTED):
        message = first["msg"] if first["type"] == UNSUPPORTED else "not supported here"
        return Refused(400, f"{place}: {message}", code="unsupported_parameter", param=place)
    return Refused(400, f"{place}: {first['msg']}" if place else first["msg"], param=place or None)


def no_model(name: str) -> Refused:
    """No such model, or none that the key opens: which of the two is not said."""
    return Refused(404, f"no model {name!r} for this key", code="model_not_found", param="model")
