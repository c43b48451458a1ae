"""Hypothesis strategies: a reply as vLLM's Python server writes it, and chunks that a stream of it may come in."""

import json
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

Json = dict[str, Any]

HEAD: Json = {"id": "r-1", "created": 7, "model": "tiny"}
USAGE: Json = {"prompt_tokens": 3, "total_tokens": 8, "completion_tokens": 5}
PROMPT = [10, 11, 12]
LOGPROB = st.none() | st.floats(-20, 0)
ENDS = st.sampled_from([("length", None), ("stop", "x"), ("stop", 42), ("abort", None)])


@dataclass(frozen=True, slots=True)
class Streamed:
    """A request, the chunks of its stream, and what matters of the reply they add up to."""

    request: Json
    chunks: list[Json]
    choices: list[Json]


def cut(draw: st.DrawFn, whole: Any, pieces: int) -> list[Any]:
    """`whole` in that many slices, some of them empty."""
    points = sorted(draw(st.lists(st.integers(0, len(whole)), min_size=pieces - 1, max_size=pieces - 1)))
    return [whole[a:b] for a, b in zip([0, *points], [*points, len(whole)], strict=True)]


def interleaved(draw: st.DrawFn, streams: list[list[Json]]) -> list[Json]:
    """Chunks of all choices in an order that keeps each choice's own; neighbours may share a chunk."""
    waiting = [list(stream) for stream in streams]
    chunks: list[Json] = []
    for index in draw(st.permutations([index for index, stream in enumerate(streams) for _ in stream])):
        piece = waiting[index].pop(0)
        if chunks and draw(st.booleans()):
            chunks[-1]["choices"].append(piece)
        else:
            chunks.append(HEAD | {"choices": [piece]})
    return [*chunks, HEAD | {"choices": [], "usage": USAGE}]


def completion_logprobs(tokens: list[tuple[str, float | None, int]]) -> Json:
    return {
        "text_offset": [len(text) for text, _, _ in tokens],
        "token_logprobs": [logprob for _, logprob, _ in tokens],
        "tokens": [text for text, _, _ in tokens],
        "top_logprobs": [{text: logprob} for text, logprob, _ in tokens],
    }


@st.composite
def completions(draw: st.DrawFn) -> Streamed:
    """Text is cut independently of the tokens: vLLM holds text back that may yet become a stop string."""
    prompts, n = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    request = {"prompt": [PROMPT] * prompts, "n": n, "logprobs": 0, "return_token_ids": True}
    token = st.tuples(st.text(max_size=3), LOGPROB, st.integers(0, 511))
    choices, streams = [], []
    for index in range(prompts * n):
        tokens, text = draw(st.lists(token, min_size=1, max_size=6)), draw(st.text(max_size=9))
        finish_reason, stop_reason = draw(ENDS)
        end = {"finish_reason": finish_reason, "stop_reason": stop_reason}
        pieces = draw(st.integers(1, 5))
        stream = [
            {
                "index": index,
                "text": shown,
                "logprobs": completion_logprobs(some),
                "finish_reason": None,
                "stop_reason": None,
                "prompt_token_ids": None,
                "token_ids": [token_id for _, _, token_id in some],
            }
            for shown, some in zip(cut(draw, text, pieces), cut(draw, tokens, pieces), strict=True)
        ]
        stream[0]["prompt_token_ids"] = PROMPT
        stream[-1] |= end
        streams.append(stream)
        choices.append(
            {
                "index": index,
                "text": text,
                "logprobs": completion_logprobs(tokens),
                **end,
                "token_ids": [token_id for _, _, token_id in tokens],
                "prompt_logprobs": None,
                "prompt_token_ids": PROMPT,
                "routed_experts": None,
            }
        )
    return Streamed(request, interleaved(draw, streams), choices)


@st.composite
def chats(draw: st.DrawFn) -> Streamed:
    """Content, reasoning and the arguments of tool calls are cut independently of the tokens."""
    n = draw(st.integers(1, 3))
    request = {"n": n, "logprobs": True, "tools": [{}], "tool_choice": "required", "return_token_ids": True}
    choices, streams = [], []
    for index in range(n):
        entries = draw(st.lists(entry(), max_size=6))
        content, reasoning = draw(st.text(max_size=9)), draw(st.text(max_size=9))
        arguments = [json.dumps(one, ensure_ascii=False) for one in draw(st.lists(st.lists(st.integers()), max_size=2))]
        pieces = draw(st.integers(1, 5))
        cuts = [cut(draw, whole, pieces) for whole in (content, reasoning, entries, *arguments)]
        streams.append(chat_stream(index, cuts))
        message = {"role": "assistant", "content": content, "refusal": None, "annotations": None, "audio": None}
        message["function_call"] = None
        if arguments:
            message["tool_calls"] = [
                {"id": f"call-{i}", "type": "function", "function": {"name": "f", "arguments": text}}
                for i, text in enumerate(arguments)
            ]
        choices.append(
            {
                "index": index,
                "message": message | {"reasoning": reasoning or None},
                "logprobs": {"content": entries},
                "finish_reason": "length",
                "stop_reason": None,
                "token_ids": [1] * len(entries),
                "routed_experts": None,
            }
        )
    return Streamed(request, interleaved(draw, streams), choices)


def chat_stream(index: int, cuts: list[list[Any]]) -> list[Json]:
    """Role chunk, then chunk i with piece i of content, reasoning, logprob entries and each call's arguments."""
    stream: list[Json] = [{"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}]
    for step, (shown, thought, some, *parts) in enumerate(zip(*cuts, strict=True)):
        calls = [{"index": i, "function": {"arguments": part}} for i, part in enumerate(parts)]
        if step == 0:
            calls = [{**head(i), "function": {"name": "f"}} for i in range(len(parts))] + calls
        delta = {"content": shown, "reasoning": thought} | ({"tool_calls": calls} if calls else {})
        stream.append({"index": index, "delta": delta, "logprobs": {"content": some}, "token_ids": [1] * len(some)})
    return [
        *(piece | {"finish_reason": None} for piece in stream[:-1]),
        stream[-1] | {"finish_reason": "length", "stop_reason": None},
    ]


def head(index: int) -> Json:
    return {"id": f"call-{index}", "type": "function", "index": index}


@st.composite
def entry(draw: st.DrawFn) -> Json:
    """A chat entry; of a step with no logprobs vLLM streams neither the logprob nor the candidates."""
    if draw(st.integers(0, 9)) == 0:
        return {"token": "t", "bytes": [116]}
    return {"token": "t", "logprob": draw(LOGPROB), "bytes": [116], "top_logprobs": []}
