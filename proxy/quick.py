"""What the compiled walk (proxy.walk) finds in a reply, judged and marked. Core.

Where it could not be compiled, ``survey`` is None, and ``scan``, ``events`` and ``direct`` do the same in Python.
"""

from collections.abc import Callable

from proxy import marks
from proxy.unscorable import Findings, Reason, Rules, judge

# Index, number of sampled positions, doubtful ones, their kinds, end of its logprobs object (proxy.walk.survey).
Choice = tuple[int, int, list[tuple[int, int, int, int]], list[tuple[bytes, bool]], int]

survey: Callable[[bytes, bool], list[Choice] | None] | None
try:
    from proxy import walk

    survey = walk.survey
except ImportError:  # installed where no C compiler was
    survey = None


def mark(body: bytes, choices: list[Choice], rules: Rules) -> tuple[bytes, Findings]:
    """Does for these choices exactly what ``proxy.logprobs.mark`` does for all, without walking (a test compares them).

    ``body`` itself comes back where all that was doubtful is usable after all.
    """
    findings = Findings(sum(count for _, count, _, _, _ in choices))
    if not any(doubtful for _, _, doubtful, _, _ in choices):
        return body, findings
    raw, code = bytes(body), rules.encoding.mark
    parts: list[bytes] = []
    last = 0
    for index, _, doubtful, kinds, close in choices:
        marked: dict[Reason, list[int]] = {}
        reasons = [judge(token, rules, known) for token, known in kinds]
        of_kind = [None if reason is None else marked.setdefault(reason, []) for reason in reasons]
        for position, start, end, kind in doubtful:
            positions = of_kind[kind]
            if positions is None:
                continue
            positions.append(position)
            parts.append(raw[last:start])
            parts.append(code)
            last = end
        if marked:
            of_choice = findings.marked.setdefault(index, {})
            for reason, at in marked.items():
                of_choice[reason] = of_choice.get(reason, []) + at
            parts += (raw[last:close], b',"unscorable":', marks.positions(marked))
            last = close
    if not parts:
        return body, findings
    parts.append(raw[last:])
    return b"".join(parts), findings
