"""The JSON that is written in place of unscorable positions. Core."""

from collections.abc import Iterable

from proxy import jsonbody, jsonspan
from proxy.api import Api
from proxy.unscorable import Encoding, Reason


def row(encoding: Encoding, count: int) -> bytes:
    """A list of ``count`` marks."""
    return b"[" + b",".join([encoding.mark] * count) + b"]"


def positions(marked: dict[Reason, list[int]]) -> bytes:
    """Value of ``unscorable``: reason to positions."""
    return jsonbody.dumps({reason.value: at for reason, at in marked.items()})


def entry(api: Api, encoding: Encoding, token_id: int | None) -> bytes:
    """One marked entry of a chat or generate list; a token is named as vLLM names ids."""
    if api is Api.GENERATE and token_id is not None:
        return b'{"token_id":%d,"logprob":%b,"rank":null,"top_logprobs":[]}' % (token_id, encoding.mark)
    name = b"" if token_id is None else b"token_id:%d" % token_id
    return b'{"token":"%b","logprob":%b,"bytes":null,"top_logprobs":[]}' % (name, encoding.mark)


def entries(api: Api, encoding: Encoding, ids: Iterable[int]) -> bytes:
    return b",".join(entry(api, encoding, token_id) for token_id in ids)


def logprobs_object(api: Api, encoding: Encoding, ids: list[int], reason: Reason) -> bytes:
    """A logprobs object in which every position is unscorable."""
    tail = b',"unscorable":' + positions({reason: list(range(len(ids)))}) + b"}"
    if api is Api.COMPLETIONS:
        names = b",".join(b'"token_id:%d"' % token_id for token_id in ids)
        return b'{"token_logprobs":' + row(encoding, len(ids)) + b',"tokens":[' + names + b"]" + tail
    return b'{"content":[' + entries(api, encoding, ids) + b"]" + tail


def insert_member(buf: bytes, span: jsonspan.Span, member: bytes) -> tuple[int, int, bytes]:
    """The edit that makes ``member`` the first one of the object at ``span``."""
    start = jsonspan.after_space(buf, span[0] + 1)
    return start, start, member if buf[start : start + 1] == b"}" else member + b","
