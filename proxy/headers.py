"""Headers as lists of (name, value) byte pairs: repeated ones survive, order is kept. Core.

Names are in lower case: so ASGI gives those of a request, and ``proxy.connection`` those of a reply.
"""

Headers = list[tuple[bytes, bytes]]

# RFC 9110, 7.6.1: these speak of one connection. Expect is answered by the server that reads the body.
HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"expect",
    )
)

_OF_THE_CONNECTION = frozenset((b"close", b"keep-alive", b""))


def find(headers: Headers, name: bytes) -> bytes | None:
    """First value of ``name``, or None."""
    for key, value in headers:
        if key == name:
            return value
    return None


def end_to_end(headers: Headers, others: frozenset[bytes] = frozenset()) -> Headers:
    """Without hop-by-hop headers, those that Connection names, and ``others``."""
    named = connection_names(headers) - _OF_THE_CONNECTION
    return [pair for pair in headers if not (pair[0] in HOP_BY_HOP or pair[0] in others or pair[0] in named)]


def connection_names(headers: Headers) -> set[bytes]:
    """What the Connection headers say, in lower case."""
    values = [value for key, value in headers if key == b"connection"]
    return {part.strip().lower() for value in values for part in value.split(b",")}


def without(headers: Headers, *names: bytes) -> Headers:
    return [pair for pair in headers if pair[0] not in names]
