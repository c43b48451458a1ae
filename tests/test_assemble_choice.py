"""Runs of unscorable tokens at the end of the choices, by which a runaway is told."""

from typing import Any

import pytest
from reassembly import PLAIN, chunk, entries, folded, tokens

from proxy.api import Api

NAN_TAIL = [
    ([None, None, None], 3),
    ([-0.5, None], 1),
    ([None, -0.5], 0),
    ([None, -9999.0, float("nan"), float("inf"), "x", True, {}, -1e30], 8),
    ([-9998.9], 0),
    ([0.2], 0),
    ([], 0),
]


@pytest.mark.parametrize(("logprobs", "tail"), NAN_TAIL)
@pytest.mark.parametrize("tokens_of", [tokens, entries])
def test_a_run_of_unscorable_tokens_counts_across_chunks(tokens_of: Any, logprobs: list[Any], tail: int) -> None:
    api = Api.COMPLETIONS if tokens_of is tokens else Api.CHAT
    request = {"prompt": [1], "logprobs": 0} if tokens_of is tokens else {"logprobs": True}
    assembly = folded(api, request, tokens_of(-0.5), *(tokens_of(logprob) for logprob in logprobs), tokens_of())
    assert [assembly.runaway(limit) for limit in (tail, tail + 1)] == [tail > 0, False]
    at_once = folded(api, request, tokens_of(-0.5, *logprobs))
    assert [at_once.runaway(limit) for limit in (tail, tail + 1)] == [tail > 0, False]


@pytest.mark.parametrize(
    ("data", "runaway"),
    [
        ([entries("absent", "absent")], True),
        ([entries(None, finish_reason="stop"), entries(None, None, index=1)], True),
        ([entries(None, None)], False),
        ([entries(None, None), entries(None, index=1)], False),
        ([entries(None, None), entries(None, None, index=1)], True),
        ([entries(None, None, finish_reason="stop"), entries(None, None, finish_reason="stop", index=1)], False),
    ],
    ids=["absent", "other-finished", "other-unseen", "other-shorter", "both", "none-open"],
)
def test_a_runaway_needs_every_open_choice(data: list[bytes], runaway: bool) -> None:
    one = len(data) == 1 and b"absent" in data[0] or b'"logprob"' not in data[0]
    assembly = folded(Api.CHAT, {"logprobs": True, "n": 1 if one else 2}, *data)
    assert assembly.runaway(2) is runaway
    assert assembly.runaway(0) is False


def test_tokens_without_logprobs_are_unscorable_where_logprobs_were_asked_for() -> None:
    lost = chunk(logprobs=None, token_ids=[5, 6])
    assert folded(Api.COMPLETIONS, PLAIN, lost).runaway(2)
    assert not folded(Api.COMPLETIONS, {"prompt": [1]}, lost).runaway(1)


@pytest.mark.parametrize(("ids", "tail"), [(None, 1), ([5, 6], 2), ([], 0)])
def test_an_echoed_prompt_is_no_runaway(ids: list[int] | None, tail: int) -> None:
    first = tokens(*[None] * 8, token_ids=ids)
    assembly = folded(Api.COMPLETIONS, PLAIN | {"echo": True}, first)
    assert [assembly.runaway(limit) for limit in (tail, tail + 1)] == [tail > 0, False]
