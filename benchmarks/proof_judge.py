"""Puts beside each recorded step of an arm what it should have been. Runs in TRL's environment."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from proof_records import Answer, Job
from proof_reference import Sample, distance, truth
from proof_transfer import NEVER_PUSHED, served_error
from torch import Tensor

LOGGED = ("loss", "kl", "ratio", "grad_norm", "unscorable_fraction", "skipped_steps", "rollout/vllm_retry_total")


@dataclass(slots=True)
class Taken:
    """One training step as it was: the parameters it began with, its samples, its gradient before clipping."""

    before: dict[str, Tensor]
    samples: list[Sample]
    gradient: dict[str, Tensor]


def judge(job: Job, trainer: Any, taken: list[Taken], answer: Answer) -> None:
    """Put beside each step what it should have been. A stock trainer has no better answer than to drop a token."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float64)
    policy = job.hook or "drop"
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    for step, was, log in zip(answer.steps, taken, [*logs, *[{}] * len(taken)], strict=False):
        should = truth(reference, was.before, was.samples, policy)
        step.trained, step.unscorable = should.trained, should.unscorable
        step.logged = {name: log.get(name) for name in LOGGED}
        step.true = {"loss": should.loss, "kl": should.kl, "ratio": should.ratio}
        step.gradient_error = distance(was.gradient, should.gradient)
    answer.parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    if job.weights_file:
        trained = dict(trainer.model.named_parameters())
        served = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float64)
        with torch.no_grad():
            for name, parameter in served.named_parameters():
                if name != NEVER_PUSHED:
                    parameter.copy_(trained[name])
        answer.served_error = served_error(job.url, served)
    if job.fixed_batch and answer.steps:  # before its first step a trainer cannot compute a loss
        answer.fixed_gradient_error = compare_fixed(job, trainer, reference, policy)


def compare_fixed(job: Job, trainer: Any, reference: Any, policy: str) -> float:
    """The gradient of the fixed batch at the initial parameters: the trainer's beside the reference's."""
    from transformers import AutoModelForCausalLM
    from trl.experimental.async_grpo.async_grpo_trainer import DataCollatorForRollout
    from trl.experimental.async_grpo.packing import TreeRow

    initial = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    parameters = {name: parameter.detach() for name, parameter in initial.named_parameters()}
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            parameter.copy_(parameters[name])
    trainer.model.zero_grad(set_to_none=True)
    samples, row = [], TreeRow()
    for group, given in enumerate(job.fixed_batch):
        old = [job.mark if value is None else value for value in given["old"]]
        samples.append(Sample(given["ids"], given["mask"], old, given["advantage"]))
        row.add(
            {
                "input_ids": np.asarray(given["ids"], dtype=np.int64),
                "completion_mask": np.asarray(given["mask"], dtype=np.int64),
                "old_log_probs": np.asarray(old, dtype=np.float32),
                "advantage": given["advantage"],
                "group_id": group,
                "metrics": {"reward": 0.0, "reward_std": 0.0},
            }
        )
    batch = DataCollatorForRollout(trainer.processing_class.pad_token_id)([[row]])
    trainer.compute_loss(trainer.model, batch).backward()
    gradient = {name: parameter.grad for name, parameter in trainer.model.named_parameters()}
    return distance(gradient, truth(reference, parameters, samples, policy).gradient)
