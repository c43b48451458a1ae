"""Real replies of vLLM 0.32's two servers, read from tests/fixtures; `expect` says what is wrong in each."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "fixtures"
PYTHON_SERVER = "vllm-0.32"
RUST_SERVER = "vllm-0.32-rust"


@dataclass(frozen=True, slots=True)
class Fixture:
    """One request and vLLM's own reply; `body` is the exact reply body, chunked framing removed."""

    name: str
    server: str
    request: dict[str, Any]  # method, path, headers, body (an object, a string that is not JSON, or None)
    status: int
    headers: list[tuple[str, str]]
    body: bytes
    expect: dict[str, Any]

    @property
    def request_body(self) -> bytes:
        """The body to send: objects as compact JSON, strings as they are, nothing for None."""
        body = self.request["body"]
        if body is None:
            return b""
        return (body if isinstance(body, str) else json.dumps(body, separators=(",", ":"))).encode()

    @property
    def streamed(self) -> bool:
        """The reply is a server-sent event stream."""
        return any(k.lower() == "content-type" and v.startswith("text/event-stream") for k, v in self.headers)


def load_fixtures(server: str | None = None, path: str | None = None) -> list[Fixture]:
    """All fixtures in name order, or only those of one server folder and/or one request path."""
    found = []
    for file in sorted(FOLDER.glob("*/*.json")):
        if server not in (None, file.parent.name):
            continue
        case = json.loads(file.read_text(encoding="utf-8"))
        if path not in (None, case["request"]["path"]):
            continue
        response = case["response"]
        found.append(
            Fixture(
                name=case["case"],
                server=file.parent.name,
                request=case["request"],
                status=int(response["status_line"].split()[1]),
                headers=[(k, v) for k, v in response["headers"]],
                body=response["body"].encode(),
                expect=case["expect"],
            )
        )
    return found


def ids(fixtures: Iterable[Fixture]) -> list[str]:
    """Test ids for `pytest.mark.parametrize(..., ids=ids(fixtures))`."""
    return [fixture.name for fixture in fixtures]
