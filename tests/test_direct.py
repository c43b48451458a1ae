"""Marking without a walk gives what the walk gives, or leaves the reply to it."""

import json

import orjson
import pytest
from fixtures_index import load_fixtures
from hypothesis import given, settings
from hypothesis import strategies as st
from test_wire_property import replies

from proxy import direct
from proxy.api import Api, Asked
from proxy.logprobs import mark
from proxy.unscorable import Encoding, Reason, Rules

ASKED = Asked(Api.COMPLETIONS, {}, logprobs=True)
VALUES = ["-0.5", "-1e-07", "0.0", "-12.25", "0", "-9998.5", "0.001", "null", "-9999.0", "-1e30", "0.5", "9999.0"]
ODD = ["NaN", "-Infinity", "true", "false", '"NaN"', "[]", "{}", "1e999", "", "-", " -0.5", "null "]
names = st.text(max_size=4).map(lambda text: json.dumps(text)[1:-1]) | st.sampled_from(
    ["token_id:7", "null", '\\"],', "]},", '],\\"token_logprobs\\":[', "},{"]
)


@st.composite
def as_vllm_writes(draw) -> bytes:
    """Either server's layout, one to three choices, ids there or not, the lists now and then of unequal length."""
    rust = draw(st.booleans())
    value = st.sampled_from(VALUES if draw(st.integers(0, 3)) else VALUES + ODD)
    choices = []
    for index in range(draw(st.integers(1, 3))):
        values = draw(st.lists(value, max_size=6))
        tokens = draw(st.lists(names, min_size=len(values), max_size=len(values) + (not draw(st.integers(0, 5)))))
        count = len(values) + (not draw(st.integers(0, 5)))
        ids = "null" if draw(st.booleans()) else f"[{','.join(['7'] * count)}]"
        keys = draw(st.sampled_from([tokens, ["null"] * len(tokens)]))
        pairs = zip(keys, values, strict=False)
        top = [draw(st.sampled_from([f'{{"{k}":{v}}}', f'{{"{k}":-1.0}}', "null", "{}"])) for k, v in pairs]
        quoted = ",".join(f'"{token}"' for token in tokens)
        lists = {
            "text_offset": ",".join(["0"] * len(values)),
            "token_logprobs": ",".join(values),
            "tokens": quoted,
            "top_logprobs": ",".join(top),
        }
        order = ["tokens", "token_logprobs", "top_logprobs", "text_offset"] if rust else list(lists)
        inside = ",".join(f'"{name}":[{lists[name]}]' for name in order)
        choices.append(
            f'{{"index":{index},"text":"","logprobs":{{{inside}}},"finish_reason":"length","token_ids":{ids}}}'
        )
    return f'{{"id":"x","choices":[{",".join(choices)}],"usage":null}}'.encode()


@settings(max_examples=500, deadline=None)
@given(as_vllm_writes() | replies().map(lambda reply: reply[0]), st.sampled_from(list(Encoding)), st.booleans())
def test_direct_and_walk_agree(body: bytes, encoding: Encoding, positive: bool) -> None:
    rules = Rules(encoding, positive)
    marked = direct.mark(body, ASKED, rules)
    if marked is not None:
        out, findings = mark(body, ASKED, rules)
        assert marked == (out, findings)
        assert (marked[0] is body) is (out is body)


@pytest.mark.parametrize("rust", [False, True])
@pytest.mark.parametrize(("bad", "reason"), [("-9999.0", Reason.FLOOR), ("null", Reason.NAN), ("0.5", Reason.POSITIVE)])
def test_what_is_common_is_marked_without_a_walk(rust: bool, bad: str, reason: Reason) -> None:
    order = ["tokens", "token_logprobs", "top_logprobs", "text_offset"] if rust else None
    values = ["-0.5"] * 700
    values[350] = bad
    lists = {
        "text_offset": "[" + ",".join(["0"] * 700) + "]",
        "token_logprobs": "[" + ",".join(values) + "]",
        "tokens": "[" + ",".join(['"a"'] * 700) + "]",
        "top_logprobs": "[" + ",".join(f'{{"a":{value}}}' for value in values) + "]",
    }
    inside = ",".join(f'"{name}":{lists[name]}' for name in order or lists)
    body = f'{{"choices":[{{"index":4,"logprobs":{{{inside}}},"finish_reason":"stop","token_ids":null}}]}}'.encode()
    marked = direct.mark(body, ASKED, Rules())
    assert marked is not None
    assert marked[1].marked == {4: {reason: [350]}}
    assert marked[1].sampled == 700
    logprobs = orjson.loads(marked[0])["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"][349:352] == [-0.5, 9999.0, -0.5]
    assert logprobs["unscorable"] == {reason.value: [350]}


@pytest.mark.parametrize("fixture", load_fixtures(), ids=lambda fixture: fixture.name)
@pytest.mark.parametrize("encoding", list(Encoding))
def test_real_replies_are_marked_alike(fixture, encoding: Encoding) -> None:
    marked = direct.mark(fixture.body, ASKED, Rules(encoding))
    if marked is not None:
        assert marked == mark(fixture.body, ASKED, Rules(encoding))
