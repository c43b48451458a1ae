"""Recognises at one match a clean event of one token, as nearly all events of a stream are, and chat's lists. Core.

The patterns spell out the whole of it as vLLM's two servers write it, so what matches is JSON of that shape and holds
usable logprobs; whatever does not match is looked at by others.
"""

import re

from proxy.api import Api

_STRING = rb'"[^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*+)*+"'
# Usable for certain: at most three digits before the point, no exponent but a negative one, no positive but 0.
_LOGPROB = rb"(?:-(?:0|[1-9]\d{0,2})(?:\.\d++)?+(?:e-\d++)?+|0\.0)"
# Of a candidate only that it is finite.
_NUMBER = rb"-?(?:0|[1-9]\d{0,15}+)(?:\.\d++)?+(?:[eE]-\d++)?+"
_IDS = rb"\[(?:\d++(?:,\d++)*+)?+\]"
_OR_NULL = rb"(?:null|%b)"
_NAME = rb'(?:"token_id:(?P<name>\d++)"|(?!"token_id:)' + _STRING + rb")"
_TOP = rb"\{" + _STRING + rb":" + _NUMBER + rb"(?:," + _STRING + rb":" + _NUMBER + rb")*+\}"
_BYTES = rb'"bytes":' + _OR_NULL % _IDS
_ENTRY = rb'\{"token":' + _STRING + rb',"logprob":' + _NUMBER + rb"," + _BYTES + rb"\}"

_HEAD = rb'\{(?:"(?:id|object|model)":' + _STRING + rb',|"created":\d++,)*+"choices":\[\{"index":(?P<choice>\d{1,9}+),'
_TAIL = (
    rb'(?:,"finish_reason":' + _OR_NULL % _STRING + rb")?+"
    rb'(?:,"stop_reason":(?:null|\d++|' + _STRING + rb"))?+"
    rb'(?:,"prompt_token_ids":' + _OR_NULL % _IDS + rb")?+"
    rb'(?:,"token_ids":(?:null|\[(?P<id>\d++)\]))?+\}\]'
    rb'(?:,"system_fingerprint":' + _OR_NULL % _STRING + rb")?+\}"
)
_PYTHON = (
    rb'"text_offset":\[\d++\],"token_logprobs":\[' + _LOGPROB + rb'\],"tokens":\[' + _NAME + rb"\],"
    rb'"top_logprobs":\[' + _TOP + rb"\]"
)
_RUST = (
    rb'"tokens":\[' + _NAME.replace(b"P<name>", b"P<rust>") + rb'\],"token_logprobs":\[' + _LOGPROB + rb"\],"
    rb'"top_logprobs":\[' + _TOP + rb'\],"text_offset":\[\d++\]'
)
_COMPLETION = re.compile(
    _HEAD + rb'"text":' + _STRING + rb',"logprobs":\{(?:' + _PYTHON + rb"|" + _RUST + rb")\}" + _TAIL
)
_CHAT = re.compile(
    _HEAD + rb'"delta":\{(?:"content":' + _STRING + rb')?+\},"logprobs":\{"content":\[\{"token":' + _NAME + rb","
    rb'"logprob":' + _LOGPROB + rb"," + _BYTES + rb","
    rb'"top_logprobs":\[(?:' + _ENTRY + rb"(?:," + _ENTRY + rb")*+)?+\]\}\]\}" + _TAIL
)

_CHAT_TOKEN = (
    rb'\{"token":(?!"token_id:)' + _STRING + rb',"logprob":' + _LOGPROB + rb"," + _BYTES + rb","
    rb'"top_logprobs":\[(?:' + _ENTRY + rb"(?:," + _ENTRY + rb")*+)?+\]\}"
)
_CHAT_TOKENS = re.compile(rb"(?:" + _CHAT_TOKEN + rb"(?:," + _CHAT_TOKEN + rb")*+)?+")


def chat_tokens(entries: bytes) -> int | None:
    """Number of entries of a chat list, whose brackets are not there, if each logprob is proved usable; else None."""
    return entries.count(b'"top_logprobs":') if _CHAT_TOKENS.fullmatch(entries) else None


def choice_of(data: bytes, api: Api) -> int | None:
    """The choice of an event with exactly one token, whose logprob is proved usable; else None."""
    match api:
        case Api.COMPLETIONS:
            found = _COMPLETION.fullmatch(data)
        case Api.CHAT:
            found = _CHAT.fullmatch(data)
        case _:
            return None
    if found is None:
        return None
    parts = found.groupdict()
    name = parts["name"] or parts.get("rust")
    if name is not None and parts["id"] not in (None, name):
        return None
    return int(parts["choice"])
