"""For any reply: only marks differ, what is bad is marked, and the scan proves no bad reply clean."""

import json
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy import scan
from proxy.api import Api, Asked
from proxy.logprobs import mark
from proxy.unscorable import Encoding, Rules, judge

TRAPS = [
    '"token_logprobs":[',
    '],"tokens":["',
    "\\",
    '"',
    "null",
    "NaN",
    "-9999.0",
    "\u2028",
    '"logprobs":{"content":[',
]
text = st.one_of(st.text(max_size=8), st.sampled_from(TRAPS), st.sampled_from(["\ud800", "a\udc00b", '","', "]},"]))
good = st.one_of(
    st.floats(min_value=-9998, max_value=0.001).map(repr),
    st.sampled_from(["-0.5", "0", "-0.0", "0.0", "-1e-07", "-1.25E2", "-999.75", "-1234.5", "0.001"]),
)
bad = st.sampled_from(
    ["null", "NaN", "Infinity", "-Infinity", "1e999", "-9999.0", "-9999", "-1e4", "-1E+30", "-12345.6", "0.5", "9999.0"]
    + ["1e1", '"x"', '"-0.5"', "true", "{}", "[]", '[{"a":[-1]}]', "-99999e-1", "0.01"]
)
unknown = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), text),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.one_of(text, st.sampled_from(["token_ids", "token_logprobs", "index", "tokens"])), inner, max_size=3
        ),
    ),
    max_leaves=6,
)


class Raw(str):
    """A JSON token that is written as it stands."""


def dump(value: object, draw_space) -> str:
    """JSON with spaces where the strategy puts them, raw tokens as they stand."""
    gap = draw_space()
    match value:
        case Raw():
            return gap + value
        case dict():
            inner = ",".join(gap + json.dumps(k) + draw_space() + ":" + dump(v, draw_space) for k, v in value.items())
            return gap + "{" + inner + "}"
        case list():
            return gap + "[" + ",".join(dump(item, draw_space) for item in value) + draw_space() + "]"
        case _:
            return gap + json.dumps(value)


@st.composite
def replies(draw) -> tuple[bytes, list[list[str]]]:
    """(body, the sampled tokens' JSON of each choice), aligned with names and ids."""
    spaced = draw(st.booleans())
    space = (lambda: draw(st.sampled_from(["", " ", "\n"]))) if spaced else (lambda: "")
    value = st.one_of(good, bad) if draw(st.booleans()) else good
    lists = draw(st.lists(st.lists(value, max_size=5), min_size=1, max_size=3))
    choices = []
    for index, values in enumerate(lists):
        names = draw(st.lists(text, min_size=len(values), max_size=len(values)))
        logprobs = {
            "text_offset": [0] * len(values),
            "token_logprobs": [Raw(v) for v in values],
            "tokens": names,
            "top_logprobs": [{name: Raw(v)} for name, v in zip(names, values, strict=True)],
        }
        if draw(st.booleans()):
            order = ["tokens", "token_logprobs", "top_logprobs", "text_offset"]
            logprobs = {key: logprobs[key] for key in order}
        choice = {
            "index": index,
            "text": draw(text),
            "logprobs": logprobs,
            "finish_reason": "stop",
            "stop_reason": None,
        }
        ids = list(range(len(values))) if draw(st.booleans()) else None
        choice |= {"token_ids": ids, "prompt_token_ids": draw(st.sampled_from([None, [1, 2]]))}
        if draw(st.booleans()):
            extra = draw(st.dictionaries(text, unknown, max_size=2))
            choice = {**{k: v for k, v in extra.items() if k not in choice}, **choice}
        choices.append(choice)
    reply = {"id": draw(text), "choices": choices, "usage": {"total_tokens": 2**70}}
    return dump(reply, space).encode("utf-8", "surrogatepass"), lists


def load(body: bytes) -> object:
    """Full decode: duplicate keys, big integers and float spellings kept apart."""
    keep = {"parse_float": str, "parse_int": str, "parse_constant": str, "object_pairs_hook": tuple}
    return json.loads(body.decode("utf-8", "surrogatepass"), **keep)


