"""Judging and marking: what the contract's tables and the field cases say, on bytes."""

import json

import pytest
from fixtures_index import Fixture, ids, load_fixtures

from proxy.api import Api, Asked, read_request
from proxy.jsonbody import InvalidJson
from proxy.logprobs import mark
from proxy.rewrite import rewrite_reply
from proxy.unscorable import Encoding, Reason, Rules

PATHS = {api.value for api in Api}
WHOLE = [
    fixture
    for fixture in load_fixtures()
    if fixture.request["path"] in PATHS and fixture.status == 200 and not fixture.streamed
]
ASKED = Asked(Api.COMPLETIONS, {}, logprobs=True)
CHAT = Asked(Api.CHAT, {}, logprobs=True)
MARKS = {"ceiling": "9999.0", "literal": "NaN", "string": '"NaN"', "null": "null"}


def rules_for(fixture: Fixture) -> Rules:
    """raw_logits servers need the setting allow_positive; the fixtures' values over 0 come from them alone."""
    return Rules(allow_positive=any(value > 1e-3 for value in sampled_values(json.loads(fixture.body))))


def sampled_values(reply: object) -> list[float]:
    if isinstance(reply, dict):
        own = [v for v in reply.get("token_logprobs") or [] if v is not None]
        own += [reply["logprob"]] if isinstance(reply.get("logprob"), float) else []
        return own + [v for key, value in reply.items() if key != "token_logprobs" for v in sampled_values(value)]
    return [v for item in reply for v in sampled_values(item)] if isinstance(reply, list) else []


def positions(findings) -> dict[str, list[int]]:
    return {
        str(choice): sorted(at for reason in reasons.values() for at in reason)
        for choice, reasons in findings.marked.items()
    }


def completion(token_logprobs: str, **more: object) -> bytes:
    logprobs = '{"token_logprobs":' + token_logprobs
    for key in ("tokens", "top_logprobs"):
        if key in more:
            logprobs += f',"{key}":' + json.dumps(more[key])
    token_ids = json.dumps(more.get("token_ids"))
    return ('{"choices":[{"index":0,"logprobs":' + logprobs + '},"token_ids":' + token_ids + "}]}").encode()


@pytest.mark.parametrize("fixture", WHOLE, ids=ids(WHOLE))
def test_every_whole_reply_gives_what_its_fixture_expects(fixture: Fixture) -> None:
    asked = read_request(Api(fixture.request["path"]), fixture.request_body)
    out, findings = rewrite_reply(fixture.body, asked.api, rules_for(fixture), lambda: asked)
    assert positions(findings) == fixture.expect.get("bad_positions", {})
    assert findings.sampled == sum(fixture.expect["positions_on_wire"].values())
    if "bad_positions" not in fixture.expect:
        assert out is fixture.body


def test_the_fixtures_hold_clean_and_bad_replies_of_both_servers() -> None:
    bad = {fixture.server for fixture in WHOLE if "bad_positions" in fixture.expect}
    assert len(WHOLE) == 89
    assert bad == {"vllm-0.32", "vllm-0.32-rust"}


