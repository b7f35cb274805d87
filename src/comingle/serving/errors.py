"""What goes wrong, as the OpenAI API says it."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse
from pydantic import ValidationError

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
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
    """The first thing that is wrong with a request."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] in ("extra_forbidden", "none_required"):
        return Refused(400, f"{place}: not supported here", code="unsupported_parameter", param=place)
    return Refused(400, f"{place}: {first['msg']}" if place else first["msg"], param=place or None)


def no_model(name: str) -> Refused:
    """No such model, or none that the key opens: which of the two is not said."""
    return Refused(404, f"no model {name!r} for this key", code="model_not_found", param="model")
