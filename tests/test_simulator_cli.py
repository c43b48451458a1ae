"""`simulate`: options, their environment variables, and one clear line naming option and value."""

import click
import pytest

from proxy.cli import settings_command
from proxy.simulator import FrontEnd, SimulatorConfig
from proxy.simulator.cli import SimulatorSettings


def parse(*arguments: str) -> SimulatorSettings:
    seen: list[SimulatorSettings] = []
    command = settings_command("simulate", SimulatorSettings, lambda given: seen.append(given) or 0, "")
    command.main(list(arguments), standalone_mode=False)
    return seen[0]


def test_defaults() -> None:
    settings = parse()
    assert (settings.host, settings.port) == ("127.0.0.1", 8000)
    assert settings.config() == SimulatorConfig(nan_rate=0.01)


def test_options() -> None:
    settings = parse("--port", "9", "--host", "::1", "--nan-rate", "0", "--front-end", "rust", "--stale-block", "2")
    assert (settings.host, settings.port) == ("::1", 9)
    assert settings.config() == SimulatorConfig(front_end=FrontEnd.RUST, stale_block=2)


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMULATOR_NAN_RATE", "0.5")
    monkeypatch.setenv("SIMULATOR_LATENCY_PER_TOKEN", "0.25")
    monkeypatch.setenv("SIMULATOR_PORT", "8123")
    settings = parse("--port", "8124")
    assert settings.port == 8124
    assert settings.config() == SimulatorConfig(nan_rate=0.5, latency_per_token=0.25)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--nan-rate", "2"), ("--nan-rate", "2")),
        (("--front-end", "go"), ("--front-end", "go")),
        (("--latency-per-token", "-1"), ("--latency-per-token", "-1")),
        (("--nan-rate", "0.6", "--floor-rate", "0.5"), ("--floor-rate", "0.5")),
        (("--colour", "red"), ("--colour",)),
    ],
    ids=["range", "choice", "negative", "sum", "unknown"],
)
def test_a_bad_value_is_named(arguments: tuple[str, ...], named: tuple[str, ...]) -> None:
    with pytest.raises(click.UsageError) as refusal:
        parse(*arguments)
    message = refusal.value.format_message()
    assert refusal.value.exit_code == 2
    assert all(word in message for word in named)
    assert "\n" not in message
