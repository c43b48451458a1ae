"""The fixed batch of the proof: four rollouts that a real vLLM sampled, some of their tokens unscorable.

The arms' gradients on it are compared with the reference. Standard library only.
"""

import json
import math
import urllib.request
from typing import Any

# What the tiny model's tokenizer makes of the proof's first four prompts.
_PROMPTS = (
    [1, 87, 85, 262, 201, 372, 388, 353, 380, 415, 2, 201, 1, 79, 336, 78, 201],
    [1, 87, 85, 262, 201, 371, 413, 358, 383, 291, 411, 2, 201, 1, 79, 336, 78, 201],
    [1, 87, 85, 262, 201, 277, 262, 71, 353, 357, 418, 2, 201, 1, 79, 336, 78, 201],
    [1, 87, 85, 262, 201, 49, 285, 389, 378, 276, 223, 285, 90, 86, 2, 201, 1, 79, 336, 78, 201],
)
_ADVANTAGES = (1.0, -1.0, 0.5, -0.5)
_TOKENS = 24
_TRIES = 200


def take(sidecar: str) -> list[dict[str, Any]]:
    """Four samples, `old` None where the logprob is unscorable; `sidecar` is one that writes `literal`.

    A poisoned token is made likely, but not at once: each rollout is to hold tokens of both kinds.
    """
    batch: list[dict[str, Any]] = []
    for seed in range(_TRIES):
        prompt = _PROMPTS[len(batch)]
        choice = _complete(sidecar, prompt, seed)
        values = [None if math.isnan(value) else value for value in choice["logprobs"]["token_logprobs"]]
        if 2 <= values.count(None) <= len(values) - 2:
            ids = [*prompt, *choice["token_ids"]]
            mask = [0] * len(prompt) + [1] * len(values)
            old = [0.0] * len(prompt) + values
            batch.append({"ids": ids, "mask": mask, "old": old, "advantage": _ADVANTAGES[len(batch)]})
        if len(batch) == len(_PROMPTS):
            return batch
    raise RuntimeError(f"{_TRIES} rollouts brought {len(batch)} with both usable and unscorable logprobs")


def _complete(url: str, prompt: list[int], seed: int) -> dict[str, Any]:
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": _TOKENS,
        "temperature": 1.0,
        "seed": seed,
        "logprobs": 0,
        "return_token_ids": True,
        "logit_bias": {"300": 3},  # the logprobs are the model's own: vLLM reports them as they were before the bias
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        choice: dict[str, Any] = json.load(reply)["choices"][0]
    return choice
