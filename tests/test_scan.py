"""The scan: what it must prove, and what it must leave to the judge."""

import orjson
import pytest
from fixtures_index import load_fixtures

from proxy import scan
from proxy.api import Api

CLEAN = {fixture.name: fixture for fixture in load_fixtures() if fixture.expect.get("class") == "ok"}


def body(name: str) -> bytes:
    return CLEAN[name].body


@pytest.mark.parametrize(
    ("name", "api", "count"),
    [
        ("completions_clean_logprobs0", Api.COMPLETIONS, 4),
        ("completions_clean_logprobs5", Api.COMPLETIONS, 4),
        ("completions_clean_n3", Api.COMPLETIONS, 12),
        ("completions_clean_prompts2_n2", Api.COMPLETIONS, 16),
        ("completions_clean_tokens_as_ids", Api.COMPLETIONS, 4),
        ("rust_completions_clean_logprobs0", Api.COMPLETIONS, 4),
        ("rust_completions_clean_tokens_as_ids", Api.COMPLETIONS, 4),
        ("chat_clean_logprobs_top3", Api.CHAT, 3),
        ("chat_clean_n2", Api.CHAT, 6),
        ("rust_chat_clean_top0", Api.CHAT, 3),
        ("chatbatch_clean", Api.BATCH, 6),
    ],
)
def test_what_both_servers_write_is_proved_without_decoding_the_lists(
    name: str, api: Api, count: int, monkeypatch
) -> None:
    decoded = []
    monkeypatch.setattr(scan.orjson, "loads", lambda raw: decoded.append(raw) or orjson_loads(raw))
    assert scan.clean(body(name), api) == sum(CLEAN[name].expect["positions_on_wire"].values()) == count
    assert all(b"-5." not in raw for raw in decoded)


orjson_loads = orjson.loads
REPLY = body("completions_clean_logprobs0")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"-5.607889652252197,", b"NaN,"),
        (b"-5.607889652252197,", b"null,"),
        (b"-5.607889652252197,", b"-9999.0,"),
        (b"-5.607889652252197,", b"-99990e-1,"),
        (b"-5.607889652252197,", b"-1e30,"),
        (b"-5.607889652252197,", b"-1E4,"),
        (b"-5.607889652252197,", b"0.5,"),
        (b"-5.607889652252197,", b"1e999,"),
        (b"-5.607889652252197,", b"-,"),
        (b"-5.607889652252197,", b""),
        (b"-5.607889652252197,", b'"-5.6",'),
        (b"-5.607889652252197,", b"[-5.6],"),
        (b'" t":-5.607889652252197', b'" t":null'),
        (b'" t":-5.607889652252197', b'" t":NaN'),
        (b'"logprobs":', b'"logprobs":null,"x":'),
        (b'"finish_reason":', b'"token_logprobs":[null],"finish_reason":'),
        (b'"usage":{', b'"usage":{{'),
        (b'"object":"text_completion"', b'"object":text_completion'),
        (b'"index":0', b'"index":'),
        (b'"choices":[{', b'"choices":[{"index":1},{'),
    ],
)
def test_whatever_is_bad_or_broken_is_not_called_clean(old: bytes, new: bytes) -> None:
    assert scan.clean(REPLY, Api.COMPLETIONS) == 4
    changed = REPLY.replace(old, new, 1)
    assert changed != REPLY
    assert scan.clean(changed, Api.COMPLETIONS) is None


@pytest.mark.parametrize("cut", [1, 5, 40, 300, 700])
def test_a_truncated_reply_is_not_called_clean(cut: int) -> None:
    assert scan.clean(REPLY[:-cut], Api.COMPLETIONS) is None


@pytest.mark.parametrize(
    ("ids", "clean"),
    [(b"[1,2,3,4]", True), (b"[1,2,3]", False), (b"[1,2,3,4,5]", False), (b"[]", False), (b"[1,2,3,]", False)],
)
def test_token_ids_are_counted(ids: bytes, clean: bool) -> None:
    assert b',"token_ids":[111,259,287,38]' in REPLY
    changed = REPLY.replace(b"[111,259,287,38]", ids)
    assert (scan.clean(changed, Api.COMPLETIONS) is not None) is clean


def test_names_that_are_ids_must_be_the_ids() -> None:
    named = body("completions_clean_tokens_as_ids")
    right = named.replace(b',"token_ids":null', b',"token_ids":[111,259,287,38]')
    wrong = named.replace(b',"token_ids":null', b',"token_ids":[111,287,259,38]')
    assert scan.clean(right, Api.COMPLETIONS) == 4
    assert scan.clean(wrong, Api.COMPLETIONS) is None


CHAT = body("chat_clean_logprobs_top3")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"logprob":-5.611659526824951', b'"logprob":null'),
        (b'"logprob":-5.611659526824951', b'"logprob":-9999.0'),
        (b'"logprob":-5.611659526824951', b'"logprob":0.5'),
        (b'"logprob":-5.611659526824951,', b""),
        (b'"token_ids":[395,', b'"token_ids":['),
        (b'"message":{', b'"message":{{'),
    ],
)
def test_chat_likewise(old: bytes, new: bytes) -> None:
    assert scan.clean(CHAT, Api.CHAT) == 3
    changed = CHAT.replace(old, new, 1)
    assert changed != CHAT
    assert scan.clean(changed, Api.CHAT) is None
