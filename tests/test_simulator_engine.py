"""The simulated model by itself: what depends on seed and position, what on faults, and how text grows."""

import math
from dataclasses import replace

import pytest

from proxy.simulator.config import SimulatorConfig
from proxy.simulator.engine import Choice, Prompt, Sampling, prompt_logprobs
from proxy.simulator.vocabulary import TOKENS, Detokenizer, decode, encode

PROMPT = Prompt((10, 11, 12), "()*")


def run(config: SimulatorConfig, sampling: Sampling, prompt: Prompt = PROMPT, sample: int = 0) -> Choice:
    choice = Choice(config, sampling, prompt, sample, sample)
    while choice.finish_reason is None:
        choice.advance()
    return choice


def ids(choice: Choice) -> list[int]:
    return [step.token_id for step in choice.steps]


def logprobs(choice: Choice) -> list[float | None]:
    return [step.candidates[0].logprob if step.candidates else None for step in choice.steps]


def test_vocabulary_is_512_different_tokens_and_reads_any_text() -> None:
    assert len(set(TOKENS)) == 512
    text = "far <|im_end|> \x00 žluťoučký 語 🙂\n the model"
    assert decode(encode(text), skip_special=False) == text


def test_characters_of_several_tokens_appear_whole() -> None:
    detokenizer = Detokenizer(skip_special=True)
    fed = [detokenizer.feed(token_id) for token_id in encode("é")] + [detokenizer.feed(b) for b in (111, 10)]
    assert fed == [("", ""), ("é", "é"), ("", ""), ("(", "\ufffd(")]


def test_same_seed_same_tokens_whatever_else_is_asked() -> None:
    plain = run(SimulatorConfig(), Sampling(max_tokens=64, seed=7))
    asked = run(SimulatorConfig(), Sampling(max_tokens=64, seed=7, logprobs=20))
    assert ids(plain) == ids(asked)
    assert logprobs(plain) == logprobs(asked)
    assert len({tuple(ids(run(SimulatorConfig(), Sampling(max_tokens=64, seed=s)))) for s in range(20)}) == 20
    assert ids(run(SimulatorConfig(), Sampling(max_tokens=64, seed=7), sample=1)) != ids(plain)


def test_greedy_needs_no_seed_and_takes_the_top() -> None:
    first = run(SimulatorConfig(), Sampling(max_tokens=32, temperature=0, seed=1, logprobs=3))
    assert ids(first) == ids(run(SimulatorConfig(), Sampling(max_tokens=32, temperature=0, seed=2)))
    assert [step.candidates[0].rank for step in first.steps] == [1] * 32


def test_candidates_are_a_distribution() -> None:
    for step in run(SimulatorConfig(), Sampling(max_tokens=200, seed=3, logprobs=5)).steps:
        sampled, *others = step.candidates
        assert len(step.candidates) == (5 if sampled.rank <= 5 else 6)
        assert sum(math.exp(c.logprob) for c in step.candidates) < 1 + 1e-6
        by_rank = sorted(step.candidates, key=lambda c: c.rank)
        assert len({c.token_id for c in step.candidates}) == len(step.candidates)
        assert [c.rank for c in by_rank[:5]] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("rate", "bad"),
    [("nan_rate", math.isnan), ("floor_rate", math.isinf), ("missing_rate", lambda value: value is None)],
    ids=["nan", "floor", "missing"],
)
def test_rates_are_per_token_and_touch_nothing_else(rate: str, bad: object) -> None:
    sampling = Sampling(max_tokens=5000, seed=1, logprobs=1)
    clean, faulty = run(SimulatorConfig(), sampling), run(replace(SimulatorConfig(), **{rate: 0.02}), sampling)
    assert ids(clean) == ids(faulty)
    assert clean.text == faulty.text
    values = logprobs(faulty)
    at = [i for i, value in enumerate(values) if value is None or not math.isfinite(value)]
    assert 70 <= len(at) <= 130
    assert all(bad(values[i]) for i in at)  # type: ignore[operator]
    assert [v for i, v in enumerate(logprobs(clean)) if i not in at] == [v for i, v in enumerate(values) if i not in at]


