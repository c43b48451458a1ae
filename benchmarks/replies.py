"""Recorded-like replies of vLLM's two front ends, built from a seed: the same bytes on every machine.

The logprobs are spread as a trained model's are: half of the tokens are nearly certain (1e-7 and the like, some exactly
0.0), the rest reach down to -12. Layouts, key order and float spelling are those of tests/fixtures.
"""

import json
import random
import struct
from collections.abc import Callable
from enum import StrEnum

SIZES = (128, 1024, 8192)
LONG = 32768
PROMPT = [1000 + 7 * i for i in range(512)]
REQUEST = json.dumps(
    {
        "model": "m",
        "prompt": PROMPT,
        "max_tokens": 32768,
        "temperature": 1.0,
        "logprobs": 0,
        "return_token_ids": True,
    },
    separators=(",", ":"),
).encode()
STREAM_REQUEST = REQUEST[:-1] + b',"stream":true}'
# About as often as in English text: what is looked for in names (NaN, null) must be met there as often as in life.
_LETTERS = 4 * "eeeeeeetttttaaaaaooooiiiinnnnsssshhhhrrrrddllluuccmmwwffggyyppbbvkjxqz" + "NIASTCW0123"
CHAT_REQUEST = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"logprobs":true,"top_logprobs":0}'


class Bad(StrEnum):
    """What stands at an unscorable position."""

    FLOOR = "floor"
    NULL = "null"


def completion(tokens: int, *, rust: bool = False, bad: Bad | None = None, every: int = 1000, seed: int = 1) -> bytes:
    """A /v1/completions reply; with ``bad`` every ``every``-th token is unscorable."""
    rng = random.Random(seed)
    pieces = [_piece(rng) for _ in range(tokens)]
    ids = [rng.randrange(150_000) for _ in range(tokens)]
    values = [_spell(_logprob(rng), rust) for _ in range(tokens)]
    if bad is not None:
        for i in range(min(every, tokens) // 2, tokens, every):
            values[i] = "-9999.0" if bad is Bad.FLOOR else "null"
    offsets, at = [], 0
    for piece in pieces:
        offsets.append(at)
        at += len(piece)
    parts = {
        "text_offset": ",".join(map(str, offsets)),
        "token_logprobs": ",".join(values),
        "tokens": ",".join(f'"{piece}"' for piece in pieces),
        "top_logprobs": ",".join(f'{{"{piece}":{value}}}' for piece, value in zip(pieces, values, strict=True)),
    }
    order = ("tokens", "token_logprobs", "top_logprobs", "text_offset") if rust else tuple(parts)
    lists = ",".join(f'"{name}":[{parts[name]}]' for name in order)
    prompt = ",".join(map(str, PROMPT))
    tail = (
        f',"prompt_token_ids":[{prompt}]'
        if rust
        else f',"prompt_logprobs":null,"prompt_token_ids":[{prompt}],"routed_experts":null'
    )
    choice = (
        f'{{"index":0,"text":"{"".join(pieces)}","logprobs":{{{lists}}},"finish_reason":"length","stop_reason":null,'
        f'"token_ids":[{",".join(map(str, ids))}]{tail}}}'
    )
    return _envelope("text_completion", choice, tokens)


def chat(tokens: int, *, seed: int = 1) -> bytes:
    """A /v1/chat/completions reply of the Python front end."""
    rng = random.Random(seed)
    entries, content = [], []
    for _ in range(tokens):
        piece = _piece(rng)
        value = _spell(_logprob(rng), False)
        codes = ",".join(str(byte) for byte in piece.encode())
        entries.append(f'{{"token":"{piece}","logprob":{value},"bytes":[{codes}],"top_logprobs":[]}}')
        content.append(piece)
    choice = (
        f'{{"index":0,"message":{{"role":"assistant","content":"{"".join(content)}","refusal":null}},'
        f'"logprobs":{{"content":[{",".join(entries)}]}},"finish_reason":"length","stop_reason":null,"token_ids":null}}'
    )
    return _envelope("chat.completion", choice, tokens)


def event(seed: int) -> bytes:
    """One event of a /v1/completions stream: one token."""
    rng = random.Random(seed)
    piece, value, token_id = _piece(rng), _spell(_logprob(rng), False), rng.randrange(150_000)
    return (
        'data: {"id":"cmpl-a80c1b0def8f853c","object":"text_completion","created":1795988694,"model":"m","choices":'
        f'[{{"index":0,"text":"{piece}","logprobs":{{"text_offset":[{seed}],"token_logprobs":[{value}],"tokens":["{piece}"],'
        f'"top_logprobs":[{{"{piece}":{value}}}]}},"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,'
        f'"token_ids":[{token_id}]}}]}}\n\n'
    ).encode()


def named() -> dict[str, Callable[[], bytes]]:
    """Every reply the upstream can serve, by the name that the request header X-Reply asks for."""
    return {
        **{f"clean-{size}": lambda size=size: completion(size) for size in (*SIZES, LONG)},
        "clean-rust-1024": lambda: completion(1024, rust=True),
        "clean-rust-8192": lambda: completion(8192, rust=True),
        "clean-chat-1024": lambda: chat(1024),
        "clean-chat-8192": lambda: chat(8192),
        **{
            f"{bad}-{share}-{size}": lambda bad=bad, every=every, size=size: completion(
                size, rust=bad is Bad.FLOOR, bad=bad, every=every
            )
            for bad in Bad
            for share, every in (("1in1000", 1000), ("all", 1))
            for size in (1024, LONG)
        },
    }


def _envelope(kind: str, choice: str, tokens: int) -> bytes:
    return (
        f'{{"id":"cmpl-9c865f11232af036","object":"{kind}","created":1795988632,"model":"m","choices":[{choice}],'
        '"service_tier":null,"system_fingerprint":"vllm-0.32.0-3213d402","usage":{"prompt_tokens":512,'
        f'"total_tokens":{tokens + 512},"completion_tokens":{tokens},"prompt_tokens_details":null}},'
        '"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}'
    ).encode()


def _piece(rng: random.Random) -> str:
    if rng.random() < 0.01:
        return rng.choice(("\\n", '\\"', "\\\\", "é", "[", "]", "{", "}", ","))
    return rng.choice(("", " ", " ")) + "".join(rng.choices(_LETTERS, k=rng.choice((1, 2, 2, 3, 4))))


def _logprob(rng: random.Random) -> float:
    kind = rng.random()
    if kind < 0.02:
        return 0.0
    if kind < 0.5:
        return -(10 ** rng.uniform(-6, -1))
    return -min(12.0, rng.expovariate(0.8))


def _spell(value: float, rust: bool) -> str:
    """Python writes a float32 with the digits of a double, Rust with its own."""
    single: float = struct.unpack("f", struct.pack("f", value))[0]
    if not rust:
        return repr(single)
    for digits in range(1, 10):
        short = float(f"{single:.{digits}g}")
        if struct.pack("f", short) == struct.pack("f", single):
            return repr(short)
    return repr(single)
