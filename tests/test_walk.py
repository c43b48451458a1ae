"""The compiled walk: whatever it takes for usable, the judge does too; and what it says of a reply is what is there."""

import json
import random

import pytest
from fixtures_index import load_fixtures
from hypothesis import given, settings
from hypothesis import strategies as st
from test_wire_property import replies

from proxy import quick
from proxy.api import Api, Asked
from proxy.jsonbody import InvalidJson
from proxy.logprobs import mark
from proxy.sse import Parser
from proxy.unscorable import Encoding, Findings, Rules

if quick.survey is None:
    pytest.skip("proxy.walk is not compiled here", allow_module_level=True)

survey = quick.survey
APIS = {"completions": Api.COMPLETIONS, "chat": Api.CHAT, "chatbatch": Api.BATCH}


def bodies() -> list[tuple[str, Api, bytes]]:
    """Every recorded reply, and every event of a recorded stream, that may hold logprobs."""
    found = []
    for fixture in load_fixtures():
        api = APIS.get(fixture.name.removeprefix("rust_").split("_")[0])
        if api is None:
            continue
        frames = Parser().feed(fixture.body) if "stream" in fixture.name else []
        events = [frame.data for frame in frames if frame.data and frame.data != b"[DONE]"]
        found += [(f"{fixture.name}-{at}", api, data) for at, data in enumerate(events or [fixture.body])]
    return found


BODIES = bodies()


def slowly(body: bytes, api: Api, rules: Rules) -> tuple[bytes, Findings] | None:
    try:
        return mark(body, Asked(api, {}, logprobs=True, stream=False), rules)
    except InvalidJson:
        return None


def agrees(body: bytes, api: Api, rules: Rules) -> bool:
    """Whether the walk had an answer; it must be the one that the judge's way gives."""
    choices = survey(body, rules.encoding.candidate == b"null")
    if choices is None:
        return False
    out, findings = quick.mark(body, choices, rules)
    assert (out, findings) == slowly(body, api, rules)
    assert (out is body) is not findings.marked
    return True


@pytest.mark.parametrize("encoding", Encoding)
def test_recorded_replies_are_marked_as_by_the_judges_way(encoding: Encoding) -> None:
    answered = [name for name, api, body in BODIES if agrees(body, api, Rules(encoding))]
    assert len(answered) > 100


@settings(max_examples=500, deadline=None)
@given(replies(), st.sampled_from(list(Encoding)), st.booleans())
def test_any_reply_is_marked_as_by_the_judges_way(
    reply: tuple[bytes, list[list[str]]], encoding: Encoding, allow_positive: bool
) -> None:
    agrees(reply[0], Api.COMPLETIONS, Rules(encoding, allow_positive))


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(BODIES), st.data())
def test_whatever_a_byte_is_changed_to_nothing_else_is_found(body: tuple[str, Api, bytes], data: st.DataObject) -> None:
    _, api, raw = body
    at = data.draw(st.integers(0, max(0, len(raw) - 1)))
    new = data.draw(
        st.sampled_from([b"", b"9", b"0", b"-", b"e", b"E9", b".", b'"', b"\\", b"null", b"NaN", b"\xff", b"\x00"])
    )
    agrees(raw[:at] + new + raw[at + data.draw(st.integers(0, 3)) :], api, Rules())


VALUES = ["-0.27036458253860474", "-1.0071282758872258e-06", "-5.5261683", "0.0", "-0.0", "-12.25", "-999.5", "-1e-05"]
ODD_VALUES = [
    "null",
    "NaN",
    "-9999.0",
    "-1234.5",
    "0.25",
    "-Infinity",
    "-0.5e-300",
    "-1E-5",
    "-0.123456789012345678901234567e-8",
]
NAMES = ['" the"', '"a"', '","', '"\\n"', '"\\""', '""', '"}],{"', '" 42.5e-"', '"t"']
ODD_NAMES = ['"é"', '"\\\\"', '"\\u0007"', '"日本語"', '"' + "long" * 12 + '"']
CHANGES = [b"", *(bytes([byte]) for byte in b'-.,0159e: "\\{}[]\n\xc3x'), b"00", b"--", b",,", b"null"]


