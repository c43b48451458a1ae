"""One synchronous arm of the proof: python proof_sync.py JOB ANSWER, as proof_trainer.py has them.

TRL's GRPOTrainer with `use_vllm` in server mode: its VLLMClient asks for n completions of several prompts at once and
parses the logprobs, and its loss corrects for them. Replaced, since a CPU has no NCCL: `init_communicator` and
`update_named_params`, so that the engine keeps serving the initial model. What the client parses is compared, token by
token, with the initial model in float64.
"""

import math
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import proof_records
import torch
from proof_records import Answer, Job, Parsed, Step
from proof_trainer import TEMPLATE, TEXTS, nonfinite

Seen = list[tuple[list[int], list[int], list[Any]]]
"""Prompt, completion and logprobs of each choice."""


def replace_what_needs_a_gpu() -> None:
    from trl.generation import vllm_client, vllm_generation
    from trl.trainer import grpo_trainer

    for module in (vllm_client, vllm_generation, grpo_trainer):
        module.is_vllm_available = lambda *_args, **_kwargs: True
    vllm_client.VLLMClient.init_communicator = lambda self, device=0: None
    vllm_client.VLLMClient.update_named_params = lambda self, metadata, parameters: None


def make_trainer(job: Job, folder: str) -> Any:
    from datasets import Dataset
    from proof_worker import reward_variety
    from transformers import AutoTokenizer, PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(job.model)
    tokenizer.chat_template = TEMPLATE
    config = GRPOConfig(
        folder,
        max_steps=job.steps,
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=job.max_tokens,
        learning_rate=3e-4,
        report_to="none",
        bf16=False,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
        logging_steps=1,
        beta=0.0,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=job.url,
        generation_kwargs={"seed": 0},
    )
    trainer = GRPOTrainer(
        model=job.model,
        reward_funcs=reward_variety,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in TEXTS]),
        processing_class=tokenizer,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def watch_client(client: Any, parsed: Parsed) -> Seen:
    seen: Seen = []
    generate = client.generate

    def noted(*args: Any, **kwargs: Any) -> Any:
        output = generate(*args, **kwargs)
        parsed.generations += 1
        prompts = [prompt for prompt in output["prompt_ids"] for _ in range(kwargs["n"])]
        seen.extend(zip(prompts, output["completion_ids"], output["logprobs"], strict=True))
        return output

    client.generate = noted
    return seen


def judge(job: Job, seen: Seen, parsed: Parsed) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float64)
    errors = []
    for prompt, completion, logprobs in seen:
        parsed.completions += 1
        parsed.mismatched += len(logprobs) != len(completion)
        with torch.no_grad():
            true = model(torch.tensor([prompt + completion])).logits[0].log_softmax(-1)
        for position, (token, values) in enumerate(zip(completion, logprobs, strict=False), start=len(prompt)):
            if values[0] is None:
                parsed.none += 1
            else:
                errors.append(abs(values[0] - true[position - 1, token].item()))
    parsed.value_error = max(errors, default=math.nan)


def train(trainer: Any, answer: Answer) -> None:
    from requests.exceptions import RequestException
    from transformers import TrainerCallback

    started = time.monotonic()

    class Watch(TrainerCallback):
        def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
            answer.steps.append(Step(nonfinite(trainer.model), time.monotonic() - started))

    trainer.add_callback(Watch())
    try:
        trainer.train()
    except (RuntimeError, TypeError, ValueError, RequestException) as error:
        answer.ended = f"{type(error).__name__}: {error}"[:300]
    except Exception as error:
        if type(error) is not Exception:  # TRL's client raises the bare class for a status that is not 200
            raise
        answer.ended = f"{error}"[:300]
    answer.wall_s = time.monotonic() - started
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    for step, log in zip(answer.steps, logs, strict=False):
        step.logged = {name: log.get(name) for name in ("loss", "grad_norm", "unscorable_fraction")}


def run(job: Job) -> Answer:
    answer = Answer(parsed=Parsed())
    assert answer.parsed is not None
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(job, folder)
        answer.parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
        if job.hook is not None:
            from trainer_hooks.trl import make_nan_safe

            make_nan_safe(trainer, unscorable=job.hook)
        seen = watch_client(trainer.vllm_generation.vllm_client, answer.parsed)
        train(trainer, answer)
    judge(job, seen, answer.parsed)
    return answer


def main(question: str, answer: str) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    replace_what_needs_a_gpu()
    proof_records.write(run(proof_records.read_job(Path(question))), Path(answer))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