def test_a_poisoned_prompt_is_nan_throughout() -> None:
    choice = run(SimulatorConfig(), Sampling(max_tokens=4, seed=1, logprobs=2), Prompt((10, 300, 12), "(ar*"))
    assert ids(choice) == [0, 0, 0, 0]
    assert choice.text == ""
    assert [step.token for step in choice.steps] == ["<|endoftext|>"] * 4
    assert [[c.token_id for c in step.candidates] for step in choice.steps] == [[0, 1]] * 4
    assert all(math.isnan(c.logprob) for step in choice.steps for c in step.candidates)
    assert all(math.isnan(c.logprob) for row in prompt_logprobs(choice, 1) for c in row)


def test_a_sampled_poisoned_token_is_finite_and_poisons_what_follows() -> None:
    choice = run(SimulatorConfig(), Sampling(max_tokens=3, seed=1, forced=(300,)))
    assert ids(choice) == [300, 0, 0]
    assert [math.isnan(value) for value in logprobs(choice) if value is not None] == [False, True, True]


def test_clean_models_never_sample_a_poisoned_token() -> None:
    assert {300, 301, 302, 303, 304, 305, 306, 307}.isdisjoint(
        ids(run(SimulatorConfig(), Sampling(max_tokens=5000, seed=1)))
    )


def test_persistent_nan_runs_to_the_end_and_repeats_with_the_seed() -> None:
    config = SimulatorConfig(nan_persistent=0.5)
    starts = []
    for seed in range(200):
        bad = [math.isnan(value or 0.0) for value in logprobs(run(config, Sampling(max_tokens=20, seed=seed)))]
        again = [math.isnan(value or 0.0) for value in logprobs(run(config, Sampling(max_tokens=20, seed=seed)))]
        assert bad == again == sorted(bad)
        starts += [bad.index(True)] if any(bad) else []
    assert 70 <= len(starts) <= 130
    assert set(range(20)) == set(starts)


@pytest.mark.parametrize("include", [False, True], ids=["excluded", "included"])
def test_stop_strings_never_show_before_they_are_known(include: bool) -> None:
    stopped = 0
    for seed in range(100):
        sampling = Sampling(max_tokens=40, seed=seed, stops=("the", " model r", "in"), include_stop=include)
        choice, shown = Choice(SimulatorConfig(), sampling, PROMPT, 0), ""
        while choice.finish_reason is None:
            choice.advance()
            visible = choice.visible()
            assert visible.startswith(shown)
            shown = visible
        assert shown == choice.text
        stopped += choice.finish_reason == "stop"
        if choice.finish_reason == "stop":
            assert isinstance(choice.stop_reason, str)
            assert choice.text.endswith(choice.stop_reason) is include
    assert stopped > 50


def test_eos_ends_a_sequence_unless_ignored() -> None:
    config = SimulatorConfig(eos_rate=0.2)
    choice = run(config, Sampling(max_tokens=500, seed=1, min_tokens=3))
    assert (choice.finish_reason, choice.stop_reason, ids(choice)[-1]) == ("stop", None, 2)
    assert len(choice.steps) > 3
    assert run(config, Sampling(max_tokens=500, seed=1, ignore_eos=True)).finish_reason == "length"


def test_a_request_can_order_its_own_faults() -> None:
    sampling = Sampling(max_tokens=6, seed=1, nan_at=frozenset({1}), missing_at=frozenset({2}), floor_at=frozenset({4}))
    values = logprobs(run(SimulatorConfig(), sampling))
    assert math.isnan(values[1] or 0.0)
    assert values[2] is None
    assert values[4] == -math.inf
    assert [i for i, value in enumerate(values) if value is not None and math.isfinite(value)] == [0, 3, 5]
