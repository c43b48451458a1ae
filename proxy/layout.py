"""Where the lists of a completions choice lie in the bytes, as vLLM's two servers write them. Core.

Nothing is decoded. Why searching bytes is sound: in valid JSON a quote that is not escaped opens or closes a string. A
marker such as ``],"tokens":[`` holds plain quotes, so inside a string it would have to close it and go on with a bare
word, which is no JSON: where it is found, it is structure.
"""

from dataclasses import dataclass

Span = tuple[int, int]

LOGPROBS = b'"logprobs":'
_IDS = b',"token_ids":'

# Keys of a completions logprobs object in the order each server writes them, and what follows the last list.
_PYTHON = (b'{"text_offset":[', b'],"token_logprobs":[', b'],"tokens":[', b'],"top_logprobs":[', b']},"finish_reason":')
_RUST = (b'{"tokens":[', b'],"token_logprobs":[', b'],"top_logprobs":[', b'],"text_offset":[', b"]}")
_OF_NUMBERS = (_PYTHON[0], _PYTHON[1], _RUST[3])
_PROMPT_IDS = b',"prompt_token_ids":['
_SHORTLY = 100
_AFTER_LIST = b", \t\r\n"
_VALUES = b'"token_logprobs"'


@dataclass(frozen=True, slots=True)
class Lists:
    """Insides of the lists of one choice; ``ids`` is None where the choice has none. ``end``: of the last but ids."""

    offsets: Span
    values: Span
    names: Span
    top: Span
    ids: Span | None
    end: int

    @property
    def cuts(self) -> list[Span]:
        """All of them in the order in which they lie."""
        spans = [self.offsets, self.values, self.names, self.top]
        return sorted(spans if self.ids is None else [*spans, self.ids])


def completions(body: bytes, start: int) -> Lists | None:
    """The lists of the logprobs object at ``start``, None if it is not laid out as known."""
    layout = _PYTHON if body.startswith(_PYTHON[0], start) else _RUST
    if not body.startswith(layout[0], start):
        return None
    spans: list[Span] = []
    at = start + len(layout[0])
    for marker, following in zip(layout, layout[1:], strict=False):
        if marker in _OF_NUMBERS:  # no bracket in there: looking for one byte is looking at many at once
            end = body.find(b"]", at)
            if not body.startswith(following, end):
                return None
        else:
            end = body.find(following, at)
        if end < 0:
            return None
        spans.append((at, end))
        at = end + len(following)
    offsets, values, names, top = spans if layout is _PYTHON else (spans[3], spans[1], spans[0], spans[2])
    if _may_hide_values(body, names) or _may_hide_values(body, top):
        return None
    end = spans[-1][1]
    return Lists(offsets, values, names, top, ids(body, end), end)


def _may_hide_values(body: bytes, region: Span) -> bool:
    """A second list of that name, of which the last would count, may lie in a region that should hold strings alone.

    It could follow only a bracket that closes the first, and hardly any bracket in a name looks like that one.
    """
    at = body.find(b"]", *region)
    while at >= 0:
        if body[at + 1] in _AFTER_LIST:
            return body.find(_VALUES, *region) >= 0
        at = body.find(b"]", at + 1, region[1])
    return False


def ids(body: bytes, after: int) -> Span | None:
    """Inside of the list of token ids of the choice whose logprobs object ends at ``after + 2``."""
    found = body.find(_IDS, after)
    start = found + len(_IDS)
    between = body[after + 2 : found] if found >= 0 else b"{"
    if b"{" in between or b"}" in between or not body.startswith(b"[", start):
        return None
    return start + 1, body.find(b"]", start)


def prompt_ids(body: bytes, after: int) -> Span | None:
    """Inside of the prompt's list of ids shortly after ``after``, if it holds nothing else: no need to decode it."""
    start = body.find(_PROMPT_IDS, after, after + _SHORTLY) + len(_PROMPT_IDS)
    if start < len(_PROMPT_IDS):
        return None
    end = body.find(b"]", start)
    inside = body[start:end]
    return (start, end) if inside and counts(inside, inside.count(b",") + 1) else None


def counts(ids: bytes, count: int) -> bool:
    """``ids`` is so many token ids."""
    if ids.translate(None, b"0123456789") != b"," * (count - 1) or bool(ids) is not bool(count):
        return False
    return not (b",," in ids or ids.startswith(b",") or ids.endswith(b","))
