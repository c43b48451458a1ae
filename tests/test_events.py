"""The one-match proof of an event: it proves what vLLM writes, and nothing that the walk would mark."""

import json

import pytest
from fixtures_index import load_fixtures
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy import events
from proxy.api import Api, Asked
from proxy.logprobs import mark
from proxy.sse import Parser
from proxy.unscorable import Rules

STREAMS = [fixture for fixture in load_fixtures() if "stream" in fixture.name]
PYTHON = (
    '{"id":"a","object":"text_completion","created":1,"model":"m","choices":[{"index":2,"text":TEXT,"logprobs":'
    '{"text_offset":[0],"token_logprobs":[VALUE],"tokens":[NAME],"top_logprobs":[{NAME:CANDIDATE}]},'
    '"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":IDS}]}'
)
RUST = (
    '{"id":"a","object":"text_completion","created":1,"model":"m","choices":[{"index":2,"text":TEXT,"logprobs":'
    '{"tokens":[NAME],"token_logprobs":[VALUE],"top_logprobs":[{NAME:CANDIDATE}],"text_offset":[0]},"token_ids":IDS}]}'
)
CHAT = (
    '{"id":"a","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":2,"delta":{"content":TEXT},'
    '"logprobs":{"content":[{"token":NAME,"logprob":VALUE,"bytes":[1],"top_logprobs":['
    '{"token":NAME,"logprob":CANDIDATE,"bytes":null}]}]},"finish_reason":null,"token_ids":IDS}]}'
)
KINDS = [(PYTHON, Api.COMPLETIONS), (RUST, Api.COMPLETIONS), (CHAT, Api.CHAT)]
GOOD = ["-0.5", "-999.9", "-1.1920928955078125e-07", "-1e-7", "0.0", "-0.0", "-3"]
BAD = [
    "null",
    "NaN",
    "-Infinity",
    "-9999.0",
    "-1e4",
    "-1E4",
    "-99999e-1",
    "0.5",
    "1",
    "9999.0",
    "-",
    "",
    "false",
    '"-1"',
]


def event(
    kind: str, value: str = "-0.5", candidate: str = "-0.5", name: str = '"x"', ids: str = "[7]", text='"y"'
) -> bytes:
    for key, new in (("VALUE", value), ("CANDIDATE", candidate), ("NAME", name), ("IDS", ids), ("TEXT", text)):
        kind = kind.replace(key, new)
    return kind.encode()


@pytest.mark.parametrize(("kind", "api"), KINDS, ids=["python", "rust", "chat"])
def test_what_is_usable_is_proved_and_nothing_else(kind: str, api: Api) -> None:
    for value in GOOD:
        assert events.choice_of(event(kind, value), api) == 2
    for value in BAD:
        assert events.choice_of(event(kind, value), api) is None
    for candidate in ("null", "NaN", "Infinity", "-Infinity", "1e999", "1e+3"):
        assert events.choice_of(event(kind, candidate=candidate), api) is None
    assert events.choice_of(event(kind, candidate="-9999.0"), api) == 2
    assert events.choice_of(event(kind, ids="null"), api) == 2
    assert events.choice_of(event(kind, ids="[]"), api) is None
    assert events.choice_of(event(kind, ids="[7,8]"), api) is None
    assert events.choice_of(event(kind, name='"token_id:7"'), api) == 2
    assert events.choice_of(event(kind, name='"token_id:8"'), api) is None
    assert events.choice_of(event(kind)[:-1], api) is None


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.sampled_from(GOOD + BAD),
    st.sampled_from(GOOD + BAD),
    st.text().map(json.dumps) | st.sampled_from(['"token_id:7"', '"token_id:8"', '"\\""', '"]},{"', '"\\\\"', "null"]),
    st.sampled_from(["null", "[7]", "[]", "[7,8]", "[8]"]),
    st.text().map(json.dumps),
)
def test_what_is_proved_the_walk_would_leave_alone(
    kind: tuple[str, Api], value: str, candidate: str, name: str, ids: str, text: str
) -> None:
    layout, api = kind
    data = event(layout, value, candidate, name, ids, text)
    choice = events.choice_of(data, api)
    if choice is not None:
        json.loads(data)
        before: dict[int, int] = {}
        out, findings = mark(data, Asked(api, {}, logprobs=True, stream=True), Rules(), before)
        assert out is data
        assert findings.sampled == 1
        assert before == {choice: 1}


@pytest.mark.parametrize("fixture", STREAMS, ids=lambda fixture: fixture.name)
def test_real_events_are_proved_only_where_the_walk_leaves_them_alone(fixture) -> None:
    api = Api.CHAT if "chat" in fixture.name else Api.COMPLETIONS
    for frame in Parser().feed(fixture.body):
        if frame.data and events.choice_of(frame.data, api) is not None:
            out, findings = mark(frame.data, Asked(api, {}, logprobs=True, stream=True), Rules())
            assert out is frame.data
            assert findings.sampled == 1


def test_most_real_events_of_one_clean_token_are_proved() -> None:
    proved = {
        fixture.name: sum(
            events.choice_of(frame.data, Api.CHAT if "chat" in fixture.name else Api.COMPLETIONS) is not None
            for frame in Parser().feed(fixture.body)
            if frame.data
        )
        for fixture in STREAMS
    }
    assert proved["completions_clean_stream"] == 4
    assert proved["rust_completions_clean_stream"] == 4
    assert proved["chat_clean_stream_include_usage"] == 3
