"""The embedded stand-in for vLLM 0.32, so that workers, tests and demos need no GPU and no model."""

from proxy.simulator.app import create_simulator, serve
from proxy.simulator.config import FrontEnd, SimulatorConfig

__all__ = ["FrontEnd", "SimulatorConfig", "create_simulator", "serve"]
