"""The sidecar's settings: the only reader of the environment. Every field is an option and a SIDECAR_ variable."""

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from proxy.unscorable import Encoding


def http_url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError("is no http:// or https:// URL such as http://localhost:8000")
    _ = parts.port  # raises ValueError for a port out of range
    return value.rstrip("/")


class Settings(BaseSettings):
    """Frozen; unknown fields are refused."""

    model_config = SettingsConfigDict(env_prefix="SIDECAR_", frozen=True, extra="forbid")

    upstream: Annotated[str, AfterValidator(http_url)] = Field(description="URL of vLLM")
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(9100, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    workers: int = Field(1, ge=1, le=64, description="processes; each keeps its own metrics, incidents and breaker")
    nan_encoding: Encoding = Field(Encoding.CEILING, description="how an unscorable token is written")
    on_unscorable: Literal["mark", "reject"] = Field("mark", description="reject answers 502 instead of marking")
    allow_positive: bool = Field(False, description="positive values are usable: for raw_logits servers")
    retries: int = Field(1, ge=0, le=10, description="repeats with a fresh cache_salt before a stream is tried")
    connect_retries: int = Field(2, ge=0, le=100, description="repeats where vLLM gave no byte of an answer")
    runaway_tokens: int = Field(64, ge=1, description="unscorable tokens in a row after which a recovery is cut")
    trip_ratio: float = Field(0.5, ge=0, le=1, description="share of bad replies that trips the breaker; 0: never")
    trip_min_responses: int = Field(32, ge=1, description="replies the breaker looks at")
    trip_window: float = Field(300.0, gt=0, description="seconds after which a reply is forgotten")
    trip_probe_interval: float = Field(10.0, gt=0, description="seconds between probes while tripped")
    connect_timeout: float = Field(10.0, gt=0, description="seconds to wait for a connection to vLLM")
    read_timeout: float = Field(0.0, ge=0, description="seconds vLLM may stay silent in a generation; 0: no limit")
    health_timeout: float = Field(60.0, gt=0, description="seconds vLLM's /health may take: a busy engine is not dead")
    max_request_bytes: int = Field(256 * 1024 * 1024, ge=1, description="larger request bodies get 413")
    max_inflight: int = Field(0, ge=0, description="generations at once before 503 overloaded; 0: no limit")
    incidents: int = Field(200, ge=1, le=100_000, description="incidents kept for /sidecar/incidents")
    drain_timeout: float = Field(120.0, ge=0, description="seconds in-flight requests get after SIGTERM")
    log_level: Literal["critical", "error", "warning", "info", "debug"] = Field(
        "info", description="uvicorn's log level"
    )
