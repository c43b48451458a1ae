"""One reply on its way to the client: bytes in, bytes and findings out. Core. Created per reply, never shared."""

import re
from collections.abc import Callable

from proxy import direct, events, logprobs, quick, scan
from proxy.api import Api, Asked
from proxy.errors import BadReply
from proxy.jsonbody import InvalidJson
from proxy.sse import Frame, Parser
from proxy.unscorable import Findings, Rules

# The last event of each kind of stream; a stream that ends without one was cut.
_LAST_OF_RESPONSES = tuple(
    b'"type":"response.%b"' % end for end in (b"completed", b"incomplete", b"failed", b"cancelled")
)
_WALKED = (Api.COMPLETIONS, Api.CHAT, Api.BATCH)
_INDEX = re.compile(rb'"index":(\d+)')


def rewrite_reply(body: bytes, api: Api, rules: Rules, asked: Callable[[], Asked]) -> tuple[bytes, Findings]:
    """A whole JSON reply; a clean one comes back as the very object that came. Raises BadReply.

    ``asked`` reads the request and is called only where the bytes alone do not prove the reply clean.
    """
    try:
        return _at_once(body, api, rules, asked) or logprobs.mark(bytes(body), asked(), rules)
    except InvalidJson as error:
        raise BadReply(f"the upstream's reply is not the JSON object it should be: {error}") from error


def _at_once(body: bytes, api: Api, rules: Rules, asked: Callable[[], Asked]) -> tuple[bytes, Findings] | None:
    """What is common, fast; None leaves the reply to ``logprobs``."""
    null_candidates = rules.encoding.candidate == b"null"
    if quick.survey is not None:
        choices = quick.survey(body, null_candidates) if api in _WALKED else None
        if choices is None or (any(doubtful for _, _, doubtful, _, _ in choices) and asked().echo):
            return None
        return quick.mark(body, choices, rules)
    sampled = scan.clean(body, api, null_candidates=null_candidates)
    return direct.mark(bytes(body), asked(), rules) if sampled is None else (body, Findings(sampled))


class StreamRewriter:
    """An event stream, event by event; ``feed`` gives what can leave now.

    ``findings`` adds up what was found, positions counted over the whole stream of each choice. ``ended``: the stream
    has had its last event. ``failed``: an error event came. ``broken``: why the stream goes no further; what came
    before that event has left. With ``reject`` it ends before the first event that holds something unscorable.
    """

    def __init__(self, asked: Asked, rules: Rules, *, reject: bool = False) -> None:
        self.findings = Findings()
        self.ended = False
        self.failed = False
        self.broken: BadReply | None = None
        self._reject = reject
        self._asked = asked
        self._rules = rules
        self._parser = Parser()
        self._before: dict[int, int] = {}

    def feed(self, chunk: bytes) -> bytes:
        out = []
        for frame in self._parser.feed(chunk):
            try:
                new = self._frame(frame)
            except InvalidJson as error:
                self.broken = BadReply(f"an event of the upstream's stream is no JSON object: {error}")
                break
            if self._reject and (self.findings.marked or self.findings.unmarkable):
                break
            out.append(new)
        return b"".join(out)

    def close(self) -> bytes:
        """What is left of an event that was cut: it leaves as it came."""
        return b"".join([frame.raw for frame in self._parser.close()])

    def _frame(self, frame: Frame) -> bytes:
        data = frame.data
        if not data:
            return frame.raw
        if data == b"[DONE]":
            self.ended = True
            return frame.raw
        if self._proved_clean(data):
            return frame.raw
        before = dict(self._before)
        out, found = logprobs.mark(data, self._asked, self._rules, self._before)
        self._add(found, before)
        self._note_kind(data)
        return frame.raw if out is data else frame.with_data(out)

    def _proved_clean(self, data: bytes) -> bool:
        """Bytes alone prove an event clean; its positions are counted."""
        counts = self._counts(data)
        for choice, sampled in counts or ():
            self._count(choice, sampled)
        return counts is not None

    def _counts(self, data: bytes) -> list[tuple[int, int]] | None:
        """(choice, positions) of each choice of an event that is proved clean."""
        null_candidates = self._rules.encoding.candidate == b"null"
        if quick.survey is not None:
            choices = quick.survey(data, null_candidates) if self._asked.api in _WALKED else None
            if choices is None or any(doubtful for _, _, doubtful, _, _ in choices):
                return None
            return [(choice, sampled) for choice, sampled, *_ in choices]
        choice = events.choice_of(data, self._asked.api)
        if choice is not None:
            return [(choice, 1)]
        sampled = scan.clean(data, self._asked.api, null_candidates=null_candidates)
        index = _INDEX.search(data)
        if sampled is None or index is None or data.count(b'"index":') != 1:
            return None
        return [(int(index[1]), sampled)]

    def _count(self, choice: int, sampled: int) -> None:
        self._before[choice] = self._before.get(choice, 0) + sampled
        self.findings.sampled += sampled

    def _add(self, found: Findings, before: dict[int, int]) -> None:
        self.findings.sampled += found.sampled
        self.findings.unmarkable += found.unmarkable
        for choice, reasons in found.marked.items():
            shift = before.get(choice, 0)
            mine = self.findings.marked.setdefault(choice, {})
            for reason, positions in reasons.items():
                mine.setdefault(reason, []).extend(at + shift for at in positions)

    def _note_kind(self, data: bytes) -> None:
        if data.startswith(b'{"error"'):
            self.failed = True
        if self._asked.api is Api.RESPONSES and any(kind in data for kind in _LAST_OF_RESPONSES):
            self.ended = True
