"""A stream folds into the reply vLLM would have written unstreamed, and into none at all when something is missing."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from fixtures_index import Fixture, ids, load_fixtures
from generated_streams import HEAD, USAGE, Streamed, chats, completions
from hypothesis import given
from hypothesis import strategies as st
from reassembly import NOT_CARRIED, PLAIN, chunk, delta, differences, fold, folded, tokens

from proxy.api import Api
from proxy.assemble import Assembly, AssemblyError, stream_request

FIXTURES = {fixture.name: fixture for fixture in load_fixtures()}
IDS = ("choices[].token_ids", "choices[].prompt_token_ids")
NO_USAGE = ("usage.completion_tokens_details",)  # the request did not ask for usage: it is counted

STREAMS = [
    fixture
    for fixture in FIXTURES.values()
    if fixture.streamed and fixture.request["path"] in (Api.COMPLETIONS, Api.CHAT)
]
BROKEN = {
    "completions_stream_echo_n2_race_error_event": "the stream ended in an error: 10",
    "engine_dead_completions_stream_error_event": "the stream ended in an error: EngineCore encountered an issue",
    "rust_completions_abort_partial_stream_error_event": "the stream ended in an error: completion stream requested",
    "rust_completions_clean_stream_echo": "leaves out the prompt that echo asked for",
    "rust_engine_dead_chat_stream": "the stream ended in an error: engine-core error",
    "rust_engine_dead_completions_stream": "the stream ended in an error: engine-core error",
}


def _api(fixture: Fixture) -> Api:
    return Api(fixture.request["path"])


@pytest.mark.parametrize(
    ("streamed", "whole", "asked_differently"),
    [
        ("chat_clean_stream_include_usage", "chat_clean_logprobs_top0", ()),
        ("completions_clean_all_details_stream_usage", "completions_clean_all_details", ()),
        ("completions_clean_stream_include_usage", "completions_clean_logprobs0", IDS),
        ("completions_clean_stream", "completions_clean_logprobs0", ()),
        ("rust_chat_nan_midresponse_stream", "rust_chat_nan_midresponse", NO_USAGE),
        ("rust_completions_clean_stream", "rust_completions_clean_logprobs0", NO_USAGE),
        ("rust_completions_clean_stream_include_usage", "rust_completions_clean_logprobs0", IDS),
        ("rust_completions_clean_stream_continuous_usage", "rust_completions_clean_logprobs0", IDS),
        ("rust_completions_clean_stream_stop_string", "rust_completions_clean_stop_string", NO_USAGE),
        ("rust_completions_nan_midresponse_sampled_stream", "rust_completions_nan_midresponse_sampled", NO_USAGE),
        ("rust_completions_nan_prompt_stream", "rust_completions_nan_prompt", NO_USAGE),
        ("rust_completions_nan_prompt_stream_usage", "rust_completions_nan_prompt_logprobs0", ()),
    ],
)
def test_a_recorded_stream_folds_into_the_recorded_reply(
    streamed: str, whole: str, asked_differently: tuple[str, ...]
) -> None:
    stream = FIXTURES[streamed]
    reply = json.loads(fold(_api(stream), stream.request["body"], stream.body).reply())
    exempt = (*NOT_CARRIED, *asked_differently)
    assert differences(reply, json.loads(FIXTURES[whole].body), except_for=exempt) == []


@pytest.mark.parametrize("fixture", STREAMS, ids=ids(STREAMS))
def test_every_recorded_stream_keeps_each_position_or_says_why_not(fixture: Fixture) -> None:
    if fixture.name in BROKEN:
        with pytest.raises(AssemblyError, match=BROKEN[fixture.name]):
            fold(_api(fixture), fixture.request["body"], fixture.body)
        return
    reply = json.loads(fold(_api(fixture), fixture.request["body"], fixture.body).reply())
    positions = {
        str(choice["index"]): len(choice["logprobs"].get("content") or choice["logprobs"].get("token_logprobs") or [])
        for choice in reply["choices"]
        if choice["logprobs"] is not None
    }
    assert positions == {choice: count for choice, count in fixture.expect["positions_on_wire"].items() if count}


@given(st.one_of(completions().map(lambda s: (Api.COMPLETIONS, s)), chats().map(lambda s: (Api.CHAT, s))))
def test_any_cut_and_interleaving_of_a_reply_folds_back_into_it(case: tuple[Api, Streamed]) -> None:
    api, streamed = case
    assembly = Assembly(api, streamed.request)
    for one in streamed.chunks:
        assembly.feed(json.dumps(one).encode())
    reply = json.loads(assembly.reply())
    assert json.dumps(reply["choices"]) == json.dumps(streamed.choices)
    assert {key: reply[key] for key in HEAD} == HEAD
    assert reply["usage"] == USAGE | {"prompt_tokens_details": None, "completion_tokens_details": None}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"error": {"message": "boom", "code": 500}}', "the stream ended in an error: boom"),
        (b'{"error": "boom"}', "the stream ended in an error: boom"),
        (b'{"object": "error", "message": "boom"}', "the stream ended in an error: boom"),
        (b"[1]", "an event of the stream is no JSON object"),
        (b"{", "an event of the stream is no JSON: "),
        (b"\xff", "an event of the stream is no JSON: "),
        (b"[" * 100_000, "an event of the stream is no JSON: "),
        (b'{"id": "x"}', "an event of the stream has no choices"),
        (b'{"choices": {}}', "a chunk of the stream has a dict where choices belongs"),
        (b'{"choices": [3]}', "a choice of the stream is no JSON object"),
        (b'{"choices": [], "usage": 3}', "a chunk of the stream has a int where usage belongs"),
        (delta(content="chat"), "a chunk of the stream has a choice without text"),
        (chunk(index=1), "a chunk of the stream is of choice 1, of 1 asked for"),
        (chunk(index=-1), "a chunk of the stream is of choice -1, of 1 asked for"),
        (chunk(index=True), "a chunk of the stream is of choice True, of 1 asked for"),
        (chunk(index=None), "a chunk of the stream is of choice None, of 1 asked for"),
        (chunk(text=3), "a chunk of the stream has a int where text belongs"),
        (chunk(logprobs=[]), "a chunk of the stream has a list where logprobs belongs"),
        (chunk(logprobs={"token_logprobs": {}}), "a chunk of the stream has a dict where token_logprobs belongs"),
        (chunk(token_ids="1"), "a chunk of the stream has a str where token_ids belongs"),
        (chunk(finish_reason=1), "a chunk of the stream has a int where finish_reason belongs"),
        (chunk(finish_reason="error"), "the engine ended choice 0 with an error"),
    ],
)
def test_a_foreign_event_is_an_error_that_says_why(data: bytes, message: str) -> None:
    with pytest.raises(AssemblyError) as caught:
        Assembly(Api.COMPLETIONS, PLAIN).feed(data)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("request_body", "choices"),
    [
        ({"prompt": "one"}, 1),
        ({"prompt": ["one", "two"]}, 2),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": [[1, 2], [3]], "n": 3}, 6),
        ({"prompt": "one", "n": 4}, 4),
        ({"prompt": "one", "n": None}, 1),
        ({"prompt": [1], "prompt_embeds": ["AA==", "AA=="]}, 3),
        ({"prompt_embeds": "AA=="}, 1),
    ],
)
def test_a_reply_needs_the_end_of_every_choice_asked_for(request_body: dict[str, Any], choices: int) -> None:
    assembly = Assembly(Api.COMPLETIONS, request_body)
    for index in reversed(range(1, choices)):
        assembly.feed(chunk(index=index, finish_reason="stop"))
    with pytest.raises(AssemblyError, match=r"^the stream ended before choice 0 had a finish_reason$"):
        assembly.reply()
    assembly.done()
    with pytest.raises(AssemblyError, match=r"^the stream said \[DONE\] before choice 0 had a finish_reason$"):
        assembly.reply()
    assert not assembly.complete
    assembly.feed(chunk(finish_reason="stop"))
    assert assembly.complete
    assert [choice["index"] for choice in json.loads(assembly.reply())["choices"]] == list(range(choices))


@pytest.mark.parametrize("api", [Api.BATCH, Api.RESPONSES, Api.GENERATE, Api.INVOCATIONS], ids=lambda api: api.name)
def test_routes_whose_streams_are_not_folded(api: Api) -> None:
    assert stream_request(api, {"input": "hi"}) is None
    with pytest.raises(ValueError, match="has no stream to fold"):
        Assembly(api, {})


@pytest.mark.parametrize(
    ("api", "body"),
    [
        (Api.COMPLETIONS, {"prompt": "p", "seed": 1}),
        (Api.COMPLETIONS, {"prompt": ["p", "q"], "n": 2, "stream": False}),
        (Api.COMPLETIONS, {"prompt": ["p", "q"], "echo": True, "logprobs": 1}),
        (Api.COMPLETIONS, {"prompt": "p", "kv_transfer_params": {"do_remote_prefill": True}}),
        (Api.CHAT, {"messages": [], "n": 2, "echo": True}),
    ],
)
def test_the_stream_asks_for_all_that_the_request_did(api: Api, body: dict[str, Any]) -> None:
    before = json.dumps(body)
    if api is Api.CHAT:
        added = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    else:
        added = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    assert stream_request(api, body) == body | added
    assert json.dumps(body) == before


def test_other_stream_options_stay() -> None:
    streamed = stream_request(Api.CHAT, {"messages": [], "stream_options": {"include_usage": False, "x": 1}})
    assert streamed is not None
    assert streamed["stream_options"] == {"include_usage": True, "x": 1}


@pytest.mark.parametrize(
    ("api", "body"),
    [
        (Api.COMPLETIONS, {"prompt": "p", "prompt_logprobs": 1}),
        (Api.COMPLETIONS, {"prompt": "p", "prompt_logprobs": 0}),
        (Api.CHAT, {"messages": [], "prompt_logprobs": 1}),
        (Api.COMPLETIONS, {"prompt": "p", "use_beam_search": True}),
        (Api.CHAT, {"messages": [], "use_beam_search": True}),
        (Api.COMPLETIONS, {"prompt": "p", "echo": True, "n": 2}),
        (Api.COMPLETIONS, {"prompt": "p", "kv_transfer_params": {"do_remote_decode": True}}),
    ],
)
def test_requests_a_stream_cannot_carry(api: Api, body: dict[str, Any]) -> None:
    assert stream_request(api, body) is None


def test_a_cut_reply_ends_its_open_choices_and_counts_its_tokens() -> None:
    request = {"prompt": [[1, 2, 3], [4]], "n": 2, "logprobs": 0}
    assembly = folded(
        Api.COMPLETIONS,
        request,
        *(tokens(None, None, index=index, text="a") for index in (2, 0, 1)),
        tokens(-0.5, index=3, finish_reason="stop"),
    )
    assembly.abort_open()
    reply = json.loads(assembly.reply())
    assert [choice["finish_reason"] for choice in reply["choices"]] == ["abort", "abort", "abort", "stop"]
    assert [choice["logprobs"]["token_logprobs"] for choice in reply["choices"]] == [[None, None]] * 3 + [[-0.5]]
    assert reply["usage"]["prompt_tokens"] == 4
    assert reply["usage"]["completion_tokens"] == 7
    assert reply["usage"]["total_tokens"] == 11


def test_usage_of_a_cut_reply_is_what_the_last_chunks_of_its_choices_said() -> None:
    def with_usage(data: bytes, prompt: int, completion: int) -> bytes:
        usage = {"prompt_tokens": prompt, "completion_tokens": completion}
        return json.dumps(json.loads(data) | {"usage": usage}).encode()

    assembly = folded(
        Api.COMPLETIONS,
        {"prompt": ["long", "short"], "logprobs": 0, "echo": True},
        with_usage(tokens(*[None] * 9), 7, 2),
        with_usage(tokens(None, index=1), 4, 1),
        with_usage(tokens(None), 7, 3),
    )
    assembly.abort_open()
    usage = json.loads(assembly.reply())["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (11, 4, 15)


@pytest.mark.parametrize(
    ("request_body", "data"),
    [
        ({"prompt": "text", "logprobs": 0}, tokens(None)),
        ({"prompt": [1, 2], "logprobs": 0, "truncate_prompt_tokens": 1}, tokens(None)),
        ({"prompt": [1, 2], "logprobs": 0, "echo": True}, tokens(None, None, None)),
        ({"prompt": [1, 2]}, chunk(text="x")),
    ],
    ids=["prompt", "truncated", "echo", "no-logprobs"],
)
def test_usage_that_cannot_be_known_is_null(request_body: dict[str, Any], data: bytes) -> None:
    assembly = folded(Api.COMPLETIONS, request_body, data)
    assembly.abort_open()
    assert json.loads(assembly.reply())["usage"] is None


def test_what_vllm_does_not_know_survives() -> None:
    first = json.loads(chunk(meta_info={"a": 1}, weight_versions=[1], text="x")) | {"trace": "t"}
    assembly = folded(
        Api.COMPLETIONS,
        {"prompt": [1], "logprobs": 0},
        json.dumps(first).encode(),
        chunk(logprobs={"token_logprobs": [-1.0], "token_ranks": [1]}, weight_versions=[2], meta_info=None),
        chunk(logprobs={"token_logprobs": [-2.0], "token_ranks": [2]}, finish_reason="stop"),
    )
    reply = json.loads(assembly.reply())
    choice = reply["choices"][0]
    assert (choice["meta_info"], choice["weight_versions"], reply["trace"]) == ({"a": 1}, [1, 2], "t")
    assert choice["logprobs"] == {"token_logprobs": [-1.0, -2.0], "token_ranks": [1, 2]}


def test_logprobs_that_come_after_the_end_are_kept() -> None:
    assembly = folded(Api.COMPLETIONS, PLAIN, tokens(-1.0, finish_reason="stop"), tokens(-2.0))
    assert json.loads(assembly.reply())["choices"][0]["logprobs"]["token_logprobs"] == [-1.0, -2.0]
    assert json.loads(assembly.reply())["choices"][0]["finish_reason"] == "stop"


def test_literals_and_lone_surrogates_leave_as_they_came() -> None:
    choice = b'{"index":0,"text":"\\ud83d","finish_reason":"stop","logprobs":{"token_logprobs":[NaN,-Infinity]}}'
    data = b'{"choices":[%s]}' % choice
    reply = folded(Api.COMPLETIONS, PLAIN, data).reply()
    assert b'"token_logprobs":[NaN,-Infinity]' in reply
    assert b'"text":"\\ud83d"' in reply


def test_the_rust_front_end_stays_what_it_is() -> None:
    fixture = FIXTURES["rust_completions_clean_stream_interval4"]
    reply = json.loads(fold(_api(fixture), fixture.request["body"], fixture.body).reply())
    whole = json.loads(FIXTURES["rust_completions_clean_logprobs0"].body)
    assert list(reply) == list(whole)
    assert list(reply["choices"][0]["logprobs"]) == ["tokens", "token_logprobs", "top_logprobs", "text_offset"]
    assert reply["choices"][0]["logprobs"]["text_offset"] == [0, 1, 3, 6, 7, 8, 9, 15, 16, 17]


def test_offsets_of_the_rust_front_end_stay_where_tokens_are_no_text() -> None:
    choice = {"index": 0, "text": "", "logprobs": {"tokens": [5], "token_logprobs": [-1.0], "text_offset": [9]}}
    data = [json.dumps({"choices": [choice]}).encode(), chunk(finish_reason="stop")]
    assert json.loads(folded(Api.COMPLETIONS, PLAIN, *data).reply())["choices"][0]["logprobs"]["text_offset"] == [9]


def test_the_docs_name_every_field_that_a_stream_does_not_carry() -> None:
    docs = (Path(__file__).parent.parent / "docs" / "reassembly.md").read_text("utf-8")
    table = [line.split("|")[1] for line in docs.splitlines() if line.startswith("| `")]
    documented = {name for cell in table for name in re.findall(r"`([^`]+)`", cell)}
    assert set(NOT_CARRIED) <= documented
