"""What make_nan_safe says to trainers that are not what it knows: python trl_refusal_cases.py JOB ANSWER.

Runs in TRL's own environment. ANSWER maps the name of each case to the error; a refused trainer that was changed all
the same ends the script.
"""

import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import trl_async_cases
import trl_cpu_attention
import trl_sync_cases
from accelerate import PartialState

from trainer_hooks import trl_seam
from trainer_hooks.trl import make_nan_safe

ROLLOUTS = [trl_async_cases.Rollout([70, 71, 72], [0, 1, 1], 1.0, old=[0.0, -1.0, -1.0]) for _ in range(2)]


def refusal(trainer: Any, **options: Any) -> str:
    before = {name: id(value) for name, value in vars(trainer).items()}
    try:
        make_nan_safe(trainer, **options)
    except (RuntimeError, TypeError, ValueError) as error:
        assert before == {name: id(value) for name, value in vars(trainer).items()}
        return f"{type(error).__name__}: {error}"
    return "accepted"


def with_loss(trainer: Any, change: Callable[[Any, Any, Any, dict[str, Any]], Any]) -> Any:
    """The same trainer of a class whose compute_loss is another one."""
    stock = type(trainer).compute_loss

    def compute_loss(self: Any, model: Any, inputs: dict[str, Any], *_args: Any, **_kwargs: Any) -> Any:
        return change(lambda given: stock(self, model, given), self, model, inputs)

    trainer.__class__ = type("Changed", (type(trainer),), {"compute_loss": compute_loss})
    return trainer


def without_kl(loss: Any, trainer: Any, _model: Any, inputs: dict[str, Any]) -> Any:
    value = loss(inputs)
    trainer._metrics["train"]["approx_kl"] = trainer._metrics["train"].pop("kl")
    return value


def main(question: str, answer: str) -> None:
    warnings.filterwarnings("ignore")
    PartialState()
    trl_cpu_attention.install()
    with open(question) as file:
        model = json.load(file)["model"]
    with tempfile.TemporaryDirectory() as folder:

        def fresh() -> Any:
            return trl_async_cases.make_trainer(trl_async_cases.Case([]), ROLLOUTS, model, folder)

        def fresh_sync() -> Any:
            return trl_sync_cases.make_trainer(trl_sync_cases.SyncCase([]), ROLLOUTS, model, folder)

        refusals = {
            "other sign": refusal(with_loss(fresh(), lambda loss, _t, _m, inputs: -loss(inputs))),
            "other input": refusal(with_loss(fresh(), lambda loss, _t, _m, inputs: loss({"x": inputs["sampler"]}))),
            "other metrics": refusal(with_loss(fresh(), without_kl)),
            "other sync loss": refusal(
                with_loss(fresh_sync(), lambda loss, _t, model, inputs: loss(inputs) + model.logprobs.sum())
            ),
            "no policy": refusal(fresh(), unscorable="mask"),
            "no trainer": refusal(torch.nn.Linear(1, 1)),
            "twice": refusal(make_nan_safe(fresh())),
        }
        stand_in = trl_seam.metadata.version
        trl_seam.metadata.version = lambda name: "1.17.0"
        refusals["another version"] = refusal(fresh())
        trl_seam.metadata.version = stand_in
    with open(answer, "w") as file:
        json.dump(refusals, file)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
