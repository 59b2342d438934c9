"""Answers other than 200, in OpenAI's form. Pure."""

from __future__ import annotations

from typing import Any

_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Refusal(Exception):
    """An answer other than 200, in OpenAI's form."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def wrong(param: str, expected: str, came: Any) -> Refusal:
    """400: ``param`` is not what it has to be."""
    return Refusal(400, f"{param}: expected {expected}, got {shown(came)}", code="invalid_value", param=param)


def shown(value: Any) -> str:
    """A short form for messages."""
    text = repr(value)
    return text if len(text) <= 120 else text[:120] + "…"
