"""Times policy_loss, forward and backward with all metrics, against TRL's eager loss without any guard or metric.

    python benchmarks/loss_gpu.py

On a GPU it prints the table for 1,048,576 and 16,777,216 tokens (about a minute); without one it says so and times the
CPU path at 1,048,576 tokens. Both sides run in turns in the same process; each number is a median.
"""

import platform
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, cast

import torch
from torch import Tensor

from trainer_hooks import PolicyLossConfig, policy_loss

LOSSES = ("grpo", "dapo", "bnpo", "dr_grpo", "gspo", "cispo")
WIDTH = 4096
BYTES_PER_TOKEN = 36  # the floor to compare with: what an ideal eager forward and backward has to move
GPU_TARGETS = {1 << 20: 0.35, 1 << 24: 0.25}
CPU_TARGET = 1.5

Batch = tuple[Tensor, Tensor, Tensor, Tensor]


def unguarded_loss(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """What TRL 1.16 computes for `loss_type="dapo"`: ratio, clip, minimum, masked mean."""
    ratio = torch.exp(new - old)
    clipped = torch.clamp(ratio, 1 - 0.2, 1 + 0.2)
    per_token = -torch.min(ratio * advantages, clipped * advantages)
    return (per_token * mask).sum() / mask.sum().clamp(min=1.0)


def make(tokens: int, device: str) -> Batch:
    torch.manual_seed(0)
    new = -2.0 * torch.rand(tokens // WIDTH, WIDTH, device=device)
    old = new + 0.1 * torch.randn_like(new)
    mask = torch.rand_like(new) < 0.9
    return new.requires_grad_(), old.clamp_(max=0.0), torch.randn(tokens // WIDTH, 1, device=device), mask


def steps(batch: Batch) -> dict[str, Callable[[], None]]:
    """Name to one forward and backward."""
    new, old, advantages, mask = batch
    weights = mask.float()  # TRL multiplies with a number

    def step(loss: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            new.grad = None
            cast(Any, loss()).backward()

        return run

    def guarded(config: PolicyLossConfig) -> Callable[[], Tensor]:
        return lambda: policy_loss(new, old, advantages, mask, config).loss

    configs = {name: PolicyLossConfig(loss=cast(Any, name), max_length=WIDTH) for name in LOSSES}
    configs["dapo, drop"] = PolicyLossConfig(loss="dapo", unscorable="drop")
    return {
        "TRL, unguarded": step(lambda: unguarded_loss(new, old, advantages, weights)),
        **{name: step(guarded(config)) for name, config in configs.items()},
    }


def gpu_seconds(run: Callable[[], object], repeats: int) -> float:
    """Of one run, from the first launch to the end of the last kernel."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats


def cpu_seconds(run: Callable[[], object], repeats: int) -> float:
    begin = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - begin) / repeats


def medians(
    runs: dict[str, Callable[[], None]],
    seconds: Callable[[Callable[[], object], int], float],
    rounds: int,
    repeats: int,
) -> dict[str, float]:
    """In turns, so that a change of clock or of load meets every side alike."""
    for run in runs.values():
        seconds(run, 3)
    measured = [{name: seconds(run, repeats) for name, run in runs.items()} for _ in range(rounds)]
    return {name: statistics.median(row[name] for row in measured) for name in runs}


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a copy far larger than the cache."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    gpu_seconds(lambda: target.copy_(source), 3)
    return 2 * source.numel() / statistics.median(gpu_seconds(lambda: target.copy_(source), 10) for _ in range(5))


def print_rows(times: dict[str, float], floor: float | None) -> None:
    baseline = times["TRL, unguarded"]
    for name, taken in times.items():
        beside_floor = "" if floor is None else f" {taken / floor:.2f} |"
        print(f"| {name} | {taken * 1e6:,.0f} | {taken / baseline:.2f} |{beside_floor}")


def main() -> None:
    gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if gpu else f"{platform.processor() or platform.machine()}, no GPU"
    triton = version("triton") if gpu else "not used"
    print(f"{datetime.now(UTC):%Y-%m-%d}, {device}, torch {torch.__version__}, triton {triton}\n")
    if not gpu:
        print(f"No CUDA device: this times the CPU path, {torch.get_num_threads()} threads, 1,048,576 tokens.")
        print(f"Target: at most {CPU_TARGET} times the unguarded loss.\n")
        print("| loss | µs | of TRL |\n|---|---|---|")
        print_rows(medians(steps(make(1 << 20, "cpu")), cpu_seconds, rounds=7, repeats=2), None)
        return
    bandwidth = copy_bandwidth()
    print(f"Copy bandwidth {bandwidth / 1e12:.2f} TB/s, read and written.")
    for tokens, target in GPU_TARGETS.items():
        floor = tokens * BYTES_PER_TOKEN / bandwidth
        print(f"\n{tokens:,} tokens; floor {floor * 1e6:,.0f} µs; target: at most {target} of TRL\n")
        print("| loss | µs | of TRL | of the floor |\n|---|---|---|---|")
        print_rows(medians(steps(make(tokens, "cuda")), gpu_seconds, rounds=15, repeats=20), floor)


if __name__ == "__main__":
    main()
