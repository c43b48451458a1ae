"""What a stream does not carry, and how a reassembled reply is compared with vLLM's own non-streamed one."""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from proxy.api import Api
from proxy.assemble import Assembly

PLAIN = {"prompt": [1, 2, 3], "logprobs": 0}

# Where a reassembled reply may differ from the non-streamed one of the same seed. The README has the same list.
NOT_CARRIED = {
    "id": "of the streamed run",
    "created": "of the streamed run",
    "metrics": "of the streamed run: times",
    "prompt_logprobs": "null; echo with logprobs makes vLLM add them to the reply of a request that did not ask",
    "choices[].prompt_logprobs": "null; the same for completions",
    "choices[].routed_experts": "null",
    "kv_transfer_params": "null",
    "ec_transfer_params": "null",
    "choices[].message.tool_calls[].id": "random in every reply",
    "usage.prompt_tokens_details.cached_tokens": "of the first prompt, not the last, where there are several",
}


def chunk(**choice: Any) -> bytes:
    """A completions chunk of choice 0 unless told otherwise; other keys replace the usual ones."""
    return json.dumps({"choices": [{"index": 0, "text": "", "finish_reason": None} | choice]}).encode()


def delta(index: int = 0, *, finish_reason: str | None = None, **delta: Any) -> bytes:
    return json.dumps({"choices": [{"index": index, "delta": delta, "finish_reason": finish_reason}]}).encode()


def tokens(*logprobs: Any, **more: Any) -> bytes:
    return chunk(logprobs={"token_logprobs": list(logprobs), "tokens": ["t"] * len(logprobs)}, **more)


def entries(*logprobs: Any, finish_reason: str | None = None, index: int = 0) -> bytes:
    content = [{"token": "t", **({} if lp == "absent" else {"logprob": lp})} for lp in logprobs]
    choice = {"index": index, "delta": {}, "logprobs": {"content": content}, "finish_reason": finish_reason}
    return json.dumps({"choices": [choice]}).encode()


def folded(api: Api, request: dict[str, Any], *data: bytes) -> Assembly:
    assembly = Assembly(api, request)
    for one in data:
        assembly.feed(one)
    return assembly


def fold(api: Api, request: dict[str, Any], body: bytes) -> Assembly:
    """An assembly fed with every event of a stream that arrived whole."""
    assembly = Assembly(api, request)
    for data in events(body):
        if data == b"[DONE]":
            assembly.done()
        else:
            assembly.feed(data)
    return assembly


def events(body: bytes) -> Iterator[bytes]:
    """Data of vLLM's events: one line each, LF only. The proxy's own parser takes more than that."""
    for line in body.split(b"\n"):
        if line.startswith(b"data: "):
            yield line.removeprefix(b"data: ")


def differences(ours: Any, vllms: Any, *, path: str = "", except_for: Iterable[str] = NOT_CARRIED) -> list[str]:
    """Paths at which two replies differ in a value, in a length, or in the order of keys, save the exempt ones."""
    if _pattern(path) in except_for or ours == vllms and not isinstance(ours, dict | list):
        return []
    if isinstance(ours, dict) and isinstance(vllms, dict):
        # Names of tokens are keys as well, and the Rust front end shuffles them anew in every reply.
        shuffled = "top_logprobs" in path
        same = set(ours) == set(vllms) if shuffled else list(ours) == list(vllms)
        found = [] if same else [f"{path}: keys {list(ours)} for {list(vllms)}"]
        pairs = [(f"{path}.{key}".removeprefix("."), ours[key], vllms[key]) for key in ours if key in vllms]
    elif isinstance(ours, list) and isinstance(vllms, list):
        found = [] if len(ours) == len(vllms) else [f"{path}: {len(ours)} elements for {len(vllms)}"]
        pairs = [(f"{path}[{i}]", a, b) for i, (a, b) in enumerate(zip(ours, vllms, strict=False))]
    else:
        return [f"{path}: {ours!r} for {vllms!r}"]
    return found + [text for where, a, b in pairs for text in differences(a, b, path=where, except_for=except_for)]


def _pattern(path: str) -> str:
    return re.sub(r"\[\d+\]", "[]", path)
