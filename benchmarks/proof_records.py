"""What passes between the proof and the trainer's process, as JSON: the job, and the record of what happened.

Standard library only: the two sides have nothing else in common.
"""

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Job:
    model: str
    url: str
    steps: int
    hook: str | None
    """None: stock; else `unscorable` of make_nan_safe."""
    mark: float
    """How this arm's server writes an unscorable token; for the fixed batch."""
    fixed_batch: list[dict[str, Any]]
    """Samples whose `old` is None at an unscorable token; empty: no comparison."""
    cut_off_s: float
    served_name: str
    max_tokens: int
    weights_file: str | None = None
    """Through which the engine receives the weights after every step; None: it never does."""
    inflight: int = 4


@dataclass
class Step:
    nonfinite: int
    """Parameters that are no finite number after the step."""
    seconds: float
    """Since the worker was ready."""
    trained: int = 0
    unscorable: int = 0
    logged: dict[str, float | None] = field(default_factory=dict)
    true: dict[str, float] = field(default_factory=dict)
    gradient_error: float = math.nan


@dataclass
class Answer:
    steps: list[Step] = field(default_factory=list)
    ended: str = "finished"
    parameters: int = 0
    wall_s: float = 0.0
    fixed_gradient_error: float | None = None
    served_error: float | None = None
    """How far the engine's logprobs are, after the last step, from the trained model's; where weights are pushed."""
    parsed: "Parsed | None" = None
    """A synchronous arm's only."""


@dataclass
class Parsed:
    """What TRL's synchronous client made of the replies."""

    generations: int = 0
    completions: int = 0
    mismatched: int = 0
    """Completions with another number of logprobs than of tokens."""
    none: int = 0
    """Logprobs read as None, which is how the client writes NaN."""
    value_error: float = math.nan
    """The largest difference of any other logprob from the initial model's own."""


def write(record: Job | Answer, path: Path) -> None:
    path.write_text(json.dumps(asdict(record)))


def read_job(path: Path) -> Job:
    return Job(**json.loads(path.read_text()))


def read_answer(path: Path) -> Answer:
    fields = json.loads(path.read_text())
    fields["steps"] = [Step(**step) for step in fields["steps"]]
    fields["parsed"] = fields["parsed"] and Parsed(**fields["parsed"])
    return Answer(**fields)
