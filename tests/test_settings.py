"""README's settings table is the settings class; command line and environment give the same settings."""

import re
import subprocess
import sys
from enum import Enum
from pathlib import Path

import pytest

from proxy.metrics import Metrics
from proxy.settings import Settings

README = Path(__file__).parent.parent / "README.md"


def table() -> list[str]:
    """The table README should have: one row for each field of the settings class."""
    rows = ["| setting | default | what |", "|---|---|---|"]
    for name, info in Settings.model_fields.items():
        default = info.default.value if isinstance(info.default, Enum) else info.default
        shown = (
            "required" if info.is_required() else f"`{str(default).lower() if isinstance(default, bool) else default}`"
        )
        rows.append(f"| `{name}` | {shown} | {info.description} |")
    return rows


def test_readme_has_every_setting_with_its_default() -> None:
    text = README.read_text("utf-8")
    assert "\n".join(table()) in text, "README's settings table should read:\n" + "\n".join(table())


def test_readme_has_every_metric_with_its_labels() -> None:
    rows = re.findall(
        r"^\| `([a-z_]+)(?:\{([a-z,]+)\})?` \|",
        README.read_text("utf-8").split("`/metrics`, prefix")[1].split("\n## ")[0],
        re.M,
    )
    documented = {(name.removesuffix("_total"), tuple(labels.split(",")) if labels else ()) for name, labels in rows}
    metrics = Metrics()
    known = {
        (collector._name.removeprefix("logprob_sidecar_"), collector._labelnames)
        for collector in metrics.registry._collector_to_names
    }
    assert documented == known


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "proxy", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "environment", "line"),
    [
        (["serve"], {}, "logprob-sidecar serve: --upstream (or SIDECAR_UPSTREAM) is required"),
        (
            ["serve", "--port", "x"],
            {},
            "logprob-sidecar serve: --port: 'x': input should be a valid integer, unable to parse string as an integer",
        ),
        (
            ["serve", "--upstream", "http://h:1", "--nan-encoding", "nan"],
            {},
            "logprob-sidecar serve: --nan-encoding: 'nan': input should be 'ceiling', 'literal', 'string' or 'null'",
        ),
        (
            ["serve"],
            {"SIDECAR_UPSTREAM": "localhost:8000"},
            "logprob-sidecar serve: SIDECAR_UPSTREAM: 'localhost:8000': "
            "is no http:// or https:// URL such as http://localhost:8000",
        ),
        (
            ["serve", "--upstream", "http://h:1", "--trip-ratio", "2"],
            {},
            "logprob-sidecar serve: --trip-ratio: '2': input should be less than or equal to 1",
        ),
        (["serve", "--no-such-option"], {}, "logprob-sidecar serve: No such option '--no-such-option'."),
        (["fly"], {}, "logprob-sidecar: No such command 'fly'."),
        (
            ["simulate", "--nan-rate", "7"],
            {},
            "logprob-sidecar simulate: --nan-rate: '7': input should be less than or equal to 1",
        ),
    ],
    ids=["missing", "type", "choice", "environment", "range", "option", "command", "simulate"],
)
def test_a_bad_option_or_value_is_one_line_and_exit_2(arguments: list[str], environment: dict, line: str) -> None:
    done = run(*arguments, **environment)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [line]
    assert done.stdout == ""


def test_environment_and_arguments_give_the_same_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDECAR_UPSTREAM", "http://localhost:8000/")
    monkeypatch.setenv("SIDECAR_NAN_ENCODING", "string")
    monkeypatch.setenv("SIDECAR_TRIP_RATIO", "0")
    assert Settings() == Settings(upstream="http://localhost:8000", nan_encoding="string", trip_ratio=0)


def test_help_names_every_option_and_variable() -> None:
    shown = re.sub(r"\s+", " ", run("serve", "--help").stdout)
    for name in Settings.model_fields:
        assert f"--{name.replace('_', '-')}" in shown
        assert f"SIDECAR_{name.upper()}" in shown.replace("[ ", "[")
