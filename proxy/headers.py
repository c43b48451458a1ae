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
    drop = HOP_BY_HOP | (connection_names(headers) - {b"close", b"keep-alive", b""})
    return [pair for pair in headers if pair[0].lower() not in drop]


def connection_names(headers: Headers) -> set[bytes]:
    """What the Connection headers say, in lower case."""
    values = [value for key, value in headers if key.lower() == b"connection"]
    return {part.strip().lower() for value in values for part in value.split(b",")}


def without(headers: Headers, *names: bytes) -> Headers:
    return [pair for pair in headers if pair[0].lower() not in names]
