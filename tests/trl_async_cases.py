"""Runs TRL's real AsyncGRPOTrainer over given rollouts, without an engine: python trl_async_cases.py JOB ANSWER.

Runs in TRL's own environment. JOB holds `model` and `cases` (see `Case`); ANSWER gets one `Result` for each, in order.
The rollouts go straight into the trainer's queue, as its worker puts them there. For a case that asks for it, loss,
gradient and metrics of the first step are compared with `naive`, written token by token in float64.
"""

import itertools
import json
import math
import os
import queue
import sys
import tempfile
import warnings
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

CLIP = 0.2
BOUND = 20.0


@dataclass
class Rollout:
    """One row as the worker pushes it; `old` is the true logprob less `offset`, or a value of `bad`."""

    ids: list[int]
    mask: list[int]
    advantage: float
    offset: float = 0.05
    bad: dict[str, Any] = field(default_factory=dict)
    old: list[Any] = field(default_factory=list)


@dataclass
class Case:
    rollouts: list[dict[str, Any]]
    """One micro-batch after the other; the whole list is fed again for every step."""
    hook: str | None = None
    """None: stock; else `unscorable`."""
    guard: Literal["skip", "stop"] | None = "skip"
    max_consecutive: int = 10
    steps: int = 2
    accumulation: int = 1
    bf16: bool = False
    nan_filter: bool = True
    max_grad_norm: float = 0.0
    save_steps: int = 0
    twin: str | None = None
    """Compare bitwise with a stock trainer that is made to do by hand what this policy of the hook does."""
    broken_steps: list[int] = field(default_factory=list)
    """In which optimizer steps, from 0, the loss is made NaN."""


@dataclass
class Result:
    nonfinite_tensors: list[int] = field(default_factory=list)
    """After every optimizer step: in how many parameters is there a number that is not finite?"""
    moved: list[bool] = field(default_factory=list)
    """Has the step changed a parameter?"""
    gradient_error: float | None = None
    """Largest difference of the first step's gradient from the naive one, over the largest entry of the latter."""
    gradient_norm: float = math.nan
    twin_equal: bool | None = None
    naive: dict[str, float] = field(default_factory=dict)
    log: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None
    checkpoints: list[str] = field(default_factory=list)
    learning_steps: int = 0
    """Optimizer steps that went through, by the optimizer's own count."""


def is_unscorable(value: Any) -> bool:
    return value is None or isinstance(value, str) or not (-9999.0 < value <= 1e-3)


def logprobs_of(model: Any, rollout: Rollout) -> Tensor:
    """(T,): what the model gives each token after the ones before it; 0 for the first."""
    logits = model(torch.tensor([rollout.ids])).logits[0, :-1]
    picked = logits.log_softmax(-1)[torch.arange(len(rollout.ids) - 1), torch.tensor(rollout.ids[1:])]
    return torch.cat([picked.new_zeros(1), picked])


def fill_old(model: Any, rollouts: list[Rollout]) -> None:
    for rollout in rollouts:
        with torch.no_grad():
            true = logprobs_of(model, rollout)
        rollout.old = [
            float(np.float32(v - rollout.offset)) if m else 0.0 for v, m in zip(true, rollout.mask, strict=True)
        ]
        for position, value in rollout.bad.items():
            rollout.old[int(position)] = value