@st.composite
def long_replies(draw: st.DrawFn) -> bytes:
    """Lists of many elements, which are mostly the usual ones, with a place changed or not."""
    chosen = random.Random(draw(st.integers(0, 2**32)))
    odd = chosen.choice([0.0, 0.02, 0.2])
    count = chosen.randint(1, 120)

    def some(usual: list[str], others: list[str]) -> list[str]:
        return [chosen.choice(others if chosen.random() < odd else usual) for _ in range(count)]

    values, names = some(VALUES, ODD_VALUES), some(NAMES, ODD_NAMES)
    ids = [str(chosen.choice([0, 7, 4321, 151643])) for _ in range(count)]
    further = chosen.choice(["", "", ',"!":-1.5'])
    top = [f"{{{name}:{value}{further}}}" for name, value in zip(names, values, strict=True)]
    lists = {"text_offset": ids, "token_logprobs": values, "tokens": names, "top_logprobs": top}
    keys = list(lists) if chosen.random() < 0.7 else chosen.sample(list(lists), len(lists))
    logprobs = ",".join(f'"{key}":[{",".join(lists[key])}]' for key in keys)
    body = f'{{"choices":[{{"index":0,"logprobs":{{{logprobs}}},"token_ids":[{",".join(ids)}]}}]}}'.encode()
    if chosen.random() < 0.2:
        return body
    at = chosen.randrange(40, len(body))
    return body[:at] + chosen.choice(CHANGES) + body[at + chosen.randint(0, 2) :]


@settings(max_examples=3000, deadline=None)
@given(long_replies(), st.sampled_from(Encoding))
def test_long_lists_are_marked_as_by_the_judges_way(body: bytes, encoding: Encoding) -> None:
    agrees(body, Api.COMPLETIONS, Rules(encoding))


def test_long_lists_are_answered() -> None:
    pairs = list(zip(NAMES, VALUES, strict=False)) * 20
    values, names = ",".join(value for _, value in pairs), ",".join(name for name, _ in pairs)
    top = ",".join(f"{{{name}:{value}}}" for name, value in pairs)
    body = f'{{"choices":[{{"logprobs":{{"token_logprobs":[{values}],"tokens":[{names}],"top_logprobs":[{top}]}}}}]}}'
    assert [(count, doubts) for _, count, doubts, _, _ in survey(body.encode(), False) or []] == [(160, [])]


def among_many(
    value: str = "-0.5", name: str = '"x"', candidate: str = "", at: int = 20, token_id: str = "17"
) -> bytes:
    """A reply of 40 positions, that at ``at`` as given."""
    values, names, ids = ["-0.25"] * 40, ['"y"'] * 40, ["7"] * 40
    top = [f"{{{one}:{other}}}" for one, other in zip(names, values, strict=True)]
    values[at], names[at], ids[at], top[at] = value, name, token_id, candidate or f"{{{name}:{value}}}"
    lists = {"text_offset": ids, "token_logprobs": values, "tokens": names, "top_logprobs": top}
    logprobs = ",".join(f'"{key}":[{",".join(some)}]' for key, some in lists.items())
    rest = '"prompt_logprobs":null,"prompt_token_ids":null,"routed_experts":null,"stop_reason":null'
    return f'{{"choices":[{{"logprobs":{{{logprobs}}},"token_ids":[{",".join(ids)}],{rest}}}]}}'.encode()


@pytest.mark.parametrize(
    "value", ["-1.5e-", "-1.e-5", "-1.", "-1.5.5", "-1-5", "--1.5", "-01.5", "-1.5e-5.5", "-.5", "- 1.5"]
)
def test_what_is_no_number_is_found_among_many(value: str) -> None:
    assert survey(among_many(value), True) is None


@pytest.mark.parametrize("value", ["-0.5e-5", " -0.5", "-0.5 ", "0.0", "-999.25", "-1234.5", "-7", "-1e-05", "-0.5E-5"])
def test_what_is_spelt_otherwise_is_no_doubt_among_many(value: str) -> None:
    assert [doubtful for _, _, doubtful, _, _ in survey(among_many(value, ' "x" '), True) or []] == [[]]


@pytest.mark.parametrize("token_id", ["", "007", "1x", "-1", "1.5"])
def test_what_is_no_id_is_found_wherever_it_is(token_id: str) -> None:
    for at in range(40):
        assert survey(among_many(at=at, token_id=token_id), True) is None, at


@pytest.mark.parametrize(
    ("name", "candidate"),
    [
        ('"\\",x"', '{"\\":-0.5}'),  # the quote is an escaped one
        (' ",x"', '{ ":-0.5}'),  # the quote is the opening one
        ('"x"', '{"y":-0.5'),
        ('"x"', '{"x":-0.5]'),
        ('"x"', '{"x",-0.5}'),
        ('"x"', '["x":-0.5}'),
        ('"x"', '{"x":-0.5.5}'),
    ],
)
def test_what_is_no_candidate_is_found_among_many(name: str, candidate: str) -> None:
    assert survey(among_many(name=name, candidate=candidate), True) is None


def test_a_body_that_is_cut_anywhere_is_none() -> None:
    for name, _, body in BODIES[::7]:
        for end in random.Random(name).sample(range(len(body)), min(len(body), 60)):
            assert survey(body[:end], True) is None, (name, end)
            assert survey(bytearray(body[:end]), True) is None, (name, end)


