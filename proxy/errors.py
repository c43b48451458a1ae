"""Errors the sidecar itself answers with, and what can go wrong upstream. Core.

SidecarError                 an OpenAI-shaped answer: status, type, message
UpstreamFailure
  Unreachable                no connection
  ClosedEarly                connection closed before the first byte of the reply
  Cut                        connection closed inside the reply
  TimedOut                   no progress within the read timeout
  BadReply                   not HTTP, or not the JSON a generation route must answer
"""

from enum import StrEnum

from proxy import jsonbody


class ErrorType(StrEnum):
    """The closed set of ``error.type``."""

    INVALID_REQUEST = "invalid_request_error"
    UNREACHABLE = "upstream_unreachable"
    TIMEOUT = "upstream_timeout"
    PROTOCOL = "upstream_protocol_error"
    UNSCORABLE = "unscorable_logprobs"
    UNHEALTHY = "engine_unhealthy"
    OVERLOADED = "overloaded"
    TOO_LARGE = "request_too_large"
    UNAUTHORIZED = "unauthorized"


class SidecarError(Exception):
    """An answer made by the sidecar: ``status`` and an OpenAI-shaped body."""

    def __init__(self, status: int, type: ErrorType, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.message = message
        self.retry_after = retry_after

    def body(self) -> bytes:
        return jsonbody.dumps(
            {"error": {"message": self.message, "type": self.type.value, "param": None, "code": self.status}}
        )


class UpstreamFailure(Exception):
    """An attempt that brought no complete reply."""


class Unreachable(UpstreamFailure):
    """No connection to the upstream."""


class ClosedEarly(UpstreamFailure):
    """The upstream closed the connection before the first byte of the reply."""


class Cut(UpstreamFailure):
    """The upstream closed the connection inside the reply."""


class TimedOut(UpstreamFailure):
    """The upstream made no progress within the read timeout."""


class BadReply(UpstreamFailure):
    """The upstream's reply breaks HTTP, or is not the JSON or event stream the route promises."""
