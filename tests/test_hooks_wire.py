"""decode_logprobs and pad_logprobs: every form in which a logprob travels, to float32 with NaN where unscorable."""

import json
import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from trainer_hooks import decode_logprobs, pad_logprobs  # noqa: E402
from trainer_hooks.masking import FLOOR, mark_unscorable, scorable, stored_floor  # noqa: E402

NAN = math.nan

UNSCORABLE = [
    pytest.param(None, id="null"),
    pytest.param(NAN, id="NaN"),
    pytest.param("NaN", id="string NaN"),
    pytest.param("Infinity", id="string Infinity"),
    pytest.param("-Infinity", id="string -Infinity"),
    pytest.param(math.inf, id="Infinity"),
    pytest.param(-math.inf, id="-Infinity"),
    pytest.param(10**400, id="integer over a double"),
    pytest.param(1e300, id="over float32"),
    pytest.param(-9999.0, id="floor"),
    pytest.param(-9999, id="floor as an integer"),
    pytest.param(-1e30, id="below the floor"),
    pytest.param(9999.0, id="ceiling"),
    pytest.param(1.0, id="positive"),
    pytest.param(0.0010000001, id="just over the tolerance"),
]
SCORABLE = [
    pytest.param(-0.5, -0.5, id="plain"),
    pytest.param(0, 0.0, id="integer zero"),
    pytest.param(-3, -3.0, id="integer"),
    pytest.param(0.001, 0.001, id="at the tolerance"),
    pytest.param(-9998.9, -9998.9, id="just above the floor"),
    pytest.param(-5e-324, 0.0, id="denormal"),
]
MALFORMED = [
    pytest.param("abc", id="string"),
    pytest.param("", id="empty string"),
    pytest.param("-0.5", id="number in a string"),
    pytest.param("nan", id="misspelled"),
    pytest.param(True, id="bool"),
    pytest.param([], id="array"),
    pytest.param({"logprob": -1.0}, id="object"),
]


def same(left: Any, right: Any) -> bool:
    return bool(torch.equal(torch.nan_to_num(left, nan=77.0), torch.nan_to_num(right, nan=77.0)))


@pytest.mark.parametrize("value", UNSCORABLE)
def test_unscorable_value_becomes_nan_and_its_neighbours_stay(value: object) -> None:
    assert same(decode_logprobs([-0.5, value, -0.7]), torch.tensor([-0.5, NAN, -0.7]))


@pytest.mark.parametrize(("value", "expected"), SCORABLE)
def test_scorable_value_stays(value: object, expected: float) -> None:
    assert decode_logprobs([value]).tolist() == torch.tensor([expected]).tolist()


@pytest.mark.parametrize("value", MALFORMED)
def test_malformed_value_is_refused_with_its_position(value: object) -> None:
    with pytest.raises(ValueError, match="^logprob 2 is "):
        decode_logprobs([-0.5, None, value])


@pytest.mark.parametrize("mark", ["9999.0", "NaN", '"NaN"', "null"], ids=["ceiling", "literal", "string", "null"])
def test_the_four_encodings_mean_the_same(mark: str) -> None:
    values = json.loads(f"[-0.25,{mark},-1.5]")
    assert same(decode_logprobs(values), torch.tensor([-0.25, NAN, -1.5]))


def test_result_is_float32_on_the_asked_device() -> None:
    decoded = decode_logprobs([-0.5], device="cpu")
    assert (decoded.dtype, decoded.device.type, tuple(decoded.shape)) == (torch.float32, "cpu", (1,))


def test_empty_completion_of_an_abort_is_legal() -> None:
    assert tuple(decode_logprobs([]).shape) == (0,)


@pytest.mark.parametrize("logprobs", [[-0.1, -0.2], [-0.1, -0.2, -0.3, -0.4]], ids=["short", "long"])
def test_list_that_does_not_fit_its_tokens_is_refused(logprobs: list[float]) -> None:
    with pytest.raises(ValueError, match=f"^{len(logprobs)} logprobs for 3 sampled tokens"):
        decode_logprobs(logprobs, length=3)


def test_tensor_and_numpy_numbers_are_taken() -> None:
    assert same(decode_logprobs(torch.tensor([-0.5, -9999.0])), torch.tensor([-0.5, NAN]))
    numpy = pytest.importorskip("numpy")
    assert same(decode_logprobs(list(numpy.float32([-0.5, numpy.nan]))), torch.tensor([-0.5, NAN]))


@given(st.lists(st.one_of(st.none(), st.floats(), st.integers(), st.sampled_from(["NaN", "Infinity"]))))
def test_as_many_come_out_as_went_in_and_only_usable_numbers(values: list[Any]) -> None:
    decoded = decode_logprobs(values)
    assert len(decoded) == len(values)
    for value, result in zip(values, decoded.tolist(), strict=True):
        usable = isinstance(value, int | float) and -9999.0 < value <= 1e-3
        assert math.isnan(result) != usable
        if usable:
            assert result == torch.tensor(float(value)).item()


def test_pad_fills_the_end_with_nan() -> None:
    padded = pad_logprobs([[-0.5, None], [], [-1.0, -2.0, "NaN"]])
    expected = torch.tensor([[-0.5, NAN, NAN], [NAN, NAN, NAN], [-1.0, -2.0, NAN]])
    assert same(padded, expected)
    assert padded.dtype is torch.float32


def test_pad_of_nothing() -> None:
    assert tuple(pad_logprobs([]).shape) == (0, 0)
    assert tuple(pad_logprobs([[], []]).shape) == (2, 0)


def test_pad_names_row_and_position() -> None:
    with pytest.raises(ValueError, match="^row 1: logprob 2 is 'x'"):
        pad_logprobs([[-0.5], [-0.5, None, "x"]])
    with pytest.raises(ValueError, match="^row 1: 1 logprobs for 2 sampled tokens"):
        pad_logprobs([[-0.5], [-0.5]], lengths=[1, 2])
    with pytest.raises(ValueError, match="^1 lengths for 2 rows"):
        pad_logprobs([[-0.5], [-0.5]], lengths=[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_floor_is_recognised_as_every_dtype_stores_it(dtype: Any) -> None:
    assert stored_floor(dtype) == torch.tensor(FLOOR, dtype=dtype).item()
    values = torch.tensor([-0.5, FLOOR, 9999.0, -9000.0], dtype=dtype)
    assert scorable(values, stored_floor(dtype)).tolist() == [True, False, False, True]
    assert mark_unscorable(values).isnan().tolist() == [False, True, True, False]
