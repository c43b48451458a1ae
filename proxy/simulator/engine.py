"""The simulated model: tokens, logprobs and faults, every one a pure function of seed, prompt and position.

Streamed or not, alone or among others, with or without logprobs: the same request and seed give the same tokens.
"""

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b

from proxy.simulator.config import SimulatorConfig
from proxy.simulator.vocabulary import END_OF_TEXT, EOS, PARTIAL_IDS, WORD_IDS, Detokenizer

MASK = (1 << 64) - 1
MAX_RANK = 20  # the deepest rank that is ever sampled
NAN = float("nan")
NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class Candidate:
    token_id: int
    logprob: float  # NaN and -inf are possible: writing them is the front end's affair
    rank: int  # 0 where vLLM has none (NaN, and not among the top)


@dataclass(frozen=True, slots=True)
class Step:
    """One sampled token; `candidates` holds it first, and is empty where the engine delivered no logprobs."""

    token_id: int
    token: str
    delta: str
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """What a request asks of the engine, the same for all its prompts and samples."""

    max_tokens: int = 16
    temperature: float = 1.0
    seed: int = 0  # the shell draws one where the client sent none
    logprobs: int = 0  # candidates besides the sampled token
    extra_ids: tuple[int, ...] = ()  # logprob_token_ids: candidates instead of the top ones
    stops: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    include_stop: bool = False
    skip_special: bool = True
    ignore_eos: bool = False
    min_tokens: int = 0
    forced: tuple[int, ...] = ()
    allowed: frozenset[int] | None = None
    banned: frozenset[int] = frozenset()
    nan_at: frozenset[int] = frozenset()  # faults a request orders for itself (vllm_xargs), for tests
    missing_at: frozenset[int] = frozenset()
    floor_at: frozenset[int] = frozenset()


