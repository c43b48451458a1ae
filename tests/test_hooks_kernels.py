"""The Triton path: in Triton's interpreter and compiled for Hopper on any machine; the rest, marked gpu, on a GPU."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import kernel_parity  # noqa: E402
from torch import Tensor  # noqa: E402

from trainer_hooks import PolicyLossConfig, PolicyLossOutput, policy_loss  # noqa: E402

TESTS = Path(__file__).parent
INTEGERS = ("tokens", "width", "sequences")


def run_python(*arguments: str, **environment: str) -> str:
    """In a process of its own: Triton decides on import whether it interprets."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def test_kernels_agree_with_plain_torch_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    expected = len(list(kernel_parity.cases([kernel_parity.SMALL], "cpu"))) + len(kernel_parity.LOSSES)
    printed = run_python(str(TESTS / "kernel_parity.py"), TRITON_INTERPRET="1")
    assert printed.splitlines()[-1] == f"{expected} cases agree"


@pytest.mark.parametrize(
    "constants",
    [
        {"TOKEN_ADVANTAGES": False},
        {"TOKEN_ADVANTAGES": True, "CISPO": True, "DROP": True},
        {"TOKEN_ADVANTAGES": False, "SEQUENCE_MEAN": True, "GSPO": True},
        {"TOKEN_ADVANTAGES": True, "SEQUENCE_MEAN": True, "GSPO": True, "PACKED": True},
    ],
    ids=["dapo", "cispo drop", "gspo", "gspo packed"],
)
def test_token_kernel_compiles_for_hopper_with_vector_loads(constants: dict[str, bool]) -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from trainer_hooks import fused, kernels

    pointers = {name: "*fp32" for name in kernels.token_kernel.arg_names if name.endswith("_ptr")}
    pointers |= {"mask_ptr": "*u8", "ids_ptr": "*i32"}
    flags = ("CISPO", "GSPO", "SEQUENCE_MEAN", "DROP", "PACKED")
    values = {**dict.fromkeys(flags, False), **constants, "BLOCK": fused.BLOCK, "STEPS": fused.STEPS}
    signature = {
        name: "constexpr" if name in values else pointers.get(name, "i32" if name in INTEGERS else "fp32")
        for name in kernels.token_kernel.arg_names
    }
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(signature) if name in pointers or name == "tokens"
    }
    source = ASTSource(kernels.token_kernel, signature, values, aligned)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(fused.LAUNCH)).asm["ptx"]
    loads = 3 if constants["TOKEN_ADVANTAGES"] else 2  # new, old and, where there is one a token, the advantage
    assert ptx.count("ld.global.v4.b32") >= loads
    assert ptx.count("st.global.v4.b32") == 1
    assert "atom.global" not in ptx and "red.global" not in ptx
    assert ".local" not in ptx  # nothing spills


def test_importing_the_package_imports_no_triton() -> None:
    code = "import sys, trainer_hooks; print('triton' in sys.modules, 'numpy' in sys.modules)"
    before = run_python("-c", "import sys, torch; print('triton' in sys.modules, 'numpy' in sys.modules)")
    assert run_python("-c", code) == before


def needs_gpu(test: Any) -> Any:
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")(test))


def on_gpu(rows: int, width: int, dtype: Any = torch.float32, seed: int = 0) -> tuple[Tensor, ...]:
    new, old, advantages, mask = (x.cuda() for x in kernel_parity.tokens(rows, width, dtype, seed))
    return new.requires_grad_(), old, advantages, mask


def configs() -> Iterator[PolicyLossConfig]:
    for loss in kernel_parity.LOSSES:
        yield PolicyLossConfig(loss=loss, max_length=4096)  # type: ignore[arg-type]


def with_gradient(run: Callable[[], PolicyLossOutput], new: Tensor) -> list[Tensor]:
    output = run()
    (gradient,) = torch.autograd.grad(output.loss, new)
    return [output.loss, gradient, *output.metrics.values()]


