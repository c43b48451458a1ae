"""Headers as lists of (name, value) byte pairs: repeated ones survive, order is kept. Core."""

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


def find(headers: Headers, name: bytes) -> bytes | None:
    """First value of ``name`` (lower case), or None."""
    for key, value in headers:
        if key.lower() == name:
            return value
    return None


def end_to_end(headers: Headers) -> Headers:
    """Without hop-by-hop headers and those that Connection names."""
    drop: set[bytes] | frozenset[bytes] = HOP_BY_HOP
    for key, value in headers:
        if key.lower() == b"connection":
            named = {part.strip().lower() for part in value.split(b",")}
            drop = drop | (named - {b"close", b"keep-alive", b""})
    return [pair for pair in headers if pair[0].lower() not in drop]


def without(headers: Headers, *names: bytes) -> Headers:
    return [pair for pair in headers if pair[0].lower() not in names]
