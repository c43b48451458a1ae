"""The calls with which TRL 1.16 pushes weights to vLLM, in its order, and what a server's counters say was done."""

import re
import urllib.request
from collections import Counter
from dataclasses import dataclass
from typing import Any

import requests

NCCL_GROUP = {"master_address": "127.0.0.1", "master_port": 51216, "rank_offset": 1, "world_size": 2, "packed": True}
WEIGHTS = {"names": ["lm_head.weight"], "dtype_names": ["float32"], "shapes": [[512, 128]]}


@dataclass(frozen=True, slots=True)
class Call:
    method: str
    path: str
    query: str = ""
    body: Any = None

    def send(self, url: str) -> requests.Response:
        # Longer than anything here takes, shorter than the test: a call that hangs must fail as itself.
        return requests.request(self.method, f"{url}{self.path}{self.query}", json=self.body, timeout=120)


SERVER_INFO = Call("GET", "/server_info", "?config_format=json")
WORLD_SIZE = Call("GET", "/get_world_size")
PAUSE = Call("POST", "/pause", "?mode=keep")
RESUME = Call("POST", "/resume")
# A CPU has no NCCL: vLLM answers each of these with an error of its own.
TRANSFER = (
    Call("POST", "/init_weight_transfer_engine", body={"init_info": NCCL_GROUP}),
    Call("POST", "/start_weight_update", body={"is_checkpoint_format": True}),
    Call("POST", "/update_weights", body={"update_info": WEIGHTS}),
    Call("POST", "/finish_weight_update"),
)


def read(url: str) -> dict[str, float]:
    """A server's metrics, by name and sorted labels: vLLM's front ends differ in the order of the latter."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as reply:
        lines = [line for line in reply.read().decode().splitlines() if line and not line.startswith("#")]
    found: dict[str, float] = {}
    for line in lines:
        name, labels, value = re.fullmatch(r"(\w[\w:]*)(?:\{(.*)\})? (\S+)", line).groups()  # type: ignore[union-attr]
        found[f"{name}{{{','.join(sorted(filter(None, (labels or '').split(','))))}}}"] = float(value)
    return found


def total(metrics: dict[str, float], name: str, **labels: str) -> float:
    """The sum over all series of `name` that carry these labels."""
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    series = [key for key in metrics if key.startswith(f"{name}{{") and all(pair in key for pair in wanted)]
    return sum(metrics[key] for key in series)


def requests_by_path(metrics: dict[str, float]) -> Counter[str]:
    """What a vLLM has been asked, either of its front ends."""
    counted: Counter[str] = Counter()
    for key, value in metrics.items():
        if key.startswith("http_requests_total{"):
            path = re.search(r'handler="([^"]*)"', key)
            assert path is not None, key
            counted[path.group(1)] += int(value)
    return counted