def naive(model: Any, batches: list[list[Rollout]], policy: str) -> dict[str, float]:
    """One loss term after the other, in the model's own dtype; the gradient is left on its parameters."""
    loss, ratios, kls, terms, unscorable = torch.zeros((), dtype=torch.float64), [], [], 0, 0
    for batch in batches:
        trained = sum(map(sum, (rollout.mask for rollout in batch)))
        for rollout in batch:
            new = logprobs_of(model, rollout)
            for position, in_loss in enumerate(rollout.mask):
                if not in_loss:
                    continue
                terms += 1
                if is_unscorable(rollout.old[position]):
                    unscorable += 1
                    if policy == "on_policy":
                        ratio = torch.exp(new[position] - new[position].detach())
                        loss = loss - ratio * rollout.advantage / trained / len(batches)
                    continue
                log_ratio = new[position] - rollout.old[position]
                if abs(float(log_ratio)) > BOUND:
                    log_ratio = torch.tensor(math.copysign(BOUND, float(log_ratio)), dtype=torch.float64)
                ratio = torch.exp(log_ratio)
                clipped = min(max(float(ratio), 1 - CLIP), 1 + CLIP)
                term = ratio * rollout.advantage
                if clipped * rollout.advantage < float(term):
                    term = torch.tensor(clipped * rollout.advantage, dtype=torch.float64)
                loss = loss - term / trained / len(batches)
                ratios.append(float(ratio))
                kls.append(float(ratio) - 1 - float(log_ratio))
    if loss.requires_grad:
        loss.backward()
    mean = {"ratio": ratios, "kl": kls}
    return {
        "loss": float(loss),
        "unscorable_fraction": unscorable / terms,
        **{name: sum(values) / len(values) for name, values in mean.items() if values},
    }


class Worker:
    """Stands in for the rollout worker: the rollouts are in its queue from the start."""

    def __init__(self, rollouts: list[Rollout], rounds: int) -> None:
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        for (_, rollout), group in zip(itertools.product(range(rounds), rollouts), itertools.count()):
            self.rollout_buffer.put(
                RolloutSample(
                    prompt=[],
                    completion=[],
                    input_ids=np.asarray(rollout.ids, dtype=np.int64),
                    completion_mask=np.asarray(rollout.mask, dtype=np.int64),
                    old_log_probs=np.asarray(rollout.old, dtype=np.float32),  # as the worker makes it of JSON
                    advantage=rollout.advantage,
                    model_version=1,
                    group_id=group,
                    metrics={"reward": 1.0},
                )
            )

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def update_model_version(self, model_version: int) -> None: ...

    def check_health(self, stale_after_s: float) -> None:
        raise RuntimeError("the rollouts have run out")


class Transfer:
    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: Any) -> None:
        for _ in iterator:
            pass

    def resume(self) -> None: ...

    def destroy(self) -> None: ...


def make_trainer(case: Case, rollouts: list[Rollout], model: str, folder: str) -> Any:
    from datasets import Dataset
    from transformers import AutoTokenizer, PrinterCallback
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    config = AsyncGRPOConfig(
        folder,
        max_steps=case.steps,
        per_device_train_batch_size=len(rollouts) // case.accumulation,
        gradient_accumulation_steps=case.accumulation,
        token_budget=-1,
        max_staleness=1000,
        learning_rate=1e-4,
        lr_scheduler_type="linear",
        max_grad_norm=case.max_grad_norm,
        report_to="none",
        bf16=case.bf16,
        save_strategy="steps" if case.save_steps else "no",
        save_steps=case.save_steps or 500,
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
        logging_steps=1,
        logging_nan_inf_filter=case.nan_filter,
        epsilon=CLIP,
    )
    trainer = AsyncGRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "x"}]}]),
        processing_class=AutoTokenizer.from_pretrained(model),
        # One round more than is trained on: the loader reads ahead.
        rollout_worker=Worker(rollouts, case.steps + 2),
        weight_transfer=Transfer(),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def watch(trainer: Any, case: Case, result: Result) -> dict[str, Tensor]:
    """Note what each step does; the first step's gradients come back."""
    from transformers import TrainerCallback

    gradients: dict[str, Tensor] = {}
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    compute_loss = trainer.compute_loss

    def maybe_broken(*args: Any, **kwargs: Any) -> Tensor:
        loss = compute_loss(*args, **kwargs)
        return loss * math.nan if trainer.state.global_step in case.broken_steps else loss

    trainer.compute_loss = maybe_broken

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, *_args: Any, **_kwargs: Any) -> None:
            if not gradients:
                gradients.update({name: p.grad.clone() for name, p in trainer.model.named_parameters()})

        def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
            now = dict(trainer.model.named_parameters())
            result.nonfinite_tensors.append(sum(not bool(torch.isfinite(p).all()) for p in now.values()))
            result.moved.append(any(not torch.equal(p, before[name]) for name, p in now.items()))
            before.update({name: p.detach().clone() for name, p in now.items()})

    trainer.add_callback(Watch())
    return gradients


