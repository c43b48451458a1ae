"""``python -m trainer_hooks.demo URL``: the smallest training run there is, on rollouts from a sidecar at URL.

The policy is the engine's own logprobs plus one learned offset for each token, so that every ratio starts at 1. Three
trainers see the same tokens: a plain clipped loss on what an engine hands on (null), the same on the sidecar's default
marks, and `policy_loss`. Owns nothing but the show; needs torch alone.
"""

import json
import sys
import urllib.request
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainer_hooks import PolicyLossConfig, StepGuard, decode_logprobs, policy_loss

STEPS = 8
GROUP = 8
VOCABULARY = 512
_CONFIG = PolicyLossConfig()
Loss = Callable[[Tensor, list[Any], Tensor], Tensor]


def rollouts(url: str, step: int, max_tokens: int = 24) -> list[tuple[list[int], list[Any]]]:
    """(token ids, logprobs as JSON has them) of one group of completions."""
    group = []
    for sample in range(GROUP):
        request = {"prompt": [10, 11, 12], "max_tokens": max_tokens, "logprobs": 0, "seed": step * GROUP + sample}
        body = json.dumps(request | {"return_token_ids": True}).encode()
        post = urllib.request.Request(url + "/v1/completions", body, {"content-type": "application/json"})
        with _open(post) as reply:
            choice = json.load(reply)["choices"][0]
        group.append((choice["token_ids"], choice["logprobs"]["token_logprobs"]))
    return group


def stock_loss(new: Tensor, old: list[Any], advantage: Tensor) -> Tensor:
    """What a trainer computes that knows nothing of marks: ratio, clip, minimum, mean."""
    behaviour = torch.tensor([float("nan") if value is None else value for value in old])
    ratio = (new - behaviour).exp()
    return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()


def hooked_loss(new: Tensor, old: list[Any], advantage: Tensor) -> Tensor:
    behaviour = decode_logprobs(old)[None]
    mask = torch.ones_like(behaviour, dtype=torch.bool)
    return policy_loss(new[None], behaviour, advantage[None], mask, _CONFIG).loss


def train(url: str, loss_of: Loss, guarded: bool) -> tuple[int, Tensor]:
    """(step after which a parameter was not finite, or 0; the learned offsets)."""
    offsets = torch.zeros(VOCABULARY, requires_grad=True)
    optimizer = torch.optim.SGD([offsets], lr=0.5)
    guard = StepGuard(optimizer) if guarded else None
    for step in range(1, STEPS + 1):
        group = rollouts(url, step)
        rewards = torch.tensor([sum(token % 2 == 0 for token in ids) / len(ids) for ids, _ in group])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        losses = []
        for (ids, old), advantage in zip(group, advantages, strict=True):
            engine = decode_logprobs(old).nan_to_num(-1.0)  # stands for a forward pass: always a number
            losses.append(loss_of(engine + offsets[torch.tensor(ids)], old, advantage))
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if guard is None or guard.check(loss):
            optimizer.step()
        if not bool(offsets.isfinite().all()):
            return step, offsets
    return 0, offsets


def main() -> None:
    url = sys.argv[1].rstrip("/")
    arms: list[tuple[str, str, Loss, bool]] = [
        ("plain loss, null handed on", url + "/nan/null", stock_loss, False),
        ("plain loss, the sidecar's default", url, stock_loss, False),
        ("policy_loss and StepGuard", url, hooked_loss, True),
    ]
    for name, source, loss, guarded in arms:
        broken_at, offsets = train(source, loss, guarded)
        nans = int((~offsets.isfinite()).sum())
        end = (
            f"{nans} of {VOCABULARY} weights NaN after step {broken_at}" if broken_at else f"{STEPS} steps, all finite"
        )
        print(f"{name}\t{end}", flush=True)


def _open(request: urllib.request.Request) -> Any:
    # Proxies of the environment would not reach a port of this machine.
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request)


if __name__ == "__main__":
    main()
