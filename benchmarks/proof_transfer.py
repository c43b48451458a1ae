"""How the proof's trainer hands its weights to vLLM: not at all, or by TRL's own calls and a file."""

import json
import math
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# The poison is in its rows, and the trainer's are sound: an engine that received it would be healed by the first push.
NEVER_PUSHED = "model.embed_tokens.weight"
_GROUP = {"master_address": "127.0.0.1", "master_port": 51216, "rank_offset": 1, "world_size": 2, "packed": True}
_COMPLETIONS = 16
_PROMPT = [1, 87, 85, 262, 201, 372, 388, 353, 380, 415, 2, 201, 1, 79, 336, 78, 201]


class NoTransfer:
    """The engine keeps serving the initial model."""

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        for _ in iterator:
            pass

    def resume(self) -> None: ...

    def destroy(self) -> None: ...


class FileTransfer:
    """As TRL's WeightTransferClient, with its VLLMClient, but for NCCL: tests/vllm_file_cli.py reads the tensors."""

    def __init__(self, url: str, file: Path) -> None:
        from trl.experimental.async_grpo.vllm_client import VLLMClient

        self._vllm = VLLMClient(url)
        self._file = file

    def init_weight_transfer(self) -> None:
        self._vllm.wait_for_server_ready()
        self._vllm.get_world_size()
        self._vllm.init_weight_transfer_engine(_GROUP)

    def pause(self) -> None:
        self._vllm.pause()

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        from safetensors.torch import save_file

        weights = {name: tensor.contiguous() for name, tensor in iterator if name != NEVER_PUSHED}
        save_file(weights, self._file)
        self._vllm.start_weight_update()
        update = {
            "names": list(weights),
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()],
            "shapes": [list(tensor.shape) for tensor in weights.values()],
        }
        self._vllm.update_weights(update)
        self._vllm.finish_weight_update()

    def resume(self) -> None:
        self._vllm.resume()

    def destroy(self) -> None: ...


def served_error(url: str, model: Any) -> float:
    """How far the engine's logprobs are from those of `model`, float64, over the usable ones of some completions."""
    errors = []
    # At once: alone, each would be given the block of the one before it, and what that block was poisoned with.
    with ThreadPoolExecutor(_COMPLETIONS) as pool:
        choices = list(pool.map(lambda seed: _complete(url, seed), range(_COMPLETIONS)))
    for choice in choices:
        ids = [*_PROMPT, *choice["token_ids"]]
        with torch.no_grad():
            true = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        pairs = enumerate(choice["logprobs"]["token_logprobs"], start=len(_PROMPT))
        errors += [abs(value - true[at - 1, ids[at]].item()) for at, value in pairs if -9999.0 < value <= 1e-3]
    return max(errors, default=math.nan)


def _complete(url: str, seed: int) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": _PROMPT, "max_tokens": 12, "seed": seed, "logprobs": 0, "return_token_ids": True}
    # vLLM keeps the prefixes that it has computed with earlier weights.
    body["cache_salt"] = f"after the last push, {seed}"
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        choice: dict[str, Any] = json.load(reply)["choices"][0]
    return choice