@pytest.mark.parametrize(
    ("token", "candidates", "reason"),
    [
        ("NaN", [{"a": -1}], Reason.NAN),
        ("null", [{"a": None}], Reason.NAN),
        ("null", [None], Reason.MISSING),
        ("null", [{}], Reason.MISSING),
        ("null", [], Reason.MISSING),
        ("Infinity", [{"a": -1}], Reason.INFINITE),
        ("-Infinity", [{"a": -1}], Reason.INFINITE),
        ("1e999", [{"a": -1}], Reason.INFINITE),
        ("-1e999", [{"a": -1}], Reason.INFINITE),
        ("-9999.0", [{"a": -1}], Reason.FLOOR),
        ("-9999", [{"a": -1}], Reason.FLOOR),
        ("-1e30", [{"a": -1}], Reason.FLOOR),
        ("-99990e-1", [{"a": -1}], Reason.FLOOR),
        ("0.0011", [{"a": -1}], Reason.POSITIVE),
        ("9999.0", [{"a": -1}], Reason.POSITIVE),
        ('"NaN"', [{"a": -1}], Reason.MALFORMED),
        ("true", [{"a": -1}], Reason.MALFORMED),
        ("false", [{"a": -1}], Reason.MALFORMED),
        ("{}", [{"a": -1}], Reason.MALFORMED),
        ("[-0.5,[]]", [{"a": -1}], Reason.MALFORMED),
        ("-9998.9", [{"a": -1}], None),
        ("0.001", [{"a": -1}], None),
        ("-0.0", [{"a": -1}], None),
        ("0", [{"a": -1}], None),
        ("-1e-7", [{"a": -1}], None),
        ("-9.5E+2", [{"a": -1}], None),
    ],
)
@pytest.mark.parametrize("encoding", list(Encoding))
def test_each_reason_in_each_encoding(token: str, candidates: list, reason: Reason | None, encoding: Encoding) -> None:
    body = completion(f"[-0.5,{token},-0.25]", top_logprobs=[{"x": -0.5}, *candidates, {"y": -0.25}])
    if not candidates:
        body = completion(f"[-0.5,{token},-0.25]")
    out, findings = mark(body, ASKED, Rules(encoding))
    if reason is None:
        assert out is body
        assert findings.unscorable == 0
        return
    assert findings.marked == {0: {reason: [1]}}
    assert f'"token_logprobs":[-0.5,{MARKS[encoding.value]},-0.25]'.encode() in out
    assert json.loads(out)["choices"][0]["logprobs"]["unscorable"] == {reason.value: [1]}


def test_spaces_and_nested_values_change_nothing_else() -> None:
    body = b'{ "choices" : [ { "logprobs" : { "token_logprobs" : [ -0.5 , null ,\n-0.7 ] } } ] , "x":1e2 }'
    out, findings = mark(body, ASKED, Rules())
    assert findings.marked == {0: {Reason.MISSING: [1]}}
    assert out == (
        b'{ "choices" : [ { "logprobs" : { "token_logprobs" : [ -0.5 , 9999.0 ,\n-0.7 ] '
        b',"unscorable":{"missing":[1]}} } ] , "x":1e2 }'
    )


def test_allow_positive_lets_logits_pass_and_nothing_else() -> None:
    body = completion("[3.5,0.72,-9999.0,NaN]")
    _, findings = mark(body, ASKED, Rules(allow_positive=True))
    assert findings.marked == {0: {Reason.FLOOR: [2], Reason.NAN: [3]}}


