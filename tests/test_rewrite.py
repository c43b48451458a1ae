"""Streams to the client, from the real servers' event streams, at any split."""

import json
import random

import pytest
from fixtures_index import Fixture, ids, load_fixtures
from test_logprobs import PATHS, positions

from proxy.api import Api, Asked, read_request
from proxy.errors import BadReply
from proxy.rewrite import StreamRewriter, rewrite_reply
from proxy.unscorable import Encoding, Reason, Rules

STREAMS = [fixture for fixture in load_fixtures() if fixture.request["path"] in PATHS and fixture.streamed]
RAW_LOGITS = ("flags_completions_clean_stream_interval5_forced_usage", "rust_generate_nan_midresponse_sampled_stream")


def rewriter_for(fixture: Fixture, encoding: Encoding = Encoding.CEILING) -> StreamRewriter:
    asked = read_request(Api(fixture.request["path"]), fixture.request_body)
    return StreamRewriter(asked, Rules(encoding, allow_positive=fixture.name in RAW_LOGITS))


def splits(body: bytes) -> list[list[bytes]]:
    chance = random.Random(len(body))
    at = sorted(chance.sample(range(len(body)), min(40, len(body))))
    random_places = [body[i:j] for i, j in zip([0, *at], [*at, len(body)], strict=True)]
    return [[body], [body[i : i + 1] for i in range(len(body))], random_places]


@pytest.mark.parametrize("fixture", STREAMS, ids=ids(STREAMS))
def test_every_stream_gives_what_its_fixture_expects_at_any_split(fixture: Fixture) -> None:
    outs = set()
    for chunks in splits(fixture.body):
        rewriter = rewriter_for(fixture)
        outs.add(b"".join(rewriter.feed(chunk) for chunk in chunks) + rewriter.close())
        assert positions(rewriter.findings) == fixture.expect.get("bad_positions", {})
        assert rewriter.findings.sampled == sum(fixture.expect["positions_on_wire"].values())
        assert rewriter.failed is bool(fixture.expect.get("error_event"))
        if fixture.expect["class"] != "stream_broken":
            assert rewriter.ended
    assert len(outs) == 1
    if "bad_positions" not in fixture.expect:
        assert outs == {fixture.body}


def test_the_stream_fixtures_are_all_here() -> None:
    assert len(STREAMS) == 49


def test_a_stream_the_engine_left_has_no_end() -> None:
    [fixture] = [fixture for fixture in STREAMS if fixture.name == "engine_dead_responses_stream"]
    rewriter = rewriter_for(fixture)
    rewriter.feed(fixture.body)
    assert not rewriter.ended


@pytest.mark.parametrize("encoding", list(Encoding))
def test_marks_in_events_are_local_to_the_event(encoding: Encoding) -> None:
    [fixture] = [fixture for fixture in STREAMS if fixture.name == "completions_nan_midresponse_stream"]
    rewriter = rewriter_for(fixture, encoding)
    out = rewriter.feed(fixture.body)
    assert out.count(b'"token_logprobs":[' + encoding.mark + b"]") == 3
    assert out.count(b'"unscorable":{"nan":[0]}') == 3
    assert rewriter.findings.marked == {0: {Reason.NAN: [5, 6, 7]}}


def test_responses_repeat_their_logprobs_all_marked_and_counted_once() -> None:
    [fixture] = [fixture for fixture in STREAMS if fixture.name == "responses_nan_visible_text_stream"]
    rewriter = rewriter_for(fixture)
    out = rewriter.feed(fixture.body)
    assert b'"logprob":null' not in b"".join(
        json.dumps({k: v for k, v in event.items() if k != "top_logprobs"}, separators=(",", ":")).encode()
        for event in all_entries(out)
    )
    assert out.count(b'"logprob":9999.0') == fixture.body.count(b'"logprob":null') // 2
    assert rewriter.findings.by_reason() == {Reason.NAN: 2}


def all_entries(out: bytes) -> list[dict]:
    found = []

    def collect(pairs: list) -> dict:
        value = dict(pairs)
        if "top_logprobs" in value and "token" in value:
            found.append(value)
        return value

    for line in out.splitlines():
        if line.startswith(b"data: {"):
            json.loads(line[6:], object_pairs_hook=collect)
    return found


def test_an_event_that_is_no_json_is_an_error() -> None:
    rewriter = StreamRewriter(Asked(Api.COMPLETIONS, {}), Rules())
    good = b'data: {"choices":[]}\n\n'
    assert rewriter.feed(good + b"data: {oops\n\n" + good) == good
    assert "no JSON object" in str(rewriter.broken)


def test_rejecting_goes_no_further_than_the_first_unscorable_event() -> None:
    rewriter = StreamRewriter(Asked(Api.COMPLETIONS, {}, logprobs=True), Rules(), reject=True)
    good, bad = (
        b'data: {"choices":[{"index":0,"logprobs":{"token_logprobs":[%b]}}]}\n\n' % value
        for value in (b"-1.5", b"null")
    )
    assert rewriter.feed(good + bad + good) == good
    assert rewriter.findings.by_reason() == {Reason.MISSING: 1}


def test_a_reply_that_is_no_json_is_an_error_not_an_empty_object() -> None:
    with pytest.raises(BadReply, match="not the JSON object"):
        rewrite_reply(b'{"choices": [', Api.COMPLETIONS, Rules(), lambda: Asked(Api.COMPLETIONS))


def test_a_clean_reply_asks_nothing_of_the_request() -> None:
    [fixture] = [fixture for fixture in load_fixtures() if fixture.name == "completions_clean_n3"]

    def never() -> Asked:
        raise AssertionError("the request was read for a clean reply")

    out, findings = rewrite_reply(fixture.body, Api.COMPLETIONS, Rules(), never)
    assert out is fixture.body
    assert findings.sampled == sum(fixture.expect["positions_on_wire"].values())
