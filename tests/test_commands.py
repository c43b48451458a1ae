"""demo and doctor, as a user runs them, against the simulator."""

import re
import subprocess
import sys

import httpx
import pytest
from servers import run_app

from proxy.doctor import examine
from proxy.simulator import FrontEnd, SimulatorConfig, create_simulator


def test_the_demo_loses_rollouts_without_the_sidecar_and_none_with_it() -> None:
    command = [sys.executable, "-m", "proxy", "demo", "--requests", "40", "--max-tokens", "12"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = {
        cells[0].strip(): cells[1:] for line in done.stdout.splitlines() if len(cells := line.split("│")[1:-1]) == 3
    }
    without, through = (int(cell) for cell in rows["rollouts lost (HTTP 400)"])
    assert without > 0
    assert through == 0
    assert f"{without} by stream" in rows["rollouts recovered"][1]
    assert int(rows["sampled tokens delivered"][1]) == 40 * 12
    assert re.search(r"[1-9]\d* nan", rows["tokens marked unscorable"][1])
    assert "Out of range float values" in done.stdout
    assert '"unscorable"' in done.stdout


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("config", "verdicts"),
    [
        (SimulatorConfig(), {}),
        (SimulatorConfig(front_end=FrontEnd.RUST), {"server": "note", "n > 1": "note"}),
        (SimulatorConfig(nan_rate=1.0), {"logprobs": "bad"}),
        (SimulatorConfig(missing_rate=1.0), {"logprobs": "bad"}),
    ],
    ids=["clean", "rust", "nan", "missing"],
)
async def test_the_doctor_tells_a_fit_engine_from_a_sick_one(config: SimulatorConfig, verdicts: dict[str, str]) -> None:
    from anyio import to_thread

    async with run_app(create_simulator(config)) as url:

        def ask() -> dict[str, str]:
            with httpx.Client(base_url=url, trust_env=False) as client:
                return {check.name: check.verdict for check in examine(client)}

        found = await to_thread.run_sync(ask)
    assert {name: verdict for name, verdict in found.items() if verdict != "ok"} == verdicts
    assert found["health"] == "ok"