def single(value: float) -> float:
    """The nearest float32: what vLLM's tensors hold."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def key_of(*parts: object) -> int:
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "big")


def uniform(key: int, step: int, lane: int) -> float:
    """A number in [0, 1) that depends on nothing else (splitmix64)."""
    z = (key + step * 0x9E3779B97F4A7C15 + lane * 0xD1B54A32D192ED03) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return float((z ^ (z >> 31)) >> 11) * 2.0**-53


@cache
def sampleable(poisoned: tuple[int, ...], allowed: frozenset[int] | None, banned: frozenset[int]) -> tuple[int, ...]:
    """Words, and a few lone bytes so that some tokens have no text of their own, as in real vocabularies."""
    if allowed:
        return tuple(sorted(allowed))
    out = banned.union(poisoned)
    return tuple(i for i in (*WORD_IDS, *PARTIAL_IDS[:6]) if i not in out) or (END_OF_TEXT,)


@dataclass(slots=True)
class Choice:
    """One sequence being generated; `advance` is one engine step."""

    config: SimulatorConfig
    sampling: Sampling
    prompt: Prompt
    index: int
    sample: int = 0
    contaminated: bool = False  # NaN from the first token for a reason outside the prompt
    steps: list[Step] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    _source: Iterator[Step] | None = None

    @property
    def poisoned(self) -> bool:
        """The whole prompt reads as NaN."""
        return self.contaminated or not set(self.config.poisoned_token_ids).isdisjoint(self.prompt.ids)

    def advance(self) -> None:
        if self._source is None:
            self._source = self._generate()
        step = next(self._source)
        self.steps.append(step)
        searched = max(0, len(self.text) - max(map(len, self.sampling.stops), default=0))
        self.text += step.delta
        count = len(self.steps)
        if count >= self.sampling.min_tokens and self._stopped(step.token_id, searched):
            return
        if count >= self.sampling.max_tokens:
            self.finish_reason = "length"

    def visible(self) -> str:
        """The text a stream may show: what could still become a stop string is held back."""
        if self.finish_reason is not None or self.sampling.include_stop or not self.sampling.stops:
            return self.text
        return self.text[: max(0, len(self.text) - max(map(len, self.sampling.stops)) + 1)]

    def _stopped(self, token_id: int, searched: int) -> bool:
        if token_id == EOS and not self.sampling.ignore_eos:
            self.finish_reason = "stop"
        elif token_id in self.sampling.stop_ids:
            self.finish_reason, self.stop_reason = "stop", token_id
        elif found := [(at, s) for s in self.sampling.stops if (at := self.text.find(s, searched)) >= 0]:
            at, stop = min(found)
            self.text = self.text[: at + len(stop) * self.sampling.include_stop]
            self.finish_reason, self.stop_reason = "stop", stop
        return self.finish_reason is not None

    def _generate(self) -> Iterator[Step]:
        config, sampling = self.config, self.sampling
        drawn = () if sampling.temperature == 0 else (sampling.seed, self.sample)
        key = key_of(config.seed, self.prompt.ids, *drawn)
        ids = sampleable(config.poisoned_token_ids, sampling.allowed, sampling.banned)
        text = Detokenizer(sampling.skip_special)
        nan_from = 0 if self.poisoned else _persistent_nan(config, sampling, key)
        position = 0
        while True:
            if position >= nan_from:
                candidates = _nan_candidates(sampling)
            else:
                candidates = _candidates(config, sampling, key, position, ids)
            token_id = candidates[0].token_id
            if token_id in config.poisoned_token_ids:
                nan_from = min(nan_from, position + 1)
            if position < nan_from:
                candidates = _faulty(config, sampling, key, position, candidates)
            token, delta = text.feed(token_id)
            yield Step(token_id, token, delta, candidates)
            position += 1


def prompt_logprobs(choice: Choice, count: int) -> list[tuple[Candidate, ...]]:
    """Candidates of the prompt's tokens from the second on; all NaN in a poisoned prompt, as in vLLM's attention."""
    key = key_of(choice.config.seed, choice.prompt.ids, "prompt")
    poisoned, rows = choice.poisoned, []
    for position, token_id in enumerate(choice.prompt.ids[1:], 1):
        if poisoned:
            row = [Candidate(token_id, NAN, 0), *(Candidate(i, NAN, i + 1) for i in range(count))]
        else:
            own = single(-6.0 - uniform(key, position, 0))
            row = [Candidate(token_id, own, 40 + position % 300)]
            row += [Candidate(WORD_IDS[-1 - i], single(-5.0 - 0.05 * i), i + 1) for i in range(count)]
        rows.append(tuple(row))
    return rows


def _persistent_nan(config: SimulatorConfig, sampling: Sampling, key: int) -> int:
    if uniform(key, 0, 8) >= config.nan_persistent:
        return NEVER
    return int(uniform(key, 1, 8) * max(1, sampling.max_tokens))


def _candidates(
    config: SimulatorConfig, sampling: Sampling, key: int, position: int, ids: tuple[int, ...]
) -> tuple[Candidate, ...]:
    """Stick-breaking: rank r takes 35 to 95 % of what the ranks before it left; the sampled token comes first."""
    wanted = min(len(ids), max(sampling.logprobs, MAX_RANK if sampling.temperature else 1))
    base = int(uniform(key, position, 0) * len(ids))
    draw = uniform(key, position, 1) if sampling.temperature else 0.0
    left, sampled, ranked = 1.0, 0, []
    for rank in range(1, wanted + 1):
        share = 0.35 + 0.6 * uniform(key, position, 16 + rank)
        ranked.append(Candidate(ids[(base + rank) % len(ids)], single(math.log(left * share)), rank))
        left *= 1.0 - share
        if not sampled and (1.0 - left > draw or rank == wanted):
            sampled = rank
        if sampled and rank >= sampling.logprobs:
            break
    chosen = ranked[sampled - 1]
    if position >= sampling.min_tokens and uniform(key, position, 2) < config.eos_rate and not sampling.ignore_eos:
        chosen = Candidate(EOS, chosen.logprob, chosen.rank)
    if sampling.forced:
        forced = sampling.forced[int(uniform(key, position, 3) * len(sampling.forced))]
        chosen = Candidate(forced, single(-6.0 - draw), 249)
    if sampling.extra_ids:
        others = [Candidate(i, single(-6.0 - uniform(key, position, 1000 + i)), 100 + i) for i in sampling.extra_ids]
    else:
        others = ranked[: sampling.logprobs]
    return (chosen, *(c for c in others if c.token_id != chosen.token_id))


def _nan_candidates(sampling: Sampling) -> tuple[Candidate, ...]:
    """argmax over NaN is 0, the top ids are 0, 1, 2, …; the sampled one has a rank only where the top is asked for."""
    top = sampling.extra_ids or tuple(range(sampling.logprobs))
    sampled = Candidate(END_OF_TEXT, NAN, 1 if sampling.logprobs else 0)
    return (sampled, *(Candidate(i, NAN, rank) for rank, i in enumerate(top, 1) if i != END_OF_TEXT))


def _faulty(
    config: SimulatorConfig, sampling: Sampling, key: int, position: int, clean: tuple[Candidate, ...]
) -> tuple[Candidate, ...]:
    draw = uniform(key, position, 9)
    if position in sampling.nan_at or draw < config.nan_rate:
        rank = clean[0].rank if sampling.logprobs else 0
        return (Candidate(clean[0].token_id, NAN, rank), *(Candidate(c.token_id, NAN, c.rank) for c in clean[1:]))
    draw -= config.nan_rate
    if position in sampling.missing_at or 0.0 <= draw < config.missing_rate:
        return ()
    draw -= config.missing_rate
    if position in sampling.floor_at or 0.0 <= draw < config.floor_rate:
        return (Candidate(clean[0].token_id, -math.inf, clean[0].rank), *clean[1:])
    return clean
