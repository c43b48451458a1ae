"""Makes TRL's own client push weights to given servers: python trl_weight_sync_cases.py JOB ANSWER.

Runs in TRL's environment. JOB holds `urls`; ANSWER gets, for each, what every call returned or raised, in TRL's order.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

from weight_sync import NCCL_GROUP, WEIGHTS


def outcome(call: Callable[[], Any]) -> str:
    try:
        return str(call())
    except KeyError as error:  # of the Rust front end's /server_info, which has another shape
        return f"KeyError: {error}"
    except Exception as error:
        if type(error) is not Exception:  # TRL raises the bare class for a status that is not 200
            raise
        return str(error)


def push(url: str) -> list[tuple[str, str]]:
    from trl.experimental.async_grpo.vllm_client import VLLMClient

    client = VLLMClient(url, server_timeout=60)
    client.wait_for_server_ready()
    calls: dict[str, Callable[[], Any]] = {
        "get_max_model_len": client.get_max_model_len,
        "get_dtype": client.get_dtype,
        "get_world_size": client.get_world_size,
        "init_weight_transfer_engine": lambda: client.init_weight_transfer_engine(NCCL_GROUP, timeout=60),
        "pause": lambda: client.pause(timeout=60),
        "start_weight_update": lambda: client.start_weight_update(timeout=60),
        "update_weights": lambda: client.update_weights(WEIGHTS, timeout=60),
        "finish_weight_update": lambda: client.finish_weight_update(timeout=60),
        "resume": lambda: client.resume(timeout=60),
    }
    return [(name, outcome(call)) for name, call in calls.items()]


if __name__ == "__main__":
    with open(sys.argv[1]) as question:
        urls = json.load(question)["urls"]
    from accelerate import PartialState

    PartialState()  # TRL's logger refuses to speak before it exists
    with open(sys.argv[2], "w") as answer:
        json.dump([push(url) for url in urls], answer)
