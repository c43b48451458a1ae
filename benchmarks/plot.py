"""Throughput and latency against reply size and concurrency, as PNG."""

import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

_STYLES = {
    "upstream": ("0.6", ":"), "nginx": ("tab:green", "-"), "vllm-router": ("tab:orange", "-"),
    "sidecar": ("tab:blue", "-"), "rllm-gateway": ("tab:red", "--"), "fastapi-httpx": ("tab:purple", "--"),
}  # fmt: skip


def draw(results: dict[str, Any], path: Path) -> None:
    """Four panels; medians with the range over the rounds."""
    clean, latency = results["clean"], results["latency"]
    sizes = list(clean)
    single = [key for key in latency if key.endswith("/1")]
    many = sorted((key for key in latency if key.startswith("1024/")), key=lambda key: int(key.partition("/")[2]))
    figure, axes = plt.subplots(2, 2, figsize=(11, 8))
    _panel(axes[0][0], clean, sizes, [int(size) for size in sizes], "rate")
    axes[0][0].set(title="32 connections", xlabel="sampled tokens a reply", ylabel="requests/s")
    _panel(axes[0][1], latency, many, [int(key.partition("/")[2]) for key in many], "rate")
    axes[0][1].set(title="1,024 tokens a reply", xlabel="connections", ylabel="requests/s")
    _panel(axes[1][0], latency, single, [int(key.partition("/")[0]) for key in single], "p50")
    axes[1][0].set(title="1 connection", xlabel="sampled tokens a reply", ylabel="median latency, ms")
    _panel(axes[1][1], latency, many, [int(key.partition("/")[2]) for key in many], "p50")
    axes[1][1].set(title="1,024 tokens a reply", xlabel="connections", ylabel="median latency, ms")
    figure.suptitle("One core for the proxy, one for load and upstream")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _panel(axis: Any, measured: dict[str, Any], keys: list[str], places: list[int], field: str) -> None:
    for name, (colour, line) in _STYLES.items():
        if name not in measured[keys[0]]:
            continue
        rows = [measured[key][name][field] for key in keys]
        middles = [statistics.median(row) for row in rows]
        bars = [
            [m - min(r) for m, r in zip(middles, rows, strict=True)],
            [max(r) - m for m, r in zip(middles, rows, strict=True)],
        ]
        axis.errorbar(
            places, middles, yerr=bars, label=name, color=colour, linestyle=line, marker="o", markersize=4, capsize=3
        )
    axis.set(xscale="log", yscale="log")
    axis.set_xticks(places, [f"{place:,}" for place in places])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
