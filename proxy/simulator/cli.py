"""The command `simulate`: every field an option and a SIMULATOR_ variable, as with the sidecar's own settings."""

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from proxy.simulator.app import serve
from proxy.simulator.config import FrontEnd, SimulatorConfig

HELP = "Run a stand-in for vLLM that needs no model and no GPU, and fails as vLLM does."


class SimulatorSettings(BaseSettings):
    """Frozen; unknown fields are refused."""

    model_config = SettingsConfigDict(env_prefix="SIMULATOR_", frozen=True, extra="forbid")

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    model: str = Field("sim", description="served model name")
    front_end: FrontEnd = Field(FrontEnd.PYTHON, description="vLLM's server: python fails on NaN, rust writes -9999.0")
    nan_rate: float = Field(0.01, ge=0, le=1, description="share of sampled tokens whose logprob is NaN")
    missing_rate: float = Field(0.0, ge=0, le=1, description="share of sampled tokens without logprobs")
    floor_rate: float = Field(0.0, ge=0, le=1, description="share of sampled tokens at -9999.0")
    nan_persistent: float = Field(0.0, ge=0, le=1, description="share of sequences that turn to NaN for good")
    stale_block: int = Field(0, ge=0, description="first requests that meet NaN left by others; a repeat does not")
    eos_rate: float = Field(0.0, ge=0, le=1, description="chance of each token to end its sequence")
    latency_per_token: float = Field(0.0, ge=0, le=3600, description="seconds each token takes")
    keep_alive_interval: float = Field(0.0, ge=0, description="seconds between comments on a silent stream; 0: none")
    seed: int = Field(0, description="another seed is another model")
    max_model_len: int = Field(8192, ge=2, description="prompt and output tokens together")
    nan_status: int = Field(400, ge=400, le=599, description="status of a reply that NaN broke; older vLLM: 500")

    @field_validator("missing_rate", "floor_rate")
    @classmethod
    def _faults_exclude_each_other(cls, rate: float, info: ValidationInfo) -> float:
        before = info.data.get("nan_rate", 0.0) + info.data.get("missing_rate", 0.0)
        if before + rate > 1:
            raise ValueError("a token has one fault at most, but the rates together exceed 1")
        return rate

    def config(self) -> SimulatorConfig:
        return SimulatorConfig(**self.model_dump(exclude={"host", "port"}))


def simulate(settings: SimulatorSettings) -> int:
    """Serves until it is told to stop; returns the exit code."""
    return serve(settings.config(), settings.host, settings.port)
