"""What the runs of the proof say: the claims, checked; the table; the plot. Starts nothing."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from proof_arms import ARMS, Run
from proof_records import Step

SURVIVE = ("2", "4", "5", "6", "9a", "9b", "10b")
CORRUPT = ("7", "8", "10a")
EXACT = ("4", "5", "6", "9a", "9b", "10b")
GRADIENT_TOLERANCE = 1e-5  # float32 beside float64: about 5e-7
VALUE_TOLERANCE = 1e-4  # of a logprob: about 5e-7
RATIOS = (("2", "1", 1.1), ("4", "2", 1.3))


@dataclass(frozen=True, slots=True)
class Claim:
    text: str
    holds: bool
    numbers: str


def claims(runs: Sequence[Run], timed: bool = True) -> list[Claim]:
    """All that the arms that were run must show; `timed`: the ratios of wall time as well."""
    found: list[Claim] = []
    for run in runs:
        name, traffic = run.arm.name, run.traffic
        if name in SURVIVE:
            numbers = f"{len(run.steps)} of {run.wanted} steps ({run.trainer['ended']}), lost {traffic.lost}"
            held = run.finished and run.finite and traffic.lost == traffic.failed == 0
            found.append(Claim(f"arm {name} finishes, all parameters finite, no rollout lost", held, numbers))
        if name in EXACT:
            numbers = f"{run.gradient_error:.1e} with {run.unscorable} of {run.trained} tokens unscorable"
            held = run.gradient_error <= GRADIENT_TOLERANCE and run.unscorable > 0
            found.append(Claim(f"arm {name}'s gradients are the reference's", held, numbers))
        if name in CORRUPT:
            logged = [step.logged["loss"] for step in run.steps]
            held = run.corrupt and traffic.failed == 0 and logged[-1] == 0.0
            found.append(Claim(f"arm {name} turns every parameter to NaN and logs a loss of 0", held, f"{logged}"))
        if name == "3":
            numbers = f"{traffic.failed} of {traffic.attempts} attempts failed, {traffic.lost} rollouts lost"
            found.append(Claim("arm 3 loses rollouts", traffic.lost > 0 and not run.finished, numbers))
        if name == "11":
            numbers = f"/health {run.health}, failures {traffic.failures}"
            found.append(Claim("arm 11's breaker trips", run.health == 503 and "503" in traffic.failures, numbers))
        if name in ("s2", "s3"):
            numbers = f"{run.trainer['none']} None, others off by {run.trainer['value_error']:.1e} at most"
            held = run.finished and run.finite and run.trainer.mismatched == 0 and run.trainer.none > 0
            held = held and run.trainer.value_error < 1e-4
            found.append(Claim(f"arm {name} finishes, NaN read as None, all else as sampled", held, numbers))
        if name == "s1":
            found.append(Claim("arm s1 dies", not run.finished, run.trainer.ended))
    return [*found, *(ratio_claims(runs) if timed else [])]


def ratio_claims(runs: Sequence[Run]) -> list[Claim]:
    found = []
    for slower, faster, limit in RATIOS:
        ratios = wall_ratios(runs, slower, faster, "wall_s")
        if ratios:
            middle = statistics.median(ratios)
            stepping = wall_ratios(runs, slower, faster, "stepping_s")
            numbers = (
                f"{middle:.2f} ({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} rounds); "
                f"without the start of TRL's worker {statistics.median(stepping):.2f}"
            )
            found.append(
                Claim(f"arm {slower}'s wall time is within {limit} of arm {faster}'s", middle <= limit, numbers)
            )
    return found


def wall_ratios(runs: Sequence[Run], slower: str, faster: str, clock: str) -> list[float]:
    """One ratio a round: the n-th run of one arm over the n-th of the other, which ran beside it."""
    times = [[getattr(run, clock) for run in runs if run.arm.name == name] for name in (slower, faster)]
    return [a / b for a, b in zip(*times, strict=False)]


_HEAD = (
    "arm | model served | between | loss | steps | wall s | HTTP attempts | failed | rollouts lost "
    "| unscorable / trained tokens | parameters finite after each step "
    "| loss logged / true | kl logged / true | ratio logged / true | gradient error"
)
_SYNC_HEAD = (
    "arm | model served | between | loss | steps | wall s | generations | completions | logprobs read as None "
    "| lists of another length | others off by at most | parameters finite after each step | ended"
)


def table(runs: Sequence[Run]) -> str:
    """Markdown. Of an arm that ran more than once: the first run, and the median of the wall times."""
    first = {run.arm.name: run for run in reversed(runs)}
    walls = {name: statistics.median(run.wall_s for run in runs if run.arm.name == name) for name in first}
    order = [name for name in ARMS if name in first]
    rows = [_row(first[name], walls[name]) for name in order if not first[name].arm.is_sync]
    sync = [_sync_row(first[name], walls[name]) for name in order if first[name].arm.is_sync]
    tables = [_markdown(head, body) for head, body in ((_HEAD, rows), (_SYNC_HEAD, sync)) if body]
    return "\n".join(tables)


def _markdown(head: str, rows: Sequence[Sequence[str]]) -> str:
    columns = head.count("|") + 1
    lines = [f"| {head} |", "|" + "---|" * columns, *("| " + " | ".join(row) + " |" for row in rows)]
    return "\n".join(lines) + "\n"


def _row(run: Run, wall: float) -> list[str]:
    traffic, last = run.traffic, run.steps[-1] if run.steps else None
    failures = ", ".join(f"{count} x {status}" for status, count in traffic.failures.items())
    share = 0.0 if last is None else last.nonfinite / run.trainer.parameters
    return [
        run.arm.name,
        run.arm.engine.value,
        run.arm.between,
        run.arm.loss,
        f"{len(run.steps)} of {run.wanted}" + ("" if run.finished else f" ({run.trainer['ended']})"),
        f"{wall:.1f}",
        str(traffic.attempts),
        failures or "0",
        str(traffic.lost),
        f"{run.unscorable} / {run.trained}",
        "no step taken" if last is None else "yes" if run.finite else f"**no: {share:.0%} NaN**",
        *(_pair(last, name) for name in ("loss", "kl", "ratio")),
        f"{run.gradient_error:.0e}" if not math.isnan(run.gradient_error) else "NaN" if last else "",
    ]


def _sync_row(run: Run, wall: float) -> list[str]:
    parsed = run.trainer.parsed
    return [
        *(run.arm.name, run.arm.engine.value, run.arm.between, run.arm.loss),
        *(f"{len(run.steps)} of {run.wanted}", f"{wall:.1f}", str(parsed.generations), str(parsed.completions)),
        *(str(parsed.none), str(parsed.mismatched), f"{parsed.value_error:.0e}"),
        "no step taken" if not run.steps else "yes" if run.finite else "**no**",
        run.trainer.ended.replace("|", " ")[:120],
    ]


def _pair(step: Step | None, name: str) -> str:
    return "" if step is None else f"{_number(step.logged.get(name))} / {_number(step.true.get(name))}"


def _number(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "none" if value is None else "NaN"
    if value == 0.0:
        return "0"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.2g}" if abs(value) < 0.01 else f"{value:.3f}"


def draw(runs: Sequence[Run], path: Path) -> None:
    """Four panels: parameters, gradients, what the log says of the KL, wall time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    async_runs = {run.arm.name: run for run in reversed(runs) if not run.arm.is_sync and run.steps}
    figure, axes = plt.subplots(2, 2, figsize=(12, 8))
    for name, run in sorted(async_runs.items()):
        label = f"{name}: {run.arm.engine.value}, {run.arm.between}, {run.arm.loss}"
        at = range(1, len(run.steps) + 1)
        share = [100 * step.nonfinite / run.trainer.parameters for step in run.steps]
        axes[0][0].plot(at, share, marker="x" if share[-1] else ".", label=label)
        if name in EXACT:
            axes[0][1].plot(at, [step.gradient_error or 1e-9 for step in run.steps], marker=".", label=label)
        if name in ("4", "5", "8"):
            (line,) = axes[1][0].plot(at, [_drawn(step.logged["kl"]) for step in run.steps], marker="o", label=label)
            axes[1][0].plot(at, [_drawn(step.true["kl"]) for step in run.steps], ":x", color=line.get_color())
    axes[0][0].set(title="Parameters that are NaN", xlabel="step", ylabel="%")
    axes[0][1].axhline(GRADIENT_TOLERANCE, color="0.6", linestyle=":")
    axes[0][1].set(title="Gradient against the reference in float64", xlabel="step", ylabel="error", yscale="log")
    axes[1][0].set(title="kl: logged (o), true (x)", xlabel="step", yscale="symlog")
    for axis in (axes[0][0], axes[0][1], axes[1][0]):
        axis.legend(fontsize=6)
    names = [name for name in ("1", "2", "4", "5", "6") if name in async_runs]
    walls = [[run.wall_s for run in runs if run.arm.name == name] for name in names]
    axes[1][1].bar(names, [statistics.median(wall) for wall in walls], color="tab:blue", alpha=0.7)
    for place, wall in enumerate(walls):
        axes[1][1].plot([place] * len(wall), wall, "k.")
    axes[1][1].set(title="Wall time of the run, each run and the median", xlabel="arm", ylabel="s")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _drawn(value: float | None) -> float:
    return math.nan if value is None or math.isinf(value) else value
