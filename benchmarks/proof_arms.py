"""The arms of the proof: which model is served, what stands between, which loss. Data, and what a run of one holds.

Standard library only; starts nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import proof_notes
from proof_records import Answer, Step

MISSING_RATE = 0.03
CEILING = 9999.0


class Engine(Enum):
    CLEAN = "clean"
    POISONED = "poisoned"
    RUST = "poisoned, Rust front end"
    SYNCED = "poisoned, weights pushed at every step"
    MISSING = "simulator, missing steps"


@dataclass(frozen=True, slots=True)
class Arm:
    """`sidecar`: its settings, None where the worker talks to the engine itself. `hook`: None is TRL's stock loss."""

    name: str
    engine: Engine
    sidecar: Mapping[str, object] | None = None
    hook: str | None = None
    mark: float = math.nan
    """How this arm's server writes an unscorable token."""
    trainer: str = "proof_trainer.py"
    cut_off_s: float = 300.0
    steps: int | None = None
    """Instead of the number asked for, where the arm is to last until it is cut off."""

    @property
    def between(self) -> str:
        if self.sidecar is None:
            return "nothing"
        encoding = f", `{self.sidecar['nan_encoding']}`" if "nan_encoding" in self.sidecar else ""
        breaker = "" if "trip_ratio" in self.sidecar else ", breaker on"
        return f"sidecar{encoding}{breaker}"

    @property
    def loss(self) -> str:
        return f"hook, `{self.hook}`" if self.hook else "stock"

    @property
    def is_sync(self) -> bool:
        return self.trainer == "proof_sync.py"

    @property
    def takes_fixed_batch(self) -> bool:
        """Not where nothing could have written its unscorable tokens."""
        return not self.is_sync and (self.sidecar is not None or self.engine is not Engine.CLEAN)


# The tiny poisoned model poisons itself and its neighbours often: the breaker would stop these runs, as it should.
_DEFAULT = {"trip_ratio": 0}
_LITERAL = {"trip_ratio": 0, "nan_encoding": "literal"}
_SYNC = "proof_sync.py"

ARMS = {
    arm.name: arm
    for arm in (
        Arm("1", Engine.CLEAN),
        Arm("2", Engine.CLEAN, _DEFAULT, mark=CEILING),
        Arm("3", Engine.POISONED, cut_off_s=60.0),
        Arm("4", Engine.POISONED, _DEFAULT, mark=CEILING),
        Arm("5", Engine.POISONED, _DEFAULT, "on_policy", CEILING),
        Arm("6", Engine.POISONED, _DEFAULT, "drop", CEILING),
        Arm("7", Engine.POISONED, _LITERAL),
        Arm("8", Engine.RUST, mark=-9999.0),
        Arm("9a", Engine.RUST, _DEFAULT, mark=CEILING),
        Arm("9b", Engine.RUST, _DEFAULT, "on_policy", CEILING),
        Arm("10a", Engine.MISSING),
        Arm("10b", Engine.MISSING, _DEFAULT, "on_policy", CEILING),
        Arm("11", Engine.POISONED, {"trip_min_responses": 8}, mark=CEILING, cut_off_s=20.0, steps=1000),
        Arm("12", Engine.SYNCED, _DEFAULT, "on_policy", CEILING),
        Arm("s1", Engine.POISONED, trainer=_SYNC),
        Arm("s2", Engine.POISONED, _LITERAL, trainer=_SYNC),
        Arm("s3", Engine.POISONED, _LITERAL, "on_policy", trainer=_SYNC),
    )
}


@dataclass(frozen=True)
class Run:
    """One run of one arm: the trainer's own record, what its worker met, and what the sidecar counted."""

    arm: Arm
    wanted: int
    trainer: Answer
    traffic: proof_notes.Traffic
    counted: Mapping[str, float] = field(default_factory=dict)
    """The sidecar's counters by name and labels, without its prefix."""
    health: int | None = None
    """What the sidecar's /health answered when the arm was over."""

    @property
    def steps(self) -> Sequence[Step]:
        return self.trainer.steps

    @property
    def finished(self) -> bool:
        return self.trainer.ended == "finished" and len(self.steps) == self.wanted

    @property
    def finite(self) -> bool:
        return not any(step.nonfinite for step in self.steps)

    @property
    def corrupt(self) -> bool:
        """Not one parameter is a number any more."""
        return bool(self.steps) and self.steps[-1].nonfinite == self.trainer.parameters

    @property
    def unscorable(self) -> int:
        return sum(step.unscorable for step in self.steps)

    @property
    def trained(self) -> int:
        return sum(step.trained for step in self.steps)

    @property
    def gradient_error(self) -> float:
        """The worst of all steps and of the fixed batch, relative to the largest entry of the reference."""
        errors = [step.gradient_error for step in self.steps]
        if self.trainer.fixed_gradient_error is not None:
            errors.append(self.trainer.fixed_gradient_error)
        return math.nan if not errors or any(map(math.isnan, errors)) else max(errors)

    @property
    def wall_s(self) -> float:
        """The whole of `trainer.train()`, the start of TRL's worker process included."""
        return self.trainer.wall_s

    @property
    def stepping_s(self) -> float:
        """From the moment TRL's worker was ready to the end of the last step."""
        return self.steps[-1].seconds if self.steps else math.nan
