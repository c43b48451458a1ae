"""StepGuard: one verdict a step, on one process and on two (gloo, on the CPU)."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from trainer_hooks import StepGuard  # noqa: E402
from trainer_hooks.guard import GuardCounts, NonFiniteStep  # noqa: E402

BAD = [
    pytest.param(math.nan, id="nan"),
    pytest.param(math.inf, id="inf"),
    pytest.param(-math.inf, id="-inf"),
    pytest.param(1e30, id="too large to square"),
]


Work = Callable[[int], Any]


def make(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer, StepGuard]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, StepGuard(optimizer, **options)


def backward(model: nn.Module, poison: float | None = None) -> Tensor:
    model.zero_grad()
    loss: Tensor = model(torch.ones(5, 4)).square().mean()
    loss.backward()
    if poison is not None:
        list(model.parameters())[2].grad[1, 1] = poison
    return loss


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def assert_same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_a_guarded_run_without_bad_steps_is_the_plain_one() -> None:
    model, optimizer, guard = make()
    twin = copy.deepcopy(model)
    plain = torch.optim.AdamW(twin.parameters(), lr=0.1)
    for _ in range(4):
        guard.observe(backward(model))
        optimizer.step()
        backward(twin)
        plain.step()
    assert_same(state_of(model, optimizer), state_of(twin, plain))
    assert guard.counts == GuardCounts(steps=4)


@pytest.mark.parametrize("poison", BAD)
def test_a_bad_gradient_leaves_parameters_and_optimizer_state_bitwise_alone(poison: float) -> None:
    model, optimizer, guard = make()
    backward(model)
    optimizer.step()
    before = state_of(model, optimizer)
    backward(model, poison)
    optimizer.step()
    assert_same(state_of(model, optimizer), before)
    assert guard.counts == GuardCounts(steps=2, skipped=1, consecutive=1, nonfinite_gradients=1)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_bad_loss_refuses_the_step_though_the_gradients_are_finite(loss: float) -> None:
    model, optimizer, guard = make()
    backward(model)
    before = state_of(model, optimizer)
    for micro_batch in (0.5, loss, 0.25):
        guard.observe(torch.tensor(micro_batch))
    assert guard.step() is False
    assert_same(state_of(model, optimizer), before)
    assert guard.counts == GuardCounts(steps=1, skipped=1, consecutive=1, nonfinite_losses=1)
    assert guard.step(backward(model)) is True  # what was observed does not outlive its step
    assert guard.counts == GuardCounts(steps=2, skipped=1, nonfinite_losses=1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_finite_gradients_whose_norm_overflows_their_own_dtype_are_good(dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.zeros(1000, dtype=dtype))
    guard = StepGuard(torch.optim.SGD([parameter], lr=1e-4))
    parameter.grad = torch.full_like(parameter, 6e4)
    assert guard.step() is True
    parameter.grad[3] = math.nan
    assert guard.step() is False


def test_a_sparse_gradient_is_judged_by_its_values() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    guard = StepGuard(torch.optim.SparseAdam(table.parameters()))
    table(torch.tensor([1, 3])).sum().backward()
    assert guard.step() is True
    table.weight.grad._values()[0, 0] = math.nan
    assert guard.step() is False


def test_a_step_without_any_gradient_is_good() -> None:
    _, optimizer, guard = make()
    optimizer.step()
    assert guard.counts == GuardCounts(steps=1)


def test_stop_raises_at_the_first_refusal_and_steps_nothing() -> None:
    model, optimizer, guard = make(policy="stop")
    before = state_of(model, optimizer)
    backward(model, math.nan)
    with pytest.raises(NonFiniteStep, match="step 1 refused: 0 losses and the gradients of 1 ranks were not finite"):
        optimizer.step()
    assert_same(state_of(model, optimizer), before)
    assert guard.counts.skipped == 1


def test_a_streak_raises_and_a_good_step_ends_it() -> None:
    model, optimizer, guard = make(max_consecutive=3)
    for poison in (math.nan, math.nan, None, math.nan, math.nan):
        backward(model, poison)
        optimizer.step()
    assert guard.counts == GuardCounts(steps=5, skipped=4, consecutive=2, nonfinite_gradients=4)
    backward(model, math.nan)
    with pytest.raises(NonFiniteStep, match="3 steps refused in a row"):
        optimizer.step()


def test_a_checkpoint_may_be_written_only_after_a_good_step() -> None:
    model, optimizer, guard = make()
    seen = []
    for poison in (None, math.nan, math.nan, None):
        backward(model, poison)
        optimizer.step()
        seen.append(guard.may_checkpoint)
    assert seen == [True, False, False, True]


def test_an_overflow_that_clipping_would_hide_is_seen_by_a_check_before_it() -> None:
    model, optimizer, guard = make()
    before = state_of(model, optimizer)
    backward(model, 1e30)
    assert guard.check() is False
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert all(bool((p.grad == 0).all()) for p in model.parameters())  # nothing is left to be seen
    optimizer.step()
    assert_same(state_of(model, optimizer), before)
    assert guard.counts == GuardCounts(steps=1, skipped=1, consecutive=1, nonfinite_gradients=1)


@pytest.mark.parametrize("guard_first", [True, False])
def test_a_learning_rate_scheduler_may_be_made_before_or_after_the_guard(guard_first: bool) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if guard_first:
        guard = StepGuard(optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    if not guard_first:
        guard = StepGuard(optimizer)
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        scheduler.step()
    assert guard.counts.steps == 2
    assert optimizer.param_groups[0]["lr"] == 0.25


def scaled_backward(model: nn.Module, scaler: Any, poison: float | None = None) -> Tensor:
    model.zero_grad()
    loss: Tensor = model(torch.ones(5, 4)).square().mean()
    scaler.scale(loss).backward()
    if poison is not None:
        list(model.parameters())[2].grad[1, 1] = poison
    return loss


def test_a_scaler_steps_through_the_guard_as_it_does_without() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    model, optimizer, guard = make(scaler=scaler)
    twin = copy.deepcopy(model)
    plain, twin_scaler = torch.optim.AdamW(twin.parameters(), lr=0.1), copy.deepcopy(scaler)
    for _ in range(3):
        assert guard.step(scaled_backward(model, scaler)) is True
        scaled_backward(twin, twin_scaler)
        twin_scaler.step(plain)
        twin_scaler.update()
    assert_same(state_of(model, optimizer), state_of(twin, plain))
    assert scaler.state_dict() == twin_scaler.state_dict()
    assert scaler.get_scale() == 2048.0


def test_a_bad_loss_leaves_the_scaler_alone() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model, optimizer, guard = make(scaler=scaler)
    guard.step(scaled_backward(model, scaler))
    before, scaler_before = state_of(model, optimizer), scaler.state_dict()
    scaled_backward(model, scaler, math.nan)
    assert guard.step(torch.tensor(math.nan)) is False
    assert_same(state_of(model, optimizer), before)
    assert scaler.state_dict() == scaler_before


@pytest.mark.parametrize("unscaled", [True, False], ids=["unscaled for clipping", "scaled"])
def test_an_overflow_under_a_finite_loss_lets_the_scaler_back_off_without_a_step(unscaled: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model, optimizer, guard = make(scaler=scaler)
    guard.step(scaled_backward(model, scaler))
    before = state_of(model, optimizer)
    loss = scaled_backward(model, scaler, math.inf)
    if unscaled:
        scaler.unscale_(optimizer)
    assert guard.step(loss) is False
    assert_same(state_of(model, optimizer), before)
    assert scaler.get_scale() == 512.0
    assert guard.step(scaled_backward(model, scaler)) is True


def test_the_optimizer_gets_its_own_step_back() -> None:
    model, optimizer, guard = make()
    guard.unbind()
    backward(model, math.nan)
    optimizer.step()
    assert not bool(torch.isfinite(list(model.parameters())[2]).all())
    assert guard.counts == GuardCounts()


def test_a_guard_is_bound_later_and_to_another_optimizer() -> None:
    model, first, _ = make()
    guard = StepGuard(None)
    with pytest.raises(RuntimeError, match="bound to no optimizer"):
        guard.check()
    second = torch.optim.SGD(model.parameters(), lr=0.1)
    guard.bind(first)
    guard.bind(second)
    backward(model, math.nan)
    second.step()
    assert guard.counts.skipped == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "ignore"}, "policy must be 'skip' or 'stop', not 'ignore'"),
        ({"max_consecutive": 0}, "max_consecutive must be at least 1, not 0"),
    ],
    ids=["policy", "max_consecutive"],
)
def test_a_setting_without_meaning_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_a_closure_is_refused() -> None:
    _, optimizer, _ = make()
    with pytest.raises(TypeError, match="closure"):
        optimizer.step(lambda: torch.zeros(()))


def test_a_verdict_reads_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, guard = make()
    guard.observe(backward(model))
    read: list[str] = []
    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "cpu", "numpy", "nonzero"):
        original = getattr(Tensor, name)
        monkeypatch.setattr(Tensor, name, lambda *a, _n=name, _o=original, **k: (read.append(_n), _o(*a, **k))[1])
    guard.check()
    assert read == ["tolist"]


def _on_rank(rank: int, scratch: Path) -> None:
    """All the works of one rank, one after the other in one process: starting it is what takes time."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=rank, world_size=2)
    results = {work.__name__: work(rank) for work in (_poisoned_rank, _ddp, _fsdp, _one_without_gradients, _streak)}
    torch.save(results, scratch / f"rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Work], list[Any]]:
    """What a work gave on each of two gloo ranks."""
    scratch = tmp_path_factory.mktemp("ranks")
    context = torch.multiprocessing.get_context("spawn")
    processes = [context.Process(target=_on_rank, args=(rank, scratch)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=240)
    assert [process.exitcode for process in processes] == [0, 0]
    results = [torch.load(scratch / f"rank{rank}.pt") for rank in range(2)]
    return lambda work: [result[work.__name__] for result in results]


@contextmanager
def _counted_all_reduces() -> Iterator[list[int]]:
    """The number of elements of each all-reduce meanwhile."""
    sizes: list[int] = []
    original = dist.all_reduce

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    dist.all_reduce = counted
    try:
        yield sizes
    finally:
        dist.all_reduce = original


def _poisoned_rank(rank: int) -> dict[str, Any]:
    """Gradients of its own on each rank, NaN on rank 1 in the middle step: as where something else averages them."""
    model, optimizer, guard = make()
    taken = []
    with _counted_all_reduces() as sizes:
        for step in range(3):
            backward(model, math.nan if rank == 1 and step == 1 else None)
            taken.append(guard.step())
    return {"model": model.state_dict(), "taken": taken, "sizes": sizes}


def test_two_ranks_skip_together_when_one_has_a_bad_gradient(two_ranks: Callable[[Work], list[Any]]) -> None:
    first, second = two_ranks(_poisoned_rank)
    assert first["taken"] == second["taken"] == [True, False, True]
    assert_same(first["model"], second["model"])
    assert first["sizes"] == second["sizes"] == [2, 2, 2]


def _ddp(rank: int) -> dict[str, Any]:
    model, _, _ = make()
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.1)
    guard = StepGuard(optimizer)
    for step in range(3):
        optimizer.zero_grad()
        loss = parallel(torch.full((2, 4), 1.0 + rank)).square().mean()
        (loss * (math.nan if rank == 1 and step == 1 else 1.0)).backward()
        guard.step(loss)
    return {"model": model.state_dict(), "counts": guard.counts.skipped}


def test_ddp_ranks_stay_identical_through_a_bad_step(two_ranks: Callable[[Work], list[Any]]) -> None:
    first, second = two_ranks(_ddp)
    assert (first["counts"], second["counts"]) == (1, 1)
    assert_same(first["model"], second["model"])
    assert all(bool(torch.isfinite(p).all()) for p in first["model"].values())


def _fsdp(rank: int) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    mesh = dist.init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    guard = StepGuard(optimizer)
    taken, shards = [], []
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 4), 1.0 + rank)).square().mean().backward()
        if rank == 1 and step == 1:
            model[0].weight.grad.to_local()[0, 0] = math.nan  # in a shard that rank 0 never sees
        taken.append(guard.step())
        shards.append([p.to_local().clone() for p in model.parameters()])
    return {"taken": taken, "shards": shards}


