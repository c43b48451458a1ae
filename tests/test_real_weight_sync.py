"""Weight updates through the sidecar, to real vLLM servers with rollouts in flight: each call once, no rollout lost.

This CPU build cannot receive weights by NCCL: there the sidecar's answer must be vLLM's own. From a file it can.
"""

import re
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
import trl_env
import vllm_env
import weight_sync
from conftest import Served
from servers import run_sidecar

pytestmark = pytest.mark.real_vllm

PROMPT = [10, 20, 30, 40, 50]
TOKENS = 1000
UNIFORM = -6.2383246421813965  # -ln(512) in float32: what each of the model's 512 tokens gets if all are as likely
ROLLOUTS = 4
ENGINE_COUNTERS = ("vllm:request_success_total", "vllm:prompt_tokens_total", "vllm:generation_tokens_total")


def rollout(url: str, seed: int) -> requests.Response:
    body = {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "temperature": 1.0,
        "seed": seed,
        "n": 1,
        "logprobs": 0,
        "return_token_ids": True,
    }
    return requests.post(f"{url}/v1/completions", json=body, timeout=240)


def wait_until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)  # a server's counters are no event to wait for


@contextmanager
def in_flight(served: Served) -> Iterator[list[Future[requests.Response]]]:
    """Rollouts that vLLM has begun; they are whole, and have been asked of vLLM once each, when the block is over."""
    with ThreadPoolExecutor(ROLLOUTS) as pool:
        for _ in range(3):  # a machine may stand still so long that a rollout is over before it is seen to begin
            before = weight_sync.read(served.vllm)
            started = [pool.submit(rollout, served.sidecar, seed) for seed in range(ROLLOUTS)]

            def all_begun(before: dict[str, float] = before) -> bool:
                name = "vllm:prompt_tokens_total"
                now = weight_sync.total(weight_sync.read(served.vllm), name)
                return now - weight_sync.total(before, name) == ROLLOUTS * len(PROMPT)

            wait_until(all_begun, "vLLM never began all rollouts")
            if not any(future.done() for future in started):
                break
            wait(started)
        yield started
        replies = [future.result() for future in started]
    assert [reply.status_code for reply in replies] == [200] * ROLLOUTS
    choices = [reply.json()["choices"][0] for reply in replies]
    assert [len(choice["token_ids"]) for choice in choices] == [TOKENS] * ROLLOUTS
    assert [len(choice["logprobs"]["token_logprobs"]) for choice in choices] == [TOKENS] * ROLLOUTS
    assert [choice["finish_reason"] for choice in choices] == ["length"] * ROLLOUTS
    after = weight_sync.read(served.vllm)
    gained = {name: weight_sync.total(after, name) - weight_sync.total(before, name) for name in ENGINE_COUNTERS}
    assert gained == dict(zip(ENGINE_COUNTERS, (ROLLOUTS, ROLLOUTS * len(PROMPT), ROLLOUTS * TOKENS), strict=True))


def test_rollouts_freeze_while_weights_are_pushed_and_finish_afterwards(clean: Served) -> None:
    calls = [weight_sync.PAUSE, weight_sync.WORLD_SIZE, *weight_sync.TRANSFER, weight_sync.SERVER_INFO]
    with in_flight(clean) as rollouts:
        asked = weight_sync.requests_by_path(weight_sync.read(clean.vllm))  # a request counts when it is answered
        assert weight_sync.PAUSE.send(clean.sidecar).status_code == 200
        wait_until_still(clean)
        frozen = weight_sync.read(clean.vllm)
        statuses = [call.send(clean.sidecar).status_code for call in calls[1:]]
        now = weight_sync.read(clean.vllm)
        assert not any(future.done() for future in rollouts)
        tokens = [weight_sync.total(metrics, "vllm:generation_tokens_total") for metrics in (frozen, now)]
        assert tokens[0] == tokens[1]
        assert weight_sync.RESUME.send(clean.sidecar).status_code == 200
    assert statuses == [200, 500, 500, 500, 500, 200]
    gained = weight_sync.requests_by_path(weight_sync.read(clean.vllm)) - asked
    once = {call.path: 1 for call in [*calls, weight_sync.RESUME] if call != weight_sync.SERVER_INFO}  # not counted
    assert gained == once | {"/v1/completions": ROLLOUTS}


def wait_until_still(served: Served) -> None:
    """What the engine had computed when it was paused is told to its server a moment later."""
    seen = [-1.0]

    def is_still() -> bool:
        seen.append(weight_sync.total(weight_sync.read(served.vllm), "vllm:generation_tokens_total"))
        return seen[-1] == seen[-2]

    wait_until(is_still, "the engine went on sampling")


