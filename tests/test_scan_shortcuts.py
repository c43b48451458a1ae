"""The scan's shortcuts on long lists: each gives what a full decode and `judge` give, or leaves the reply to them."""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy import scan
from proxy.api import Api
from proxy.unscorable import FLOOR, TOLERANCE

LONG = 300  # elements: far over the size up to which a list is matched instead of decoded


def reply(values: list[str], candidates: list[str] | None = None, names: list[str] | None = None) -> bytes:
    names = names or ["a"] * len(values)
    top = ",".join(f'{{"{name}":{value}}}' for name, value in zip(names, candidates or values, strict=True))
    return (
        f'{{"choices":[{{"index":0,"logprobs":{{"text_offset":[{",".join(["0"] * len(values))}],'
        f'"token_logprobs":[{",".join(values)}],"tokens":[{",".join(f"{chr(34)}{name}{chr(34)}" for name in names)}],'
        f'"top_logprobs":[{top}]}},"finish_reason":"stop","token_ids":[{",".join(["7"] * len(values))}]}}]}}'
    ).encode()


@pytest.mark.parametrize("byte", range(256))
def test_a_first_byte_is_called_usable_only_where_every_float32_with_it_is(byte: int) -> None:
    ends = [struct.unpack(">f", bytes([byte, *rest]))[0] for rest in (b"\0\0\0", b"\xff\xff\xff")]
    usable = all(FLOOR < value <= TOLERANCE for value in ends)
    assert (byte in scan._USABLE) <= usable
    # Not proved though usable: -9998.9 to -8192, and what shares a first byte with the tolerance.
    assert usable - (byte in scan._USABLE) == 0


@pytest.mark.parametrize(
    "value", ["-8191.9", "-8192.0", "-9998.99", "0.001", "0.0004", "0", "-0.0", "-1e-45", "1e-320"]
)
def test_a_usable_value_anywhere_in_a_long_list_is_proved(value: str) -> None:
    for at in (0, LONG // 2, LONG - 1):
        values = ["-0.25"] * LONG
        values[at] = value
        assert scan.clean(reply(values), Api.COMPLETIONS) == LONG


@pytest.mark.parametrize(
    "value",
    ["false", "true", "null", '"-1"', "[]", "[-1]", "{}", "-9999.0", "-9999", "-1e4", "0.0011", "1", "9999.0", "NaN"]
    + ["1e999", "-Infinity", "-1e39", "-", "", "-1],[-1", "-1 -1", "123456789012345678901234567890"],
)
def test_what_is_no_usable_value_is_never_proved(value: str) -> None:
    for count, at in ((1, 0), (LONG, 0), (LONG, LONG // 2), (LONG, LONG - 1)):
        values = ["-0.25"] * count
        values[at] = value
        assert scan.clean(reply(values, ["-0.25"] * count), Api.COMPLETIONS) is None


@pytest.mark.parametrize("value", ["null", " null", "NaN", "Infinity", "-Infinity", "\n-Infinity"])
@pytest.mark.parametrize("name", ["null", "a", ":", "}", "1", "\\\\", '\\"'])
def test_a_candidate_that_is_no_number_is_seen_whatever_its_name(value: str, name: str) -> None:
    values = ["-0.25"] * LONG
    names = [name] * LONG
    assert scan.clean(reply(values, names=names), Api.COMPLETIONS) == LONG
    assert scan.clean(reply(values, [*values[1:], value], names), Api.COMPLETIONS) is None


@pytest.mark.parametrize("value", ["NaN", " NaN", "Infinity", "-Infinity", "\n-Infinity"])
@pytest.mark.parametrize("name", ["null", "NaN", "N", "I", "Infinit", ":", "\\n"])
def test_where_a_null_candidate_may_stay_literals_are_still_seen(value: str, name: str) -> None:
    values = ["-0.25"] * LONG
    names = [name] * LONG
    with_null = reply(values, [*values[1:], "null"], names)
    assert scan.clean(with_null, Api.COMPLETIONS, null_candidates=True) == LONG
    assert scan.clean(reply(values, [*values[1:], value], names), Api.COMPLETIONS, null_candidates=True) is None


@pytest.mark.parametrize("name", ["null", ":return", "NaN", "Infinity", ":\\n", '\\":\\n', "n", "\\n", "://n"])
def test_names_that_look_like_what_is_no_number_cost_nothing(name: str) -> None:
    values = ["-0.25"] * LONG
    assert scan.clean(reply(values, names=[name] * LONG), Api.COMPLETIONS) == LONG


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(width=64), min_size=20, max_size=60))
def test_the_list_is_proved_only_if_every_value_is_usable(numbers: list[float]) -> None:
    raw = f"[{','.join(map(repr, numbers))}]".encode()
    expected = len(numbers) if all(FLOOR < number <= TOLERANCE for number in numbers) else None
    assert scan._numbers(raw) == expected


@pytest.mark.parametrize("between", ["", " ", "\n"])
@pytest.mark.parametrize("where", ['"a"', '{"a":-0.25}'])
def test_a_second_list_of_the_same_name_is_not_overlooked(where: str, between: str) -> None:
    body = reply(["-0.25"] * LONG).decode()
    hidden = f'{where}]{between},"token_logprobs":[-9999.0],"x":[{where},'
    for at in (body.index(where), body.rindex(where)):
        changed = (body[:at] + hidden + body[at:]).encode()
        assert scan.clean(changed, Api.COMPLETIONS, null_candidates=True) is None


@pytest.mark.parametrize(
    ("inside", "clean"),
    [("1,22,333", True), ("", True), ("null", True), ("1,,2", False), ("1,", False), ('1],"token_ids":[1', False)]
    + [('1],"logprobs":{"token_logprobs":[null]},"x":[1', False)],
)
def test_the_prompts_ids_are_skipped_only_where_they_are_ids(inside: str, clean: bool) -> None:
    body = reply(["-0.25"] * LONG).replace(b"]}]}", b'],"prompt_token_ids":[' + inside.encode() + b"]}]}")
    assert (scan.clean(body, Api.COMPLETIONS) is not None) is clean


@pytest.mark.parametrize("name", ["]", "],", "] ", "]]}},", '],\\"'])
def test_brackets_in_names_cost_nothing(name: str) -> None:
    assert scan.clean(reply(["-0.25"] * LONG, names=[name] * LONG), Api.COMPLETIONS) == LONG
