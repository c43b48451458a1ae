"""What the stand-in for vLLM is told to be: one frozen object, validated where it is made. Reads no environment."""

from dataclasses import dataclass
from enum import StrEnum


class FrontEnd(StrEnum):
    """vLLM 0.32 has two HTTP servers that write the same NaN in opposite ways."""

    PYTHON = "python"
    RUST = "rust"


@dataclass(frozen=True, slots=True)
class SimulatorConfig:
    """Rates are probabilities; those per token are drawn anew at each sampled token, from the request's own seed."""

    model: str = "sim"
    front_end: FrontEnd = FrontEnd.PYTHON
    seed: int = 0
    nan_rate: float = 0.0  # per sampled token: its logprob alone is NaN
    missing_rate: float = 0.0  # per sampled token: the step has no logprobs at all
    floor_rate: float = 0.0  # per sampled token: its logprob is -inf, written -9999.0
    nan_persistent: float = 0.0  # per choice: NaN from some position to the end
    poisoned_token_ids: tuple[int, ...] = tuple(range(300, 308))  # a sequence that holds one is NaN from there on
    poisoned_prefix: tuple[int, ...] = ()  # a cached prefix holding NaN; only a fresh cache_salt escapes it
    stale_block: int = 0  # so many next requests fall on a KV block with stale NaN rows, once each
    eos_rate: float = 0.0  # per sampled token
    latency_per_token: float = 0.0  # seconds
    keep_alive_interval: float = 0.0  # seconds between comments on a silent stream; 0: none
    max_model_len: int = 8192
    vocab_size: int = 512
    max_logprobs: int = 20
    nan_status: int = 400  # what the Python server answers when a NaN meets JSON; 500 before vLLM 0.11

    def __post_init__(self) -> None:
        for name in ("nan_rate", "missing_rate", "floor_rate", "nan_persistent", "eos_rate"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must be between 0 and 1, got {getattr(self, name)}")
        if self.nan_rate + self.missing_rate + self.floor_rate > 1.0:
            raise ValueError("nan_rate, missing_rate and floor_rate together must not exceed 1")
        if not self.latency_per_token >= 0.0:
            raise ValueError(f"latency_per_token must not be negative, got {self.latency_per_token}")
        if self.vocab_size < 512:
            raise ValueError(f"vocab_size must be at least 512, got {self.vocab_size}")
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len must be at least 2, got {self.max_model_len}")