def test_a_rollout_that_comes_while_paused_waits_and_is_not_repeated(clean: Served) -> None:
    asked = weight_sync.requests_by_path(weight_sync.read(clean.vllm))
    assert weight_sync.PAUSE.send(clean.sidecar).status_code == 200
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(rollout, clean.sidecar, 99)

        def has_arrived() -> bool:
            return weight_sync.total(weight_sync.read(clean.sidecar), "logprob_sidecar_inflight") == 1

        wait_until(has_arrived, "the rollout never reached the sidecar")
        assert weight_sync.WORLD_SIZE.send(clean.sidecar).json() == {"world_size": 1}
        assert not late.done()
        assert weight_sync.RESUME.send(clean.sidecar).status_code == 200
        assert len(late.result().json()["choices"][0]["token_ids"]) == TOKENS
    gained = weight_sync.requests_by_path(weight_sync.read(clean.vllm)) - asked
    assert gained["/v1/completions"] == gained["/pause"] == gained["/resume"] == 1


def test_every_answer_is_vllms_own(clean: Served) -> None:
    sequence = [weight_sync.WORLD_SIZE, weight_sync.SERVER_INFO, weight_sync.PAUSE, *weight_sync.TRANSFER]
    sequence += [weight_sync.RESUME]
    direct, proxied = ([answer_to(call, url) for call in sequence] for url in (clean.vllm, clean.sidecar))
    assert proxied == direct
    assert [status for status, _, _ in direct] == [200, 200, 200, 500, 500, 500, 500, 200]


def answer_to(call: weight_sync.Call, url: str) -> tuple[int, str, str]:
    reply = call.send(url)
    return reply.status_code, reply.headers["Content-Type"], without_call_id(reply.text)


def without_call_id(text: str) -> str:
    """The Rust front end numbers its calls to the engine, and tells the number in an error."""
    return re.sub(r"call_id=\d+", "call_id=N", text)


@pytest.mark.real_trl
def test_trls_own_client_meets_the_same_through_the_sidecar(clean: Served, tmp_path: Path) -> None:
    with in_flight(clean):
        # TRL takes longer to start than the rollouts to finish: they wait for it.
        assert weight_sync.PAUSE.send(clean.sidecar).status_code == 200
        answers = trl_env.run("trl_weight_sync_cases.py", {"urls": [clean.sidecar, clean.vllm]}, tmp_path)
    proxied, direct = [[[name, without_call_id(result)] for name, result in answer] for answer in answers]
    assert proxied == direct
    ended = {name: result for name, result in direct}
    # TRL 1.16 cannot read the Rust front end's /server_info, with or without the sidecar.
    assert ended["get_dtype"] == {"python": "torch.float32", "rust": "KeyError: 'model_config'"}[clean.front_end]
    assert ended["get_world_size"] == "1"
    assert ended["pause"] == ended["resume"] == "None"
    assert "Weight transfer not configured" in ended["init_weight_transfer_engine"]


FLAT_HEAD = """
import sys
from safetensors.torch import load_file, save_file
weights = load_file(f"{sys.argv[1]}/model.safetensors")
weights["lm_head.weight"].zero_()
save_file(weights, sys.argv[2])
"""


@pytest.fixture
def synced(tmp_path: Path) -> Iterator[Served]:
    """A vLLM that receives weights from a file; those in it make every token as likely as any other."""
    model, weights = vllm_env.ensure_model(poisoned=False), tmp_path / "flat.safetensors"
    subprocess.run([vllm_env.ensure_env(), "-c", FLAT_HEAD, model, weights], check=True)
    flags = ("--weight-transfer-config", '{"backend": "file"}')
    environment = {"WEIGHTS_FILE": str(weights)}
    with vllm_env.run_vllm(model, flags=flags, env=environment, command_file="vllm_file_cli.py") as server:
        with run_sidecar(server.url) as sidecar:
            yield Served("python", server.url, sidecar)


def test_frozen_rollouts_go_on_with_the_weights_that_were_pushed(synced: Served) -> None:
    calls = [weight_sync.PAUSE, *weight_sync.TRANSFER, weight_sync.RESUME]
    with in_flight(synced) as rollouts:
        asked = weight_sync.requests_by_path(weight_sync.read(synced.vllm))
        assert [call.send(synced.sidecar).status_code for call in calls] == [200] * len(calls)
    gained = weight_sync.requests_by_path(weight_sync.read(synced.vllm)) - asked
    assert gained == {call.path: 1 for call in calls} | {"/v1/completions": ROLLOUTS}
    for future in rollouts:
        logprobs = future.result().json()["choices"][0]["logprobs"]["token_logprobs"]
        pushed = [value == UNIFORM for value in logprobs]
        frozen_at = TOKENS - sum(pushed)
        assert 0 < frozen_at < TOKENS
        assert pushed == [False] * frozen_at + [True] * (TOKENS - frozen_at)