def do_by_hand(trainer: Any, policy: str) -> None:
    """The hook's effect by TRL's own means: the term deselected, or the new logprob given as the old one."""
    compute_loss, model = trainer.compute_loss, trainer.model

    def by_hand(module: Any, inputs: dict[str, Tensor], **kwargs: Any) -> Tensor:
        bad = (inputs["token_index"] >= 0) & ~((inputs["old_log_probs"] > -9999) & (inputs["old_log_probs"] <= 1e-3))
        inputs = dict(inputs)
        if policy == "drop":
            inputs["token_index"] = torch.where(bad, -1, inputs["token_index"])
        else:
            kept: list[Tensor] = []
            handle = model.register_forward_hook(lambda _m, _i, out: kept.append(out.log_probs.detach().flatten()))
            with torch.no_grad():
                compute_loss(module, inputs, **kwargs)
            handle.remove()
            inputs["old_log_probs"] = torch.where(bad, kept[0][inputs["token_index"]], inputs["old_log_probs"])
        return compute_loss(module, inputs, **kwargs)

    trainer.compute_loss = by_hand


def gradients_of(case: Case, rollouts: list[Rollout], model: str) -> dict[str, Tensor]:
    """The first step's gradients of a stock trainer that does by hand what the hook does."""
    with tempfile.TemporaryDirectory() as folder:
        twin = make_trainer(case, rollouts, model, folder)
        do_by_hand(twin, str(case.twin))
        gradients = watch(twin, case, Result())
        twin.args.max_steps = 1
        twin.train()
    return gradients


def compare(gradients: dict[str, Tensor], reference: Any, result: Result) -> None:
    """Note how far the gradients are from those on the parameters of `reference`."""
    expected = {n: torch.zeros(()) if p.grad is None else p.grad for n, p in reference.named_parameters()}
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    errors = [float((gradients[name].double() - gradient).abs().max()) for name, gradient in expected.items()]
    result.gradient_error = max(errors) / (scale or 1.0)
    result.gradient_norm = float(torch.stack([gradient.double().norm() for gradient in gradients.values()]).norm())


def run(case: Case, model: str) -> Result:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    rollouts = [Rollout(**rollout) for rollout in case.rollouts]
    fill_old(reference, rollouts)
    result = Result()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(case, rollouts, model, folder)
        if case.hook is not None:
            from trainer_hooks import StepGuard
            from trainer_hooks.trl import make_nan_safe

            guard = StepGuard(None, policy=case.guard, max_consecutive=case.max_consecutive) if case.guard else None
            make_nan_safe(trainer, unscorable=case.hook, guard=guard)
        gradients = watch(trainer, case, result)
        try:
            trainer.train()
        except RuntimeError as error:
            result.error = f"{type(error).__name__}: {error}"
        result.log = [entry for entry in trainer.state.log_history if "loss" in entry]
        result.checkpoints = sorted(name for name in os.listdir(folder) if name.startswith("checkpoint"))
        steps = [state["step"] for state in trainer.optimizer.state.values() if "step" in state]
        result.learning_steps = int(max(steps, default=torch.zeros(()))) if steps else 0
    if gradients and case.hook is not None:
        size = len(rollouts) // case.accumulation
        batches = [rollouts[i : i + size] for i in range(0, len(rollouts), size)]
        result.naive = naive(reference, batches, case.hook)
        compare(gradients, reference, result)
    if case.twin:
        twin = gradients_of(case, rollouts, model)
        result.twin_equal = all(torch.equal(gradients[name], gradient) for name, gradient in twin.items())
    return result


def main(question: str, answer: str) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    import trl_cpu_attention
    from accelerate import PartialState

    PartialState()
    trl_cpu_attention.install()
    with open(question) as file:
        job = json.load(file)
    results = [asdict(run(Case(**case), job["model"])) for case in job["cases"]]
    with open(answer, "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
