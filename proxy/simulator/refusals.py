"""How vLLM says no: one exception, the two servers' wordings of it, and the checks every route shares. Pure."""

import json
from typing import Any

from proxy.simulator.config import FrontEnd


class Refusal(Exception):
    """An answer other than 200; the two servers word it differently."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str = "", kind: str = ""):
        super().__init__(message)
        self.message, self.status, self.param = message, status, param
        self.code, self.kind = code, kind

    def body(self, front_end: FrontEnd) -> dict[str, Any]:
        if front_end is FrontEnd.RUST:
            code = self.code or "invalid_request_error"
            kind = code if code == "server_error" else "invalid_request_error"
            return {"error": {"message": self.message, "type": kind, "param": self.param, "code": code}}
        kind = self.kind or {404: "NotFoundError", 500: "InternalServerError"}.get(self.status, "BadRequestError")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}


def invalid(message: str, param: str | None = None, value: object = None) -> Refusal:
    shown = "" if param is None else f" (parameter={param}{'' if value is None else f', value={value}'})"
    return Refusal(message + shown, param=param)


def parse(raw: bytes, front_end: FrontEnd) -> dict[str, Any]:
    """The body as an object, or the refusal of what is not one."""
    try:
        body = json.loads(raw)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        at, reason = (error.pos, error.msg) if isinstance(error, json.JSONDecodeError) else (error.start, error.reason)
        if front_end is FrontEnd.RUST:
            text = f"Failed to parse the request body as JSON: {reason} at line 1 column {at}"
            raise Refusal(text, code="json_parse_error") from error
        place = {"type": "json_invalid", "loc": f"body.{at}", "msg": "JSON decode error"}
        raise validation_error({**place, "input": {}, "ctx": {"error": reason}}) from error
    if not isinstance(body, dict):
        raise validation_error({"type": "model_attributes_type", "loc": "body", "msg": "Input should be an object"})
    return body


def validation_error(shown: dict[str, object]) -> Refusal:
    loc = str(shown["loc"])
    code = "json_parse_error"
    return Refusal(f"1 validation error:\n  {shown}", param=loc, code=code, kind="Bad Request")


def integer(body: dict[str, Any], name: str) -> int | None:
    value = body.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise validation_error({"type": "int_parsing", "loc": f"body.{name}", "msg": "Input should be a valid integer"})
