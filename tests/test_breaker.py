"""The breaker with a clock of its own."""

from proxy.breaker import Admission, Breaker, BreakerSettings, State

SETTINGS = BreakerSettings(ratio=0.5, min_responses=4, window=100.0, probe_interval=10.0)


def fed(bad: str, settings: BreakerSettings = SETTINGS) -> Breaker:
    """One reply a second; "x" is bad."""
    breaker = Breaker(settings)
    for second, reply in enumerate(bad):
        breaker.record(float(second), reply == "x")
    return breaker


def test_it_trips_at_the_ratio_of_the_last_replies_and_not_before() -> None:
    assert fed("xxx").state is State.CLOSED
    assert fed("x...").state is State.CLOSED
    assert fed("x..x").state is State.OPEN
    assert fed("...." * 50 + "xx").state is State.OPEN
    assert fed("x" + "." * 4 + "x").state is State.CLOSED


def test_a_single_bad_reply_among_many_never_trips() -> None:
    assert fed("...x" * 100).state is State.CLOSED


def test_replies_older_than_the_window_are_forgotten() -> None:
    breaker = fed("xxx")
    breaker.record(103.0, True)
    assert breaker.state is State.CLOSED
    assert breaker.counts() == (1, 1)


def test_ratio_zero_turns_it_off() -> None:
    assert fed("x" * 100, BreakerSettings(ratio=0)).state is State.CLOSED


def test_one_probe_an_interval_and_a_clean_one_closes() -> None:
    breaker = fed("xxxx")  # trips at second 3
    assert breaker.admit(5.0) is Admission.REFUSED
    assert breaker.retry_after(5.0) == 8
    assert breaker.admit(13.0) is Admission.PROBE
    assert breaker.admit(13.0) is Admission.REFUSED
    assert breaker.state is State.PROBING
    breaker.record(14.0, True, Admission.PROBE)
    assert breaker.state is State.OPEN
    assert breaker.admit(22.9) is Admission.REFUSED
    assert breaker.admit(23.0) is Admission.PROBE
    breaker.record(24.0, False, Admission.PROBE)
    assert breaker.state is State.CLOSED
    assert breaker.admit(24.0) is Admission.PASSED
    assert breaker.counts() == (0, 0)


def test_a_probe_that_never_answers_makes_room_for_the_next() -> None:
    breaker = fed("xxxx")
    assert breaker.admit(13.0) is Admission.PROBE
    assert breaker.admit(23.0) is Admission.PROBE


def test_replies_that_were_under_way_when_it_tripped_do_not_close_it() -> None:
    breaker = fed("xxxx")
    breaker.admit(13.0)
    breaker.record(14.0, False, Admission.PASSED)
    assert breaker.state is State.PROBING