def test_fsdp2_ranks_skip_together_when_one_shard_is_bad(two_ranks: Callable[[Work], list[Any]]) -> None:
    for rank in two_ranks(_fsdp):
        assert rank["taken"] == [True, False, True]
        first, second, third = rank["shards"]
        assert_same(first, second)
        assert not torch.equal(second[0], third[0])
        assert all(bool(torch.isfinite(p).all()) for p in third)


def _one_without_gradients(rank: int) -> dict[str, Any]:
    model, optimizer, guard = make()
    before = copy.deepcopy(model.state_dict())
    if rank == 1:
        backward(model, math.nan)
    taken = guard.step()
    unchanged = all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    return {"taken": taken, "unchanged": unchanged}


def test_a_rank_without_gradients_takes_part(two_ranks: Callable[[Work], list[Any]]) -> None:
    assert two_ranks(_one_without_gradients) == [{"taken": False, "unchanged": True}] * 2


def _streak(rank: int) -> dict[str, Any]:
    model, optimizer, guard = make(max_consecutive=2)
    steps = 0
    try:
        while steps < 10:
            guard.observe(torch.tensor(math.nan if rank == 0 else 0.5))
            backward(model)
            optimizer.step()
            steps += 1
    except NonFiniteStep as stopped:
        return {"steps": steps, "why": str(stopped)}
    return {}


def test_a_streak_on_one_rank_stops_both(two_ranks: Callable[[Work], list[Any]]) -> None:
    why = "2 steps refused in a row, the last because 1 losses and the gradients of 0 ranks were not finite"
    assert two_ranks(_streak) == [{"steps": 1, "why": why}] * 2
