"""Runs TRL's real GRPOTrainer over given rollouts, without an engine: python trl_sync_cases.py JOB ANSWER.

Runs in TRL's own environment. The rollouts come in through TRL's `rollout_func`; its path for vLLM is switched on by
hand, since the constructor would look for a vLLM. JOB and ANSWER are those of trl_async_cases.py.
"""

import json
import sys
import tempfile
import warnings
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl_async_cases import Case, Result, Rollout, compare, fill_old, is_unscorable, logprobs_of, watch

CLIP_MAX = 3.0


@dataclass
class SyncCase(Case):
    """The advantages are TRL's, of rewards 1 and 0 in turn: a prompt has two completions."""

    mode: str = "sequence_mask"
    loss_type: str = "dapo"
    off_policy_threshold: float | None = None


def advantage(index: int) -> float:
    """Of two rewards 1 and 0: half the spread over the unbiased deviation, as TRL regularises it."""
    return (0.5 if index % 2 == 0 else -0.5) / (0.5**0.5 + 1e-4)


def naive(model: Any, rollouts: list[Rollout], case: SyncCase) -> dict[str, float]:
    """DAPO's loss at the policy that sampled, one term after the other; the gradient is left on the parameters."""
    loss = torch.zeros((), dtype=torch.float64)
    trained = sum(sum(rollout.mask) for rollout in rollouts)
    unscorable = 0
    for index, rollout in enumerate(rollouts):
        new = logprobs_of(model, rollout)
        steps = [p for p, in_loss in enumerate(rollout.mask) if in_loss]
        bad = {p for p in steps if is_unscorable(rollout.old[p])}
        unscorable += len(bad)
        log_weight = {p: 0.0 if p in bad else float(new[p]) - rollout.old[p] for p in steps}
        if case.mode.startswith("sequence"):
            log_weight = dict.fromkeys(steps, sum(log_weight.values()))
        for p in steps:
            weight = torch.tensor(log_weight[p], dtype=torch.float64).exp().item()
            if weight > CLIP_MAX:
                weight = 0.0 if case.mode.endswith("mask") else CLIP_MAX
            if not (case.hook == "drop" and p in bad):
                loss = loss - torch.exp(new[p] - new[p].detach()) * advantage(index) * weight / trained
    if loss.requires_grad:
        loss.backward()
    return {"loss": float(loss), "unscorable_fraction": unscorable / trained}


def make_trainer(case: SyncCase, rollouts: list[Rollout], model: str, folder: str) -> Any:
    from datasets import Dataset
    from transformers import AutoTokenizer, PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    size = len(rollouts) // case.accumulation
    config = GRPOConfig(
        folder,
        max_steps=case.steps,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=case.accumulation,
        num_generations=2,
        max_completion_length=64,
        learning_rate=1e-4,
        max_grad_norm=case.max_grad_norm,
        report_to="none",
        bf16=case.bf16,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
        logging_steps=1,
        logging_nan_inf_filter=case.nan_filter,
        beta=0.0,
        loss_type=case.loss_type,
        vllm_importance_sampling_mode=case.mode,
        vllm_importance_sampling_clip_max=CLIP_MAX,
        off_policy_mask_threshold=case.off_policy_threshold,
        shuffle_dataset=False,
    )

    def roll_out(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        starts = [rollout.mask.index(1) for rollout in rollouts]
        return {
            "prompt_ids": [rollout.ids[:start] for rollout, start in zip(rollouts, starts, strict=True)],
            "completion_ids": [rollout.ids[start:] for rollout, start in zip(rollouts, starts, strict=True)],
            "logprobs": [rollout.old[start:] for rollout, start in zip(rollouts, starts, strict=True)],
            "env_mask": [rollout.mask[start:] for rollout, start in zip(rollouts, starts, strict=True)],
        }

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [1.0 - index % 2 for index in range(len(completions))],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "x"}] * 64),
        processing_class=AutoTokenizer.from_pretrained(model),
        rollout_func=roll_out,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.use_vllm = True
    trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
    trainer._last_loaded_step = -1
    return trainer


def run(case: SyncCase, model: str) -> Result:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    rollouts = [Rollout(**rollout) for rollout in case.rollouts]
    fill_old(reference, rollouts)
    result = Result()
    gradients: dict[str, Tensor] = {}
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(case, rollouts, model, folder)
        if case.hook is not None:
            from trainer_hooks.trl import make_nan_safe

            make_nan_safe(trainer, unscorable=case.hook, guard=case.guard)
        gradients = watch(trainer, case, result)
        try:
            trainer.train()
        except (RuntimeError, TypeError, ValueError) as error:
            result.error = f"{type(error).__name__}: {error}"
        result.log = [entry for entry in trainer.state.log_history if "loss" in entry]
    if gradients:
        result.naive = naive(reference, rollouts, case)
        compare(gradients, reference, result)
    return result


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    with open(sys.argv[1]) as question:
        job = json.load(question)
    results = [asdict(run(SyncCase(**case), job["model"])) for case in job["cases"]]
    with open(sys.argv[2], "w") as answer:
        json.dump(results, answer)
