"""Headers, spans, requests, incidents: the small pure modules."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy import jsonbody, jsonspan
from proxy.api import Api, Asked, read_request
from proxy.headers import end_to_end, find, without
from proxy.incidents import Incident, Incidents, describe
from proxy.unscorable import Findings, Reason


def test_hop_by_hop_headers_and_those_connection_names_stay_behind() -> None:
    headers = [
        (b"x-a", b"1"),
        (b"connection", b"close, X-Hop"),
        (b"x-hop", b"2"),
        (b"x-a", b"3"),
        (b"transfer-encoding", b"chunked"),
        (b"te", b"trailers"),
        (b"upgrade", b"h2c"),
        (b"keep-alive", b"timeout=5"),
        (b"proxy-authorization", b"secret"),
        (b"authorization", b"kept"),
    ]
    assert end_to_end(headers) == [(b"x-a", b"1"), (b"x-a", b"3"), (b"authorization", b"kept")]
    assert find(headers, b"x-a") == b"1"
    assert find(headers, b"nope") is None
    assert without(headers[:2], b"x-a") == [(b"connection", b"close, X-Hop")]


values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.floats(allow_nan=False), st.text(max_size=9)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=4)),
    max_leaves=12,
)


@given(values, st.sampled_from([None, 1, 2]))
def test_skip_finds_the_end_of_any_value(value: object, indent: int | None) -> None:
    raw = json.dumps(value, indent=indent).encode()
    assert jsonspan.skip(raw + b" , 7", 0) == len(raw)


@given(st.dictionaries(st.text(max_size=5), values, max_size=5), st.booleans())
def test_members_are_those_of_the_object(value: dict, ascii_only: bool) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    found = {key.decode("utf-8", "surrogatepass"): json.loads(raw[a:b]) for key, (a, b) in jsonspan.members(raw, 0)}
    assert found == value


@given(st.lists(values, max_size=6))
def test_elements_are_those_of_the_array(value: list) -> None:
    raw = json.dumps(value).encode()
    tokens, starts = jsonspan.tokens(raw, (0, len(raw)))
    assert [json.loads(token) for token in tokens] == value
    assert [raw[at : at + len(token)] for at, token in zip(starts, tokens, strict=True)] == tokens


def test_deep_nesting_is_walked() -> None:
    raw = b"[" * 500 + b'"]"' + b"]" * 500
    assert jsonspan.skip(raw + b"]", 0) == len(raw)
    with pytest.raises(jsonbody.InvalidJson, match="does not end"):
        jsonspan.skip(raw[:-1], 0)


def test_lenient_reading_and_strict_writing() -> None:
    assert jsonbody.loads(b'[1e999, "\\ud800"]') == [float("inf"), "\ud800"]
    with pytest.raises(jsonbody.InvalidJson):
        jsonbody.loads(b"{")
    assert jsonbody.dumps({"a": 2**70, "b": "\ud800"}) == b'{"a":1180591620717411303424,"b":"\\ud800"}'


@pytest.mark.parametrize(
    ("api", "body", "asked"),
    [
        (Api.COMPLETIONS, {"logprobs": 0}, (Api.COMPLETIONS, True, False, False)),
        (Api.COMPLETIONS, {"logprobs": None, "echo": True}, (Api.COMPLETIONS, False, True, False)),
        (Api.COMPLETIONS, {}, (Api.COMPLETIONS, False, False, False)),
        (Api.CHAT, {"logprobs": True, "stream": True, "echo": True}, (Api.CHAT, True, False, True)),
        (Api.CHAT, {"logprobs": False}, (Api.CHAT, False, False, False)),
        (Api.GENERATE, {"sampling_params": {"logprobs": 0}}, (Api.GENERATE, True, False, False)),
        (Api.GENERATE, {"sampling_params": {}}, (Api.GENERATE, False, False, False)),
        (Api.RESPONSES, {"include": ["message.output_text.logprobs"]}, (Api.RESPONSES, True, False, False)),
        (Api.INVOCATIONS, {"messages": [], "logprobs": True}, (Api.CHAT, True, False, False)),
        (Api.INVOCATIONS, {"prompt": "a", "logprobs": 1}, (Api.COMPLETIONS, True, False, False)),
    ],
)
def test_what_a_request_asks_for(api: Api, body: dict, asked: tuple) -> None:
    read = read_request(api, json.dumps(body).encode())
    assert (read.api, read.logprobs, read.echo, read.stream) == asked


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b"\xff"])
def test_a_request_that_is_no_object_is_vllms_to_judge(raw: bytes) -> None:
    assert read_request(Api.COMPLETIONS, raw) == Asked(Api.COMPLETIONS)


def test_incidents_are_bounded_and_newest_first() -> None:
    incidents = Incidents(3)
    for n in range(5):
        incidents.add(Incident(float(n), "/v1/completions", f"id-{n}", "marked", "", {}, {}))
    assert [one["request_id"] for one in incidents.newest()] == ["id-4", "id-3", "id-2"]
    assert incidents.total == 5
    findings = Findings(500, {0: {Reason.NAN: list(range(500))}})
    reasons, positions = describe(findings)
    assert reasons == {"nan": 500}
    assert positions == {0: {"nan": list(range(64))}}