def reply(value: str = "-0.5", name: str = '"x"', candidate: str = "-0.5", ids: str = "[7]", extra: str = "") -> bytes:
    logprobs = f'{{"token_logprobs":[{value}],"tokens":[{name}],"top_logprobs":[{{"x":{candidate}}}]{extra}}}'
    return f'{{"choices":[{{"index":3,"logprobs":{logprobs},"token_ids":{ids}}}]}}'.encode()


@pytest.mark.parametrize(
    "value",
    ["-0.5", "-0.0", "0.0", "0", "-0", "-9998.9", "-8999", "-1e-7", "-1.5E-30", "0.0009", "0.00", "0.000e-5", "-999"],
)
def test_usable_values_raise_no_doubt(value: str) -> None:
    if value == "-9998.9":  # nines of four digits are looked at again, and found usable
        assert quick.mark(body := reply(value), survey(body, True) or [], Rules())[0] is body
    else:
        assert [doubtful for _, _, doubtful, _, _ in survey(reply(value), True) or []] == [[]]


@pytest.mark.parametrize(
    "value",
    [
        "null",
        "NaN",
        "Infinity",
        "-Infinity",
        "-9999",
        "-9999.0",
        "-10000",
        "1e999",
        "0.5",
        "0.0011",
        "0.01",
        "1",
        "-1e4",
    ]
    + ["-1E+9", "0e0"],
)
def test_every_other_value_raises_a_doubt_and_says_where(value: str) -> None:
    body = reply(value)
    ((index, count, ((position, start, end, kind),), kinds, close),) = survey(body, True) or []
    assert (index, count, position, body[start:end].decode()) == (3, 1, 0, value)
    assert (kind, kinds) == (0, [(value.encode(), True)])
    assert body[close : close + 1] == b"}"
    assert json.loads(body[:close] + b',"unscorable":{}' + body[close:])["choices"][0]["logprobs"]["unscorable"] == {}


@pytest.mark.parametrize(
    "body",
    [
        reply("true"),
        reply('"NaN"'),
        reply("-"),
        reply("-.5"),
        reply("-00.5"),
        reply("-0."),
        reply("[-0.5]"),
        reply("-0.5,"),
        reply(""),
        reply("-0.5,-0.5"),
        reply(name='"x","y"'),
        reply(name="x"),
        reply(name='"\x01"'),
        reply(name='"\\x"'),
        reply(name='"\\u00g0"'),
        reply(ids="[7,8]"),
        reply(ids="[]"),
        reply(ids="[true]"),
        reply(ids='["7"]'),
        reply(name='"token_id:8"'),
        reply(name='"\\u0074oken_id:8"'),
        reply(candidate="NaN"),
        reply(candidate="1e999"),
        reply(candidate='"x"'),
        reply(extra=',"token_logprobs":[null]'),
        reply(extra=',"token\\u005flogprobs":[null]'),
        reply(extra=',"unscorable":{}'),
        reply() + b"}",
        reply() + b"\x00",
        b"[" + reply() + b"]",
        reply().replace(b'"choices"', b'"choices":[{"logprobs":null}],"choices"'),
        reply().replace(b'"index"', b'"logprobs":null,"index"'),
        reply().replace(b'"index":3', b'"index":03'),
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b',"choices":[]}',
        b"",
        b"{}",
    ],
)
def test_what_is_odd_is_left_to_others(body: bytes) -> None:
    assert survey(body, True) is None


@pytest.mark.parametrize(
    "name", ['"token_id:7"', '"token_id:7x"', '"é"', '"\\u001b"', '"\\""', '"a\\\\"', '"日本語 🦊 longer"']
)
def test_names_that_are_aligned_are_followed(name: str) -> None:
    known = survey(reply(name=name), True) is not None
    assert known is (name != '"token_id:7x"')


@pytest.mark.parametrize(
    "broken", [b"\x80", b"\xc0\xaf", b"\xe0\x80\xaf", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\xe2\x82"]
)
def test_names_that_are_no_utf8_are_not(broken: bytes) -> None:
    assert survey(reply(name='"x"').replace(b'["x"]', b'["' + broken + b'"]'), True) is None


def test_what_is_no_bytes_is_refused() -> None:
    with pytest.raises(TypeError, match="bytes or bytearray, not str"):
        survey("{}", True)  # type: ignore[arg-type]


def test_two_choices_of_one_index_are_counted_together() -> None:
    choice = reply("NaN").removeprefix(b'{"choices":[').removesuffix(b"]}")
    assert agrees(b'{"choices":[' + choice + b"," + choice + b"]}", Api.COMPLETIONS, Rules())
