"""Whether a list of logprobs has one entry for each sampled token. The one place that decides it. Core."""

import re
from collections.abc import Sequence

from proxy.api import Asked

_NAMES_ID = re.compile(r"token_id:\d+")


def aligned(asked: Asked, count: int, ids: list[int] | None, names: Sequence[object] | None) -> bool:
    """``count`` entries against the choice's ``token_ids`` and the entries' names; either may be unknown (None).

    Equal length proves nothing where entries are named ``token_id:N``: then the names must be the ids. Under echo the
    prompt's positions come first and ``token_ids`` lists the generated ones alone; with ``max_tokens: 0`` there are no
    generated ones on the wire.
    """
    if names is not None and len(names) != count:
        return False
    if not ids:
        return ids is None or count == 0 or asked.echo
    if count < len(ids):
        return asked.echo and asked.body is not None and asked.body.get("max_tokens") == 0
    if count > len(ids) and not asked.echo:
        return False
    named = [name for name in (names or ())[-len(ids) :] if isinstance(name, str) and _NAMES_ID.fullmatch(name)]
    return len(named) != len(ids) or [int(name[9:]) for name in named] == ids
