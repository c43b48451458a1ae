"""One arm of the proof: python proof_trainer.py JOB ANSWER, both JSON. Runs in TRL's environment, as its own process.

TRL's AsyncGRPOTrainer with its real worker process, collator, loss and optimizer, on a CPU. Replaced: the GPU-only
attention kernel, and NCCL (proof_transfer). Every step is recorded as it happens and compared afterwards with what
proof_reference says that it should have been.
"""

import os
import sys
import tempfile
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import proof_records
import torch
from proof_judge import Taken, judge
from proof_records import Answer, Job, Step
from proof_reference import Sample
from proof_transfer import FileTransfer, NoTransfer
from torch import Tensor

# No prompt and no template holds a token that the poisoned model is poisoned by (tests/vllm_env.py, POISONED_IDS): the
# engine comes upon them by sampling, about 1.5 % of its tokens, and what it leaves in reused KV blocks poisons others.
TEXTS = (
    "This program is free software",
    "The source code of a license",
    "There is no model",
    "One token after the next",
    "A proxy between two engines",
    "The worker samples",
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)


def make_trainer(job: Job, folder: str) -> Any:
    from datasets import Dataset
    from proof_worker import ObservedWorker, reward_variety
    from transformers import AutoTokenizer, PrinterCallback
    from trl.chat_template_utils import add_response_schema, qwen2_5_chat_template
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_rollout_worker

    # The worker's constructor asks whether vLLM is installed beside it; nothing in its loop imports it.
    async_rollout_worker.is_vllm_available = lambda *_args, **_kwargs: True
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    tokenizer.chat_template = qwen2_5_chat_template  # one of those of which TRL knows how to read a reply
    add_response_schema(tokenizer)
    tokenizer.chat_template = TEMPLATE
    dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in TEXTS])
    config = AsyncGRPOConfig(
        folder,
        max_steps=job.steps,
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=job.max_tokens,
        token_budget=-1,
        max_staleness=1_000_000,  # what was sampled is trained on: a dropped sample would hide a lost one
        learning_rate=3e-4,
        max_inflight_tasks=job.inflight,
        report_to="none",
        bf16=False,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
        logging_steps=1,
        vllm_server_base_url=job.url,
        request_timeout=120,
    )
    worker = ObservedWorker(
        model_name=job.served_name,
        dataset=dataset,
        reward_funcs=[reward_variety],
        processing_class=tokenizer,
        eos_token_ids=[tokenizer.eos_token_id],
        num_generations=config.num_generations,
        max_inflight_tasks=job.inflight,
        queue_maxsize=config.queue_maxsize,
        vllm_server_url=job.url,
        max_tokens=job.max_tokens,
        temperature=1.0,
        request_timeout=config.request_timeout,
    )
    transfer = FileTransfer(job.url, Path(job.weights_file)) if job.weights_file else NoTransfer()
    trainer = AsyncGRPOTrainer(
        model=job.model,
        reward_funcs=reward_variety,
        args=config,
        train_dataset=dataset,
        processing_class=tokenizer,
        rollout_worker=worker,
        weight_transfer=transfer,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def nonfinite(model: Any) -> int:
    return sum(int((~torch.isfinite(parameter)).sum()) for parameter in model.parameters())


def record(trainer: Any, answer: Answer, timer: threading.Timer) -> list[Taken]:
    """Keep what each step began with and did; the list fills while the trainer trains, against the clock of `timer`."""
    from transformers import TrainerCallback
    from trl.experimental.async_grpo.async_grpo_trainer import DataCollatorForRollout

    taken: list[Taken] = []
    collated: list[list[Sample]] = []
    ready = 0.0
    collate, training_step = DataCollatorForRollout.torch_call, trainer.training_step

    def kept_collate(collator: Any, examples: list[Any]) -> Any:
        rows = [example for row in examples[0] for example in row.samples]
        keys = ("input_ids", "completion_mask", "old_log_probs")
        collated.append([Sample(*(row[key].tolist() for key in keys), row["advantage"]) for row in rows])
        return collate(collator, examples)

    def kept_training_step(*args: Any, **kwargs: Any) -> Tensor:
        before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        loss = training_step(*args, **kwargs)
        gradient = {name: p.grad.clone() for name, p in trainer.model.named_parameters()}
        taken.append(Taken(before, collated[len(taken)], gradient))  # the loader reads ahead, in order
        return loss

    class Watch(TrainerCallback):
        def on_train_begin(self, *_args: Any, **_kwargs: Any) -> None:
            nonlocal ready
            ready = time.monotonic()  # called after TRL's own callback, which has waited for the worker
            timer.start()

        def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
            answer.steps.append(Step(nonfinite(trainer.model), time.monotonic() - ready))

    DataCollatorForRollout.torch_call = kept_collate  # the trainer makes its collator when it begins to train
    trainer.training_step = kept_training_step
    trainer.add_callback(Watch())
    return taken


def run(job: Job, answer_file: Path) -> None:
    answer = Answer()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(job, folder)
        if job.hook is not None:
            from trainer_hooks.trl import make_nan_safe

            make_nan_safe(trainer, unscorable=job.hook)

        def end() -> None:
            answer.wall_s = time.monotonic() - started
            judge(job, trainer, taken, answer)
            proof_records.write(answer, answer_file)

        def cut_off() -> None:
            # The trainer waits for a sample that does not come, and its own stop() may wait as long.
            answer.ended = f"cut off after {job.cut_off_s:.0f} s"
            trainer.rollout_worker._process.kill()
            try:
                end()
            except Exception:  # in this thread it would end nothing
                traceback.print_exc()
                os._exit(1)
            os._exit(0)

        timer = threading.Timer(job.cut_off_s, cut_off)
        timer.daemon = True
        taken = record(trainer, answer, timer)
        started = time.monotonic()
        try:
            trainer.train()
        except (RuntimeError, TypeError, ValueError) as error:
            cause = str(error.__cause__ or error).strip().splitlines()
            answer.ended = f"{type(error).__name__}: {cause[-1] if cause else ''}"
        timer.cancel()
        end()


def main(question: str, answer: str) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    import trl_cpu_attention
    from accelerate import PartialState

    PartialState()
    trl_cpu_attention.install()
    run(proof_records.read_job(Path(question)), Path(answer))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
