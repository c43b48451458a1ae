"""The ladder, as a table: policy, attempts, cause -> decision."""

import pytest
from fixtures_index import load_fixtures

from proxy.errors import ErrorType
from proxy.headers import find
from proxy.recovery import Accept, Attempts, Cause, GiveUp, Policy, Repeat, Stream, classify, decide

DEFAULT = Policy()
UNSCORABLE = GiveUp(502, ErrorType.UNSCORABLE)
UNREACHABLE = GiveUp(502, ErrorType.UNREACHABLE)

LADDER = [
    (DEFAULT, Attempts(), Cause.OK, Accept()),
    (DEFAULT, Attempts(), Cause.CLIENT_ERROR, Accept()),
    (DEFAULT, Attempts(), Cause.SERVER_ERROR, Accept()),
    (DEFAULT, Attempts(salted=1), Cause.SERVER_ERROR, Accept()),
    (DEFAULT, Attempts(), Cause.NOT_COMPLIANT, Repeat(fresh_salt=True)),
    (DEFAULT, Attempts(salted=1), Cause.NOT_COMPLIANT, Stream()),
    (Policy(retries=0), Attempts(), Cause.NOT_COMPLIANT, Stream()),
    (Policy(retries=3), Attempts(salted=2), Cause.NOT_COMPLIANT, Repeat(fresh_salt=True)),
    (Policy(retries=3), Attempts(salted=3), Cause.NOT_COMPLIANT, Stream()),
    (DEFAULT, Attempts(salted=1, streamable=False), Cause.NOT_COMPLIANT, UNSCORABLE),
    (DEFAULT, Attempts(salted=1), Cause.STREAM_FAILED, UNSCORABLE),
    (DEFAULT, Attempts(), Cause.UNREACHABLE, Repeat(fresh_salt=False)),
    (DEFAULT, Attempts(reconnected=1), Cause.CLOSED_EARLY, Repeat(fresh_salt=False, delay=0.1)),
    (DEFAULT, Attempts(reconnected=2), Cause.UNREACHABLE, UNREACHABLE),
    (DEFAULT, Attempts(reconnected=2), Cause.CLOSED_EARLY, UNREACHABLE),
    (Policy(connect_retries=0), Attempts(), Cause.CLOSED_EARLY, UNREACHABLE),
    (Policy(connect_retries=9), Attempts(reconnected=8), Cause.UNREACHABLE, Repeat(fresh_salt=False, delay=2.0)),
    (DEFAULT, Attempts(), Cause.TIMED_OUT, GiveUp(504, ErrorType.TIMEOUT)),
    (DEFAULT, Attempts(), Cause.CUT, GiveUp(502, ErrorType.PROTOCOL)),
    (DEFAULT, Attempts(), Cause.BAD_REPLY, GiveUp(502, ErrorType.PROTOCOL)),
]


@pytest.mark.parametrize(("policy", "tried", "cause", "decision"), LADDER)
def test_the_ladder(policy: Policy, tried: Attempts, cause: Cause, decision: object) -> None:
    assert decide(policy, tried, cause) == decision


def test_the_table_names_every_cause() -> None:
    assert {row[2] for row in LADDER} == set(Cause)


@pytest.mark.parametrize("policy", [DEFAULT, Policy(retries=4, connect_retries=5)])
@pytest.mark.parametrize("cause", list(Cause))
def test_no_cause_is_repeated_without_end(policy: Policy, cause: Cause) -> None:
    tried = Attempts()
    for _ in range(policy.retries + policy.connect_retries + 1):
        match decide(policy, tried, cause):
            case Repeat(fresh_salt=True):
                tried = Attempts(tried.salted + 1, tried.reconnected)
            case Repeat():
                tried = Attempts(tried.salted, tried.reconnected + 1)
            case _:
                return
    pytest.fail(f"{cause} is repeated for ever")


JSON, TEXT = b"application/json", b"text/plain; charset=utf-8"
SIGNATURE = b'{"error":{"message":"Out of range float values are not JSON compliant: nan","type":"x"}}'


@pytest.mark.parametrize(
    ("status", "kind", "body", "asks", "cause"),
    [
        (200, JSON, b"{}", True, Cause.OK),
        (400, JSON, SIGNATURE, True, Cause.NOT_COMPLIANT),
        (400, JSON, SIGNATURE, False, Cause.NOT_COMPLIANT),
        (500, JSON, SIGNATURE, True, Cause.NOT_COMPLIANT),
        (500, TEXT, b"Internal Server Error", True, Cause.NOT_COMPLIANT),
        (500, TEXT, b"Internal Server Error", False, Cause.SERVER_ERROR),
        (500, JSON, b'{"error":{"message":"EngineCore died"}}', True, Cause.SERVER_ERROR),
        (502, TEXT, b"Bad Gateway", True, Cause.SERVER_ERROR),
        (400, JSON, b'{"error":{"message":"bad n"}}', True, Cause.CLIENT_ERROR),
        (422, JSON, SIGNATURE, True, Cause.CLIENT_ERROR),
        (429, JSON, b"{}", True, Cause.CLIENT_ERROR),
        (
            400,
            JSON,
            b'{"error":{"message":"' + b"x" * 300 + b"Out of range float values are not JSON",
            True,
            Cause.CLIENT_ERROR,
        ),
    ],
)
def test_causes_of_whole_replies(status: int, kind: bytes, body: bytes, asks: bool, cause: Cause) -> None:
    assert classify(status, kind, body, asks) is cause


CLASSES = {
    "nonfinite_http400": Cause.NOT_COMPLIANT,
    "refused": Cause.CLIENT_ERROR,
    "upstream_error": Cause.SERVER_ERROR,
}
FAILED = [fixture for fixture in load_fixtures() if fixture.status >= 400]


@pytest.mark.parametrize("fixture", FAILED, ids=[fixture.name for fixture in FAILED])
def test_causes_of_real_failures(fixture) -> None:
    kind = find([(k.lower().encode(), v.encode()) for k, v in fixture.headers], b"content-type") or b""
    assert classify(fixture.status, kind, fixture.body, True) is CLASSES[fixture.expect["class"]]
