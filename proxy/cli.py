"""The command line. Options are made from the settings classes, so that option, variable and table never part."""

import os
import sys
from collections.abc import Callable
from enum import Enum
from typing import Any, get_args, get_origin

import click
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from proxy.demo import HELP as DEMO_HELP
from proxy.demo import DemoSettings, demo
from proxy.doctor import HELP as DOCTOR_HELP
from proxy.doctor import DoctorSettings, doctor
from proxy.settings import Settings
from proxy.simulator.cli import HELP, SimulatorSettings, simulate


def settings_command(name: str, model: type[BaseSettings], run: Callable[[Any], int], help: str) -> click.Command:
    """A command whose options are the fields of ``model``; values are checked by the model, not by click."""

    def callback(**given: Any) -> int:
        values = {key: value for key, value in given.items() if value is not None}
        try:
            settings = model(**values)
        except ValidationError as error:
            raise click.UsageError(_complaint(model, error, values)) from error
        return run(settings)

    options: list[click.Parameter] = [_option(model, key, info) for key, info in model.model_fields.items()]
    return click.Command(name, params=options, callback=callback, help=help)


def _option(model: type[BaseSettings], key: str, info: FieldInfo) -> click.Option:
    flag = "--" + key.replace("_", "-")
    variable = _variable(model, key)
    default = "required" if info.is_required() else f"default {_plain(info.default)}"
    help = f"{info.description} [{variable}; {default}]"
    if info.annotation is bool:
        return click.Option([f"{flag}/--no-{flag[2:]}"], default=None, help=help)
    return click.Option([flag], default=None, help=help, metavar=_metavar(info))


def _metavar(info: FieldInfo) -> str:
    annotation = info.annotation
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return "[" + "|".join(member.value for member in annotation) + "]"
    if get_origin(annotation) is not None:
        return "[" + "|".join(map(str, get_args(annotation))) + "]"
    return {int: "INTEGER", float: "NUMBER"}.get(annotation, "TEXT") if isinstance(annotation, type) else "TEXT"


def _complaint(model: type[BaseSettings], error: ValidationError, given: dict[str, Any]) -> str:
    """One line naming option and value."""
    first = min(error.errors(), key=lambda one: one["type"] == "missing")
    key = str(first["loc"][0])
    flag, variable = "--" + key.replace("_", "-"), _variable(model, key)
    if first["type"] == "missing":
        return f"{flag} (or {variable}) is required"
    source = flag if key in given else variable
    message = first["msg"].removeprefix("Value error, ")
    value = given.get(key, os.environ.get(variable, first["input"]))
    return f"{source}: {_plain(value)!r}: {message[0].lower()}{message[1:]}"


def _variable(model: type[BaseSettings], key: str) -> str:
    return (model.model_config.get("env_prefix", "") + key).upper()


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def _serve(settings: Settings) -> int:
    from proxy.server import serve

    return serve(settings)


def _group() -> click.Group:
    group = click.Group(
        "logprob-sidecar", help="Keeps NaN and missing logprobs from killing rollouts or poisoning weights."
    )
    group.add_command(settings_command("serve", Settings, _serve, "Run the sidecar in front of a vLLM."))
    group.add_command(settings_command("simulate", SimulatorSettings, simulate, HELP))
    group.add_command(settings_command("demo", DemoSettings, demo, DEMO_HELP))
    group.add_command(settings_command("doctor", DoctorSettings, doctor, DOCTOR_HELP))
    return group


def main(arguments: list[str] | None = None) -> None:
    """Exit codes: 0, 1 for a failure that is told, 2 for a bad option or value, told in one line."""
    try:
        code = _group().main(arguments, prog_name="logprob-sidecar", standalone_mode=False)
    except click.ClickException as error:
        command = f" {error.ctx.info_name}" if isinstance(error, click.UsageError) and error.ctx else ""
        print(
            f"logprob-sidecar{command if command != ' logprob-sidecar' else ''}: {error.format_message()}",
            file=sys.stderr,
        )
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        code = 130
    sys.exit(code or 0)