@pytest.mark.parametrize(
    ("count", "token_ids"),
    [(2, [10, 11, 12]), (4, [10, 11, 12]), (0, [7]), (1, [])],
    ids=["one short", "one too many", "empty", "no ids"],
)
def test_a_list_of_another_length_is_misaligned_and_never_padded_or_cut(count: int, token_ids: list[int]) -> None:
    body = completion(json.dumps([-0.5] * count), token_ids=token_ids)
    out, findings = mark(body, ASKED, Rules())
    due = len(token_ids) or count
    logprobs = json.loads(out)["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [9999.0] * due
    assert logprobs["unscorable"] == {"misaligned": list(range(due))}
    assert findings.sampled == due


@pytest.mark.parametrize(
    ("token_ids", "names", "misaligned"),
    [
        ([5, 6], ["token_id:6", "token_id:5"], True),
        ([5, 6, 2], ["token_id:9", "token_id:5", "token_id:6"], True),
        ([5, 6], ["token_id:5", "token_id:6"], False),
        ([5, 6], ["token_id:9", "b"], False),
        (None, ["a", "b", "c"], True),
        ([5, 6], ["a", "b"], False),
    ],
)
def test_equal_length_proves_nothing_where_names_are_ids(token_ids: list, names: list, misaligned: bool) -> None:
    count = len(token_ids) if token_ids else 2
    body = completion(json.dumps([-0.5] * count), tokens=names, token_ids=token_ids)
    _, findings = mark(body, ASKED, Rules())
    assert (Reason.MISALIGNED in findings.by_reason()) is misaligned


def test_every_choice_is_judged_alone() -> None:
    one = '{"index":%d,"logprobs":{"token_logprobs":%s},"token_ids":[1,2]}'
    body = (
        '{"choices":[' + ",".join([one % (1, "[-1,-1]"), one % (0, "[null,-1]"), one % (2, "[-1]")]) + "]}"
    ).encode()
    out, findings = mark(body, ASKED, Rules())
    assert findings.marked == {0: {Reason.MISSING: [0]}, 2: {Reason.MISALIGNED: [0, 1]}}
    assert [c["logprobs"]["token_logprobs"] for c in json.loads(out)["choices"]] == [
        [-1, -1],
        [9999.0, -1],
        [9999.0, 9999.0],
    ]


@pytest.mark.parametrize("gone", ['"logprobs":null,', "", '"logprobs":{},'], ids=["null", "absent", "empty"])
def test_logprobs_asked_for_and_gone_are_marked_at_every_token_id(gone: str) -> None:
    body = ('{"choices":[{"index":0,' + gone + '"token_ids":[10,11]}]}').encode()
    out, findings = mark(body, ASKED, Rules())
    logprobs = json.loads(out)["choices"][0]["logprobs"]
    assert logprobs == {
        "token_logprobs": [9999.0, 9999.0],
        "tokens": ["token_id:10", "token_id:11"],
        "unscorable": {"missing": [0, 1]},
    }
    assert findings.sampled == 2
    assert mark(body, Asked(Api.COMPLETIONS, {}), Rules())[0] is body


def test_logprobs_gone_without_ids_pass_and_are_counted() -> None:
    body = b'{"choices":[{"index":0,"logprobs":null,"token_ids":null}]}'
    out, findings = mark(body, ASKED, Rules())
    assert out is body
    assert findings.unmarkable == 1


def test_a_list_that_is_null_is_missing() -> None:
    body = completion("null", token_ids=[1, 2])
    out, findings = mark(body, ASKED, Rules())
    assert json.loads(out)["choices"][0]["logprobs"]["token_logprobs"] == [9999.0, 9999.0]
    assert findings.marked == {0: {Reason.MISSING: [0, 1]}}


def test_an_abort_chunk_with_empty_lists_is_legal() -> None:
    body = b'{"choices":[{"finish_reason":"abort","token_ids":[],"logprobs":{"token_logprobs":[],"tokens":[]}}]}'
    out, findings = mark(body, ASKED, Rules())
    assert out is body
    assert findings.sampled == 0


def test_echo_forgives_the_first_prompt_token_alone() -> None:
    echo = Asked(Api.COMPLETIONS, {"echo": True}, logprobs=True, echo=True)
    body = completion("[null,-1.0,null,-2.0]", top_logprobs=[None, {"a": -1.0}, None, {"b": -2.0}], token_ids=[7])
    assert mark(body, echo, Rules())[1].marked == {0: {Reason.MISSING: [2]}}
    assert mark(body.replace(b'"token_ids":[7]', b'"x":1'), ASKED, Rules())[1].marked == {0: {Reason.MISSING: [0, 2]}}
    poisoned = body.replace(b"[null, {", b'[{"z":null}, {')
    assert mark(poisoned, echo, Rules())[1].marked == {0: {Reason.NAN: [0], Reason.MISSING: [2]}}


@pytest.mark.parametrize(
    ("encoding", "written"), [("ceiling", "null"), ("literal", "NaN"), ("string", '"NaN"'), ("null", "null")]
)
def test_candidates_that_are_no_numbers_are_encoded_and_not_counted(encoding: str, written: str) -> None:
    candidates = b'[{"a":-0.5,"b":NaN,"c":-Infinity,"d":null}]'
    body = b'{"choices":[{"logprobs":{"token_logprobs":[-0.5],"top_logprobs":' + candidates + b"}}]}"
    out, findings = mark(body, ASKED, Rules(Encoding(encoding)))
    assert f'"a":-0.5,"b":{written},"c":{written},"d":{written}'.encode() in out
    assert findings.unscorable == 0
    assert b"unscorable" not in out


def test_the_floor_at_a_candidate_is_a_legal_number() -> None:
    body = completion("[-0.5]", top_logprobs=[{"a": -0.5, "b": -9999.0}])
    assert mark(body, ASKED, Rules(Encoding.LITERAL))[0] is body


def test_prompt_logprobs_stay_as_they_came() -> None:
    body = b'{"choices":[{"logprobs":{"token_logprobs":[NaN]},"prompt_logprobs":[null,{"3":{"logprob":NaN}}]}]}'
    out, _ = mark(body, ASKED, Rules())
    assert b'"prompt_logprobs":[null,{"3":{"logprob":NaN}}]' in out


def test_chat_null_is_nan_and_an_absent_key_is_missing() -> None:
    body = (
        b'{"choices":[{"logprobs":{"content":[{"token":"a","logprob":null,"top_logprobs":[{"token":"a","logprob":null}]},'
        b'{"token":"b","top_logprobs":[]},{"token":"c","logprob":-0.5}]}}]}'
    )
    out, findings = mark(body, CHAT, Rules(Encoding.STRING))
    assert findings.marked == {0: {Reason.NAN: [0], Reason.MISSING: [1]}}
    content = json.loads(out)["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == ["NaN", "NaN", -0.5]
    assert content[0]["top_logprobs"][0]["logprob"] == "NaN"


@pytest.mark.parametrize("count", [1, 3])
def test_chat_lists_of_another_length_get_one_marked_entry_a_token(count: int) -> None:
    content = ",".join(['{"token":"a","logprob":-0.5,"bytes":[97],"top_logprobs":[]}'] * count)
    body = ('{"choices":[{"logprobs":{"content":[' + content + ']},"token_ids":[8,9]}]}').encode()
    out, findings = mark(body, CHAT, Rules())
    logprobs = json.loads(out)["choices"][0]["logprobs"]
    assert [entry["logprob"] for entry in logprobs["content"]] == [9999.0, 9999.0]
    assert logprobs["unscorable"] == {"misaligned": [0, 1]}
    assert findings.sampled == 2


def test_generate_entries_that_name_other_ids_are_misaligned() -> None:
    asked = Asked(Api.GENERATE, {}, logprobs=True)
    content = b'[{"token_id":6,"logprob":-1},{"token_id":5,"logprob":-1}]'
    body = b'{"choices":[{"token_ids":[5,6],"logprobs":{"content":' + content + b"}}]}"
    assert mark(body, asked, Rules())[1].marked == {0: {Reason.MISALIGNED: [0, 1]}}


def test_a_sidecar_in_front_of_a_sidecar_has_one_unscorable_key() -> None:
    first, _ = mark(completion("[-0.5,NaN]"), ASKED, Rules())
    second, findings = mark(first, ASKED, Rules(Encoding.LITERAL))
    assert second.count(b'"unscorable"') == 1
    assert findings.by_reason() == {Reason.POSITIVE: 1}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"<html>",
        b'{"choices":[',
        b'{"choices":[{"logprobs":{"token_logprobs":[-0.5,',
        b'{"choices":[{"logprobs":{"token_logprobs":[-0.5,]}}]}',
        b'{"choices":[{"logprobs":{"token_logprobs":[-0.5 -0.6]}}]}',
        b'{"choices":[{"logprobs":{"token_logprobs":[-0.5,nope]}}]}',
        b'{"choices":[]} trailing',
        b'{"choices" []}',
    ],
)
def test_broken_json_is_an_error(body: bytes) -> None:
    with pytest.raises(InvalidJson):
        mark(body, ASKED, Rules())
