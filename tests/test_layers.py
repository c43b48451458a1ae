"""Imports point one way: the core knows no I/O, the two packages do not know each other."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE = (
    "alignment api assemble assemble_chat assemble_choice assemble_layout breaker candidates direct entries errors "
    "events headers incidents jsonbody jsonspan layout ledger lists logprobs marks quick recovery rewrite scan sse "
    "unscorable walk"
).split()
SHELL_ONLY = {
    "asyncio",
    "time",
    "random",
    "os",
    "logging",
    "httpx",
    "fastapi",
    "uvicorn",
    "httptools",
    "secrets",
    "socket",
}


def imports(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("module", [module for module in CORE if module != "walk"])  # compiled: C alone
def test_the_core_does_no_io(module: str) -> None:
    found = imports(ROOT / "proxy" / f"{module}.py")
    assert not {name.split(".")[0] for name in found} & SHELL_ONLY
    mine = {name.split(".")[1] for name in found if name.startswith("proxy.")}
    assert mine <= set(CORE)


@pytest.mark.parametrize(("package", "other"), [("proxy", "trainer_hooks"), ("trainer_hooks", "proxy")])
def test_the_packages_do_not_import_each_other(package: str, other: str) -> None:
    files = list((ROOT / package).glob("**/*.py"))
    assert files
    for file in files:
        assert other not in {name.split(".")[0] for name in imports(file)}, file


def test_the_sidecar_needs_no_torch_and_the_hook_nothing_else() -> None:
    for file in (ROOT / "proxy").rglob("*.py"):
        assert "torch" not in {name.split(".")[0] for name in imports(file)}, file
    for file in (ROOT / "trainer_hooks").glob("*.py"):
        if not file.name.startswith("trl"):
            assert not {name.split(".")[0] for name in imports(file)} & {"trl", "transformers", "accelerate"}, file


def test_modules_stay_small() -> None:
    long = {
        file.name: lines
        for package in ("proxy", "trainer_hooks")
        for file in (ROOT / package).rglob("*.py")
        if (lines := len(file.read_text("utf-8").splitlines())) > 260
    }
    assert not long