def marked_as(value: object, lists: list[list[str]], rules: Rules, choice: int = -1) -> object:
    """The decode of what came, with the marks a reader of the contract would put there."""
    code = json.loads(rules.encoding.mark, parse_float=str, parse_constant=str)
    if not (isinstance(value, tuple) and value and all(isinstance(pair, tuple) for pair in value)):
        return value
    out = []
    for key, inner in value:
        if key == "choices" and isinstance(inner, list):
            inner = [marked_as(one, lists, rules, i) for i, one in enumerate(inner)]
        elif key == "logprobs" and choice >= 0:
            inner = _marked_logprobs(inner, lists[choice], rules, code)
        out.append((key, inner))
    return tuple(out)


def _marked_logprobs(logprobs: tuple, tokens: list[str], rules: Rules, code: object) -> tuple:
    reasons: dict[str, list[str]] = {}
    for i, token in enumerate(tokens):
        reason = judge(token.encode(), rules, has_candidates=True)
        if reason is not None:
            reasons.setdefault(reason.value, []).append(str(i))
    at = {int(i) for positions in reasons.values() for i in positions}
    out = []
    for key, inner in logprobs:
        if key == "token_logprobs":
            inner = [code if i in at else v for i, v in enumerate(inner)]
        if key == "top_logprobs":
            inner = [tuple((k, _candidate(v, rules)) for k, v in one) for one in inner]
        out.append((key, inner))
    return (*out, ("unscorable", tuple(reasons.items()))) if reasons else tuple(out)


def _candidate(value: object, rules: Rules) -> object:
    number = value is None or (isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity", "1e999"))
    return json.loads(rules.encoding.candidate, parse_constant=str) if number else value


@settings(max_examples=200, deadline=None)
@given(replies(), st.sampled_from(list(Encoding)))
def test_a_full_decode_differs_in_the_marked_entries_alone(
    reply: tuple[bytes, list[list[str]]], encoding: Encoding
) -> None:
    body, lists = reply
    rules = Rules(encoding)
    out, findings = mark(body, Asked(Api.COMPLETIONS, {}, logprobs=True), rules)
    assert load(out) == marked_as(load(body), lists, rules)
    assert findings.sampled == sum(map(len, lists))
    if load(out) == load(body):
        assert out is body


@settings(max_examples=300, deadline=None)
@given(replies())
def test_the_scan_never_calls_a_bad_reply_clean(reply: tuple[bytes, list[list[str]]]) -> None:
    body, lists = reply
    out, findings = mark(body, Asked(Api.COMPLETIONS, {}, logprobs=True), Rules(Encoding.LITERAL))
    proved = scan.clean(body, Api.COMPLETIONS)
    if proved is not None:
        assert findings.unscorable == 0
        assert out is body
        assert proved == findings.sampled == sum(map(len, lists))


@settings(max_examples=100, deadline=None)
@given(st.lists(good, min_size=1, max_size=6), st.booleans())
def test_the_scan_proves_what_vllm_writes(values: list[str], with_ids: bool) -> None:
    """The other direction: a scan that proves nothing would be sound and useless."""
    values = [value for value in values if abs(float(value)) < 999 and float(value) <= 0.001]
    names = [f"t{i}" for i in range(len(values))]
    ids = json.dumps(list(range(len(values)))) if with_ids else "null"
    top = ",".join(f'{{"{name}":{value}}}' for name, value in zip(names, values, strict=True))
    body = (
        f'{{"id":"a","choices":[{{"index":0,"text":"x","logprobs":{{"text_offset":{json.dumps([0] * len(values))},'
        f'"token_logprobs":[{",".join(values)}],"tokens":{json.dumps(names)},"top_logprobs":[{top}]}},'
        f'"finish_reason":"stop","stop_reason":null,"token_ids":{ids.replace(" ", "")},"prompt_logprobs":null}}]}}'
    ).replace(", ", ",")
    assert scan.clean(body.encode(), Api.COMPLETIONS) == len(values)
    assert all(math.isfinite(float(value)) for value in values)