@needs_gpu
@pytest.mark.parametrize("shape", [(1, 1), (3, 70), (7, 5001), (64, 8192), (3000, 3)], ids=str)
def test_kernels_agree_with_plain_torch_on_the_gpu(shape: tuple[int, int]) -> None:
    for case in kernel_parity.cases([shape], "cuda"):
        kernel_parity.check(case)


@needs_gpu
def test_the_gpu_takes_the_fused_path_and_gives_what_the_cpu_gives() -> None:
    from trainer_hooks.loss import _can_fuse

    for config in configs():
        tensors = on_gpu(7, 501)
        assert _can_fuse(tensors[0])
        fused = with_gradient(lambda: policy_loss(*tensors, config), tensors[0])  # noqa: B023
        plain_tensors = [x.detach().cpu() for x in tensors]
        plain_tensors[0].requires_grad_()
        plain = with_gradient(lambda: policy_loss(*plain_tensors, config), plain_tensors[0])  # noqa: B023
        for left, right in zip(fused, plain, strict=True):
            torch.testing.assert_close(left.cpu(), right, rtol=1e-5, atol=1e-6)


@needs_gpu
def test_nothing_is_read_back_from_the_gpu() -> None:
    given = torch.tensor(5.0, device="cuda")
    chosen = [*configs(), PolicyLossConfig(denominator=given), PolicyLossConfig(denominator=5.0)]
    tensors = on_gpu(7, 501)
    packed = [x.detach().reshape(-1) for x in tensors]
    packed[0].requires_grad_()
    boundaries = torch.tensor([0, 501, 3507], device="cuda")
    for checked in (False, True):  # the first time, Triton compiles, and may read what it likes
        torch.cuda.set_sync_debug_mode("error" if checked else "default")
        try:
            for config in chosen:
                policy_loss(*tensors, config).loss.backward()
                policy_loss(*packed, config, cu_seqlens=boundaries).loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@needs_gpu
def test_the_same_input_gives_the_same_bits() -> None:
    tensors = on_gpu(61, 8191)
    for config in configs():
        first = with_gradient(lambda: policy_loss(*tensors, config), tensors[0])  # noqa: B023
        for _ in range(5):
            again = with_gradient(lambda: policy_loss(*tensors, config), tensors[0])  # noqa: B023
            assert all(map(torch.equal, first, again))


@needs_gpu
def test_a_cuda_graph_captures_it_and_sees_new_numbers() -> None:
    for config in configs():
        tensors = on_gpu(7, 501)
        other = on_gpu(7, 501, seed=1)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            with_gradient(lambda: policy_loss(*tensors, config), tensors[0])  # noqa: B023
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = with_gradient(lambda: policy_loss(*tensors, config), tensors[0])  # noqa: B023
        with torch.no_grad():
            for target, source in zip(tensors, other, strict=True):
                target.copy_(source)
        graph.replay()
        fresh = with_gradient(lambda: policy_loss(*other, config), other[0])  # noqa: B023
        assert all(map(torch.equal, captured, fresh))


@needs_gpu
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_torch_compile_agrees_on_the_gpu() -> None:
    tensors = on_gpu(7, 501)
    for config in configs():
        torch._dynamo.reset()
        eager = with_gradient(lambda: policy_loss(*tensors, config), tensors[0])  # noqa: B023
        compiled = torch.compile(lambda *x: policy_loss(*x, config), fullgraph=True)  # noqa: B023
        for left, right in zip(with_gradient(lambda: compiled(*tensors), tensors[0]), eager, strict=True):  # noqa: B023
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


@needs_gpu
def test_more_tokens_than_32_bits_of_bytes() -> None:
    """2**31 bytes of logprobs and more: offsets must not wrap."""
    width = (1 << 29) + 4096
    new = torch.full((1, width), -1.0, device="cuda", requires_grad=True)
    output = policy_loss(new, new.detach(), torch.ones(1, device="cuda"), torch.ones_like(new, dtype=torch.bool))
    (gradient,) = torch.autograd.grad(output.loss, new)
    assert output.loss.item() == pytest.approx(-1.0, rel=1e-5)
    assert torch.equal(gradient, torch.full_like(gradient, gradient[0, 0].item()))
