"""What the runs of the proof say: the claims, checked; the table; the plot. Starts nothing."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from proof_arms import ARMS, Run
from proof_records import Parsed, Step

SURVIVE = ("2", "4", "5", "6", "9a", "9b", "10b", "12")
CORRUPT = ("7", "8", "10a")
EXACT = ("4", "5", "6", "9a", "9b", "10b", "12")
TRUE_LOG = ("5", "6", "9b", "10b", "12")
GRADIENT_TOLERANCE = 1e-5  # float32 beside float64: about 5e-7
LOG_TOLERANCE = 1e-4
VALUE_TOLERANCE = 1e-4  # of a logprob: about 5e-7
RATIOS = (("2", "1", 1.1), ("4", "2", 1.3))


@dataclass(frozen=True, slots=True)
class Claim:
    text: str
    holds: bool
    numbers: str


def claims(runs: Sequence[Run]) -> list[Claim]:
    """All that the arms that were run must show."""
    return [*(check(run) for run in runs for names, check in _CHECKS if run.arm.name in names), *ratio_claims(runs)]


def _survives(run: Run) -> Claim:
    numbers = f"{len(run.steps)} of {run.wanted} steps ({run.trainer.ended}), {run.traffic.lost} lost"
    held = run.finished and run.finite and run.traffic.lost == run.traffic.failed == 0
    return Claim(f"arm {run.arm.name} finishes, all parameters finite, no rollout lost", held, numbers)


def _is_exact(run: Run) -> Claim:
    numbers = f"off by {run.gradient_error:.1e}, {run.unscorable} of {run.trained} tokens unscorable"
    held = run.gradient_error <= GRADIENT_TOLERANCE and run.unscorable > 0
    return Claim(f"arm {run.arm.name}'s gradients are the reference's", held, numbers)


def _tells_the_truth(run: Run) -> Claim:
    off = max((_off(step.logged.get(name), true) for step in run.steps for name, true in step.true.items()), default=0)
    return Claim(f"arm {run.arm.name} logs the true loss, kl and ratio", off <= LOG_TOLERANCE, f"off by {off:.1e}")


def _off(logged: float | None, true: float) -> float:
    if logged is None or math.isnan(true):  # TRL's log leaves out what no token gives evidence of
        return 0.0 if logged is None and math.isnan(true) else math.inf
    return abs(logged - true) / max(1.0, abs(true))


def _corrupts(run: Run) -> Claim:
    logged = [step.logged["loss"] for step in run.steps]
    held = run.corrupt and run.traffic.failed == 0 and logged[-1] == 0.0
    return Claim(f"arm {run.arm.name} turns every parameter to NaN and logs a loss of 0", held, f"logged {logged}")


def _loses_rollouts(run: Run) -> Claim:
    numbers = f"{run.traffic.failed} of {run.traffic.attempts} attempts failed, {run.traffic.lost} rollouts lost"
    return Claim(f"arm {run.arm.name} loses rollouts", run.traffic.lost > 0 and not run.finished, numbers)


def _trips(run: Run) -> Claim:
    numbers = f"failures {run.traffic.failures}, /health {run.health} at the end"
    return Claim(f"arm {run.arm.name}'s breaker trips", run.traffic.failures.keys() == {"503"}, numbers)


def _parses(run: Run) -> Claim:
    parsed = run.trainer.parsed or Parsed()
    numbers = f"{parsed.none} read as None, others off by {parsed.value_error:.1e}"
    held = run.finished and run.finite and parsed.none > 0 and parsed.mismatched == 0
    held = held and parsed.value_error <= VALUE_TOLERANCE
    return Claim(f"arm {run.arm.name} finishes, NaN is read as None and all else as it was sampled", held, numbers)


def _is_served(run: Run) -> Claim:
    off = math.nan if run.trainer.served_error is None else run.trainer.served_error
    text = f"after arm {run.arm.name}'s last step vLLM serves the trained weights, pushed through the sidecar"
    return Claim(text, off <= VALUE_TOLERANCE, f"logprobs off by {off:.1e}")


def _dies(run: Run) -> Claim:
    return Claim(f"arm {run.arm.name} ends before its first step", not run.steps, run.trainer.ended)


_CHECKS = (
    (SURVIVE, _survives),
    (EXACT, _is_exact),
    (TRUE_LOG, _tells_the_truth),
    (CORRUPT, _corrupts),
    (("3",), _loses_rollouts),
    (("11",), _trips),
    (("12",), _is_served),
    (("s1",), _dies),
    (("s2", "s3"), _parses),
)


def ratio_claims(runs: Sequence[Run]) -> list[Claim]:
    """The median over the rounds; nothing where an arm of a pair was not run."""
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
    "arm | model served | between | loss | steps | wall, s | HTTP attempts | failed | rollouts lost "
    "| unscorable / trained tokens | parameters finite after each step "
    "| loss: logged / true | kl: logged / true | ratio: logged / true | gradient off by"
)
_SYNC_HEAD = (
    "arm | model served | between | loss | steps | wall, s | requests | completions | logprobs read as None "
    "| lists of another length | other logprobs off by | parameters finite after each step | ended"
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
        f"{len(run.steps)} of {run.wanted}" + ("" if run.finished else f" ({run.trainer.ended})"),
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
    parsed = run.trainer.parsed or Parsed()
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

    async_runs = {run.arm.name: run for run in reversed(runs) if run.finished and not run.arm.is_sync}
    figure, axes = plt.subplots(2, 2, figsize=(12, 8))
    for name, run in sorted(async_runs.items()):
        label = f"{name}: {run.arm.engine.value}, {run.arm.between}, {run.arm.loss}"
        at = range(1, len(run.steps) + 1)
        share = [100 * step.nonfinite / run.trainer.parameters for step in run.steps]
        axes[0][0].plot(at, share, marker="x" if share[-1] else ".", label=label)
        if name in EXACT:
            axes[0][1].plot(at, [step.gradient_error or 1e-9 for step in run.steps], marker=".", label=label)
        if name in ("4", "5", "8", "9a"):
            (line,) = axes[1][0].plot(at, [_drawn(step.logged["kl"]) for step in run.steps], marker="o", label=label)
            axes[1][0].plot(at, [_drawn(step.true["kl"]) for step in run.steps], ":x", color=line.get_color())
    axes[0][0].set(title="Parameters that are NaN", xlabel="step", ylabel="%")
    axes[0][1].axhline(GRADIENT_TOLERANCE, color="0.6", linestyle=":")
    axes[0][1].set(title="Gradient against the reference in float64", xlabel="step", ylabel="error", yscale="log")
    axes[1][0].set(title="kl: logged (o), true (x)", xlabel="step", yscale="symlog")
    for axis in (axes[0][0], axes[0][1], axes[1][0]):
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=6)
    names = [name for name in ("1", "2", "4", "5", "6") if name in async_runs]
    walls = [[run.wall_s for run in runs if run.arm.name == name] for name in names]
    axes[1][1].bar(names, [statistics.median(wall) for wall in walls], color="tab:blue", alpha=0.7)
    for place, wall in enumerate(walls):
        axes[1][1].plot([place] * len(wall), wall, "k.")
    axes[1][1].set(title="Wall time of the run, each run and the median", xlabel="arm", ylabel="s")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _drawn(value: float | None) -> float:
    return math.nan if value is None or math.isinf(value) else value
