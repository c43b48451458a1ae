"""policy_loss on the CPU: against a naive float64 reference, its invariances, and the failing inputs from the field."""

import itertools
import math
from dataclasses import replace
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from policy_reference import reference  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from trainer_hooks import PolicyLossConfig, PolicyLossOutput, policy_loss  # noqa: E402
from trainer_hooks.objective import METRICS, Batch, evaluate  # noqa: E402
from trainer_hooks.sequences import PaddedSequences  # noqa: E402

NAN, INF = math.nan, math.inf
LOSSES = ("grpo", "dapo", "bnpo", "dr_grpo", "gspo", "cispo")
POLICIES = ("on_policy", "drop")
UNSCORABLE = (NAN, INF, -INF, -9999.0, -1e30, 9999.0, 0.5)
# Of the gradient; the loss is float32 whatever comes in.
TOLERANCE = {torch.float64: 2e-5, torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def config(loss: str = "dapo", unscorable: str = "on_policy", **options: Any) -> PolicyLossConfig:
    return PolicyLossConfig(loss=cast(Any, loss), unscorable=cast(Any, unscorable), max_length=11, **options)


def gradient_of(output: PolicyLossOutput, new: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(output.loss, new, retain_graph=True)
    return cast(Tensor, gradient)


def make(rows: int, width: int, dtype: Any = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logprobs with every kind of unscorable, clipped, far-off and masked token; the last row is all masked."""
    generator = torch.Generator().manual_seed(seed)
    new = -2.0 * torch.rand(rows, width, generator=generator)
    old = (new + 0.4 * torch.randn(rows, width, generator=generator)).clamp(max=0.0)
    kinds = torch.randint(0, 3 * len(UNSCORABLE), (rows, width), generator=generator)
    for kind, value in enumerate(UNSCORABLE):
        old[kinds == kind] = value
    advantages = torch.randn(rows, width, generator=generator)
    mask = torch.rand(rows, width, generator=generator) < 0.8
    if rows > 1:
        mask[-1] = False
        old[0, :2], mask[0, :2] = torch.tensor([-91.0, -60.0]), True  # beyond the bound
        advantages[0, 2] = 0.0
    new[~mask], old[~mask], advantages[~mask] = NAN, INF, NAN
    return new.to(dtype).requires_grad_(), old.to(dtype), advantages.to(dtype), mask


def plain(value: float = 0.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Three trained tokens on policy, the advantage 1."""
    new = torch.tensor([[-1.0, -2.0, -3.0]], requires_grad=True)
    return new, new.detach().clone() + value, torch.ones(1), torch.ones(1, 3, dtype=torch.bool)


GRID = list(itertools.product(LOSSES, POLICIES, [(1, 1), (1, 9), (4, 9)], ["row", "column", "token"]))


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(
    ("loss", "unscorable", "shape", "kind"), GRID, ids=["-".join(map(str, (a, b, *c, d))) for a, b, c, d in GRID]
)
def test_agrees_with_the_naive_reference(
    loss: str, unscorable: str, shape: tuple[int, int], kind: str, dtype: Any
) -> None:
    for seed, options in enumerate(({}, {"clip_ratio_c": 1.5, "clip_high": 0.28}, {"denominator": 17.0})):
        new, old, advantages, mask = make(*shape, dtype=dtype, seed=seed)
        if kind != "token":
            advantages = advantages.nan_to_num().sum(-1, keepdim=kind == "column")
        chosen = config(loss, unscorable, **options)
        expected = reference(new, old, advantages, mask, chosen)
        output = policy_loss(new, old, advantages, mask, chosen)
        assert output.loss.dtype is torch.float32
        # A far-off token with a negative advantage is worth exp(20): what is small beside it is lost in float32.
        slack = 1e-6 * max(1.0, abs(expected.loss))
        assert output.loss.item() == pytest.approx(expected.loss, rel=2e-5, abs=slack)
        gradient = gradient_of(output, new)
        assert gradient.dtype is dtype
        torch.testing.assert_close(gradient.double(), expected.gradient, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        for name, value in expected.metrics.items():
            assert output.metrics[name].item() == pytest.approx(value, rel=2e-5, abs=1e-6), name


class _Smooth(torch.autograd.Function):
    """The arithmetic by itself, in float64, which the public function never computes in."""

    @staticmethod
    def forward(ctx: Any, new: Tensor, batch: Batch, chosen: PolicyLossConfig) -> Tensor:
        evaluation = evaluate(replace(batch, new=new), chosen)
        ctx.save_for_backward(evaluation.gradient * evaluation.scale)
        return evaluation.loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0], None, None


@pytest.mark.parametrize("dual", [None, 1.3], ids=["no dual", "dual"])
@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss != "cispo"])  # its weight is detached
def test_gradcheck(loss: str, dual: float | None) -> None:
    torch.manual_seed(3)
    new = -torch.rand(3, 8, dtype=torch.float64)
    old = new + torch.empty_like(new).uniform_(-0.5, 0.5)
    old[0, 1], old[1, 2] = new[0, 1] - 30.0, NAN  # beyond the bound; unscorable
    batch = Batch(new, old, torch.randn_like(new), torch.rand(3, 8) < 0.8, PaddedSequences(3), -9999.0)
    chosen = config(loss, "drop", clip_ratio_c=dual)
    assert torch.autograd.gradcheck(lambda x: _Smooth.apply(x, batch, chosen), new.requires_grad_(), atol=1e-5)


garbage = st.sampled_from([NAN, INF, -INF, 1e30, -1e30, 9999.0, -9999.0, 0.0, -1.0, 3.4e38])


@settings(max_examples=40, deadline=None)
@given(loss=st.sampled_from(LOSSES), policy=st.sampled_from(POLICIES), fill=st.tuples(garbage, garbage, garbage))
def test_garbage_at_masked_slots_changes_no_bit(loss: str, policy: str, fill: tuple[float, float, float]) -> None:
    new, old, advantages, mask = make(4, 9)
    chosen = config(loss, policy)
    clean = policy_loss(new, old, advantages, mask, chosen)
    dirty_new = torch.where(mask, new.detach(), fill[0]).requires_grad_()
    dirty = policy_loss(
        dirty_new, torch.where(mask, old, fill[1]), torch.where(mask, advantages, fill[2]), mask, chosen
    )
    assert torch.equal(clean.loss, dirty.loss)
    assert torch.equal(gradient_of(clean, new), gradient_of(dirty, dirty_new))
    assert all(torch.equal(clean.metrics[name], dirty.metrics[name]) for name in METRICS)
    assert not gradient_of(dirty, dirty_new)[~mask].any()


@settings(max_examples=40, deadline=None)
@given(loss=st.sampled_from(LOSSES), policy=st.sampled_from(POLICIES), value=st.sampled_from(UNSCORABLE))
def test_which_unscorable_value_it_is_changes_no_bit(loss: str, policy: str, value: float) -> None:
    new, old, advantages, mask = make(4, 9)
    lost = mask & (torch.arange(36).reshape(4, 9) % 3 == 0)
    outputs = [
        policy_loss(new, torch.where(lost, filling, old), advantages, mask, config(loss, policy))
        for filling in (NAN, value)
    ]
    assert torch.equal(outputs[0].loss, outputs[1].loss)
    assert torch.equal(*(gradient_of(output, new) for output in outputs))


@pytest.mark.parametrize("loss", LOSSES)
def test_drop_gives_no_gradient_and_keeps_the_denominator(loss: str) -> None:
    new, old, advantages, mask = plain()
    whole = policy_loss(new, old, advantages, mask, config(loss, "drop"))
    old[0, 1] = NAN
    dropped = policy_loss(new, old, advantages, mask, config(loss, "drop"))
    expected = gradient_of(whole, new).clone()
    if loss == "gspo":  # the two scored tokens share the ratio: its gradient is theirs alone
        assert gradient_of(dropped, new).tolist() == pytest.approx(expected.where(torch.tensor([1, 0, 1]) > 0, 0.0))
    else:
        expected[0, 1] = 0.0
        assert torch.equal(gradient_of(dropped, new), expected)


@pytest.mark.parametrize("value", UNSCORABLE, ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_on_policy_gives_ratio_one_and_the_plain_policy_gradient(loss: str, value: float) -> None:
    new = torch.tensor([[-0.1, -2.0], [-30.0, -4.0]], requires_grad=True)
    advantages = torch.tensor([2.0, -3.0])
    mask = torch.ones(2, 2, dtype=torch.bool)
    # The tightest clipping there is: at a ratio of exactly 1 it is inert.
    chosen = config(loss, clip_low=0.0, clip_high=0.0, clip_ratio_c=1.0000001, denominator=1.0)
    output = policy_loss(new, torch.full((2, 2), value), advantages, mask, chosen)
    assert gradient_of(output, new).tolist() == [[-2.0, -2.0], [3.0, 3.0]]
    assert output.metrics["ratio_mean"].item() == 1.0
    assert [output.metrics[name].item() for name in METRICS[1:]] == [0.0, 0.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("loss", LOSSES)
def test_order_of_rows_does_not_matter(loss: str, policy: str) -> None:
    new, old, advantages, mask = make(6, 9)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    moved = new.detach()[order].requires_grad_()
    straight = policy_loss(new, old, advantages, mask, config(loss, policy))
    permuted = policy_loss(moved, old[order], advantages[order], mask[order], config(loss, policy))
    assert permuted.loss.item() == pytest.approx(straight.loss.item(), rel=1e-6)
    torch.testing.assert_close(gradient_of(permuted, moved), gradient_of(straight, new)[order], rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("loss", LOSSES)
def test_padding_does_not_matter(loss: str, policy: str) -> None:
    new, old, advantages, mask = make(4, 9)
    tight = policy_loss(new, old, advantages, mask, config(loss, policy))
    wide = [torch.cat((x.detach(), torch.full((4, 5), NAN)), dim=1) for x in (new, old, advantages)]
    wide[0].requires_grad_()
    padded = policy_loss(*wide, torch.cat((mask, torch.zeros(4, 5).bool()), dim=1), config(loss, policy))
    assert padded.loss.item() == pytest.approx(tight.loss.item(), rel=1e-6)
    expected = torch.cat((gradient_of(tight, new), torch.zeros(4, 5)), dim=1)
    torch.testing.assert_close(gradient_of(padded, wide[0]), expected, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("per_sequence", [False, True], ids=["(T,)", "(S,)"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("loss", LOSSES)
def test_packed_equals_padded(loss: str, policy: str, per_sequence: bool) -> None:
    lengths = [5, 1, 0, 9]
    new, old, advantages, mask = make(4, 9)
    mask &= torch.arange(9) < torch.tensor(lengths).unsqueeze(1)
    per_row = torch.tensor([1.0, -2.0, 3.0, -0.5])
    if per_sequence:
        advantages = per_row.unsqueeze(1).expand(4, 9)
    inside = torch.arange(9) < torch.tensor(lengths).unsqueeze(1)
    packed = [x.detach()[inside] for x in (new, old, advantages, mask)]
    packed[0].requires_grad_()
    if per_sequence:
        packed[2] = per_row
    boundaries = torch.tensor([0, *itertools.accumulate(lengths)])
    one = policy_loss(new, old, advantages, mask, config(loss, policy))
    two = policy_loss(*packed, config(loss, policy), cu_seqlens=boundaries)
    assert two.loss.item() == pytest.approx(one.loss.item(), rel=1e-6)
    torch.testing.assert_close(gradient_of(two, packed[0]), gradient_of(one, new)[inside], rtol=1e-6, atol=1e-9)
    for name in METRICS:
        assert two.metrics[name].item() == pytest.approx(one.metrics[name].item(), rel=1e-6)


@pytest.mark.parametrize("loss", ["dapo", "bnpo", "cispo"])
def test_packed_without_boundaries_serves_the_token_level_losses(loss: str) -> None:
    new, old, advantages, mask = make(1, 9)
    padded = policy_loss(new, old, advantages, mask, config(loss))
    packed = policy_loss(*(x.reshape(-1) for x in (new, old, advantages, mask)), config(loss))
    assert torch.equal(packed.loss, padded.loss)


@pytest.mark.parametrize(
    ("loss", "denominator"), [("grpo", None), ("dr_grpo", None), ("gspo", None), ("gspo", 3.0)], ids=str
)
def test_sequence_level_loss_on_a_packed_batch_asks_for_boundaries(loss: str, denominator: float | None) -> None:
    packed = [x.reshape(-1) for x in make(1, 9)]
    with pytest.raises(ValueError, match=f"^loss {loss} on a packed batch needs cu_seqlens"):
        policy_loss(*packed, config(loss, denominator=denominator))


@pytest.mark.parametrize("denominator", [4.0, 4, torch.tensor(4.0), torch.tensor([4])], ids=repr)
@pytest.mark.parametrize("loss", LOSSES)
def test_explicit_denominator_divides_the_sum(loss: str, denominator: Any) -> None:
    new, old, advantages, mask = plain()
    output = policy_loss(new, old, advantages, mask, config(loss, denominator=denominator))
    assert gradient_of(output, new).tolist() == [[-0.25, -0.25, -0.25]]


@pytest.mark.parametrize("denominator", [None, 8.0, torch.tensor(0.0)], ids=["own rule", "number", "zero tensor"])
@pytest.mark.parametrize("loss", LOSSES)
def test_all_masked_batch_gives_zero_with_a_graph(loss: str, denominator: Any) -> None:
    new = torch.full((2, 3), NAN, requires_grad=True)
    output = policy_loss(
        new, new.detach(), torch.full((2, 3), INF), torch.zeros(2, 3).bool(), config(loss, denominator=denominator)
    )
    assert output.loss.item() == 0.0
    output.loss.backward()
    assert new.grad is not None and not new.grad.any()
    assert [output.metrics[name].item() for name in METRICS] == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0,)], ids=str)
def test_empty_batch_gives_zero_with_a_graph(shape: tuple[int, ...]) -> None:
    new = torch.zeros(shape, requires_grad=True)
    output = policy_loss(new, torch.zeros(shape), torch.zeros(shape), torch.zeros(shape).bool())
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert new.grad is not None and tuple(new.grad.shape) == shape


@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_nonfinite_new_logprob_at_a_trained_token_is_seen(loss: str, value: float) -> None:
    new, old, advantages, mask = plain()
    broken = new.detach().clone()
    broken[0, 1] = value
    output = policy_loss(broken.requires_grad_(), old, advantages, mask, config(loss))
    assert math.isnan(output.loss.item())
    assert math.isnan(output.metrics["kl"].item())
    assert output.metrics["nonfinite_fraction"].item() == pytest.approx(1 / 3)
    assert math.isnan(gradient_of(output, broken)[0, 1].item())


def test_nonfinite_new_logprob_is_seen_where_the_old_one_is_unscorable_too() -> None:
    new, old, advantages, mask = plain()
    broken = torch.tensor([[-1.0, NAN, -3.0]], requires_grad=True)
    old[0, 1] = NAN
    on_policy = policy_loss(broken, old, advantages, mask, config())
    assert math.isnan(on_policy.loss.item())
    # Dropped, it has no part in the loss; the metric still tells.
    dropped = policy_loss(broken, old, advantages, mask, config("dapo", "drop"))
    assert dropped.loss.item() == pytest.approx(-2 / 3)
    assert gradient_of(dropped, broken).tolist() == pytest.approx(torch.tensor([[-1 / 3, 0.0, -1 / 3]]))
    assert dropped.metrics["nonfinite_fraction"].item() == pytest.approx(1 / 3)


def test_nan_advantage_at_a_trained_token_is_seen() -> None:
    for loss in LOSSES:
        new, old, _, mask = plain()
        output = policy_loss(new, old, torch.tensor([NAN]), mask, config(loss))
        assert math.isnan(output.loss.item()), loss


def test_metrics_are_detached_scalars_and_the_loss_is_not() -> None:
    new, old, advantages, mask = make(4, 9)
    output = policy_loss(new, old, advantages, mask)
    assert tuple(output.metrics) == METRICS
    assert all(value.dim() == 0 and not value.requires_grad for value in output.metrics.values())
    assert output.loss.dim() == 0 and output.loss.requires_grad


def test_gradient_stops_at_old_logprobs_and_advantages() -> None:
    new, old, advantages, mask = plain()
    policy_loss(new, old.requires_grad_(), advantages.requires_grad_(), mask).loss.backward()
    assert new.grad is not None and old.grad is None and advantages.grad is None


def test_backward_twice_gives_twice_the_gradient() -> None:
    new, old, advantages, mask = make(4, 9)
    loss = policy_loss(new, old, advantages, mask).loss
    loss.backward(retain_graph=True)
    assert new.grad is not None
    once = new.grad.clone()
    (3.0 * loss).backward()
    torch.testing.assert_close(new.grad, 4.0 * once, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.uint8], ids=str)
def test_mask_may_come_in_any_dtype(dtype: Any) -> None:
    new, old, advantages, mask = make(4, 9)
    expected = policy_loss(new, old, advantages, mask)
    assert torch.equal(policy_loss(new, old, advantages, mask.to(dtype)).loss, expected.loss)


def test_views_that_are_not_contiguous() -> None:
    new, old, advantages, mask = make(4, 9)
    expected = policy_loss(new, old, advantages, mask)
    turned = [x.t().contiguous().t() for x in (old, advantages, mask)]
    assert torch.equal(policy_loss(new, *turned).loss, expected.loss)


def test_bfloat16_floor_is_unscorable_though_it_reads_minus_9984() -> None:
    new, old, advantages, mask = plain()
    old = old.bfloat16()
    old[0, 1] = -9999.0
    assert old[0, 1].item() == -9984.0
    assert policy_loss(new, old, advantages, mask).metrics["unscorable_fraction"].item() == pytest.approx(1 / 3)


SHAPES: list[Any] = [
    pytest.param((2, 3), (2, 4), (2,), (2, 3), "must share one shape", id="old"),
    pytest.param((2, 3), (2, 3), (2,), (2, 1), "must share one shape", id="mask"),
    pytest.param((2, 3), (2, 3), (3,), (2, 3), "advantages must be", id="advantages"),
    pytest.param((2, 3), (2, 3), (1, 3), (2, 3), "advantages must be", id="advantages of a row"),
    pytest.param((3,), (3,), (1,), (3,), "advantages must be", id="packed advantages"),
    pytest.param((2, 3, 4), (2, 3, 4), (2,), (2, 3, 4), "must share one shape", id="three dimensions"),
    pytest.param((), (), (), (), "must share one shape", id="no dimension"),
]


@pytest.mark.parametrize(("new", "old", "advantages", "mask", "message"), SHAPES)
def test_shapes_that_do_not_fit_are_refused(new: Any, old: Any, advantages: Any, mask: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy_loss(torch.zeros(new), torch.zeros(old), torch.zeros(advantages), torch.zeros(mask))


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        (torch.tensor([0.0, 3.0]), "cu_seqlens must be"),
        (torch.tensor([0]), "cu_seqlens must be"),
        (torch.tensor([[0, 3]]), "cu_seqlens must be"),
    ],
    ids=["floats", "no sequence", "two dimensions"],
)
def test_boundaries_that_are_none_are_refused(cu_seqlens: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy_loss(*(torch.zeros(3) for _ in range(4)), cu_seqlens=cu_seqlens)


def test_boundaries_belong_to_packed_batches_and_logprobs_are_floats() -> None:
    with pytest.raises(ValueError, match="cu_seqlens belongs to a packed batch"):
        policy_loss(*(torch.zeros(2, 3) for _ in range(4)), cu_seqlens=torch.tensor([0, 3]))
    with pytest.raises(ValueError, match="logprobs must be floats"):
        policy_loss(torch.zeros(2, 3).long(), *(torch.zeros(2, 3) for _ in range(3)))


BAD_CONFIGS: list[Any] = [
    pytest.param({"loss": "ppo"}, "loss must be one of grpo, dapo, bnpo, dr_grpo, gspo, cispo", id="loss"),
    pytest.param({"unscorable": "zero"}, "unscorable must be one of on_policy, drop", id="unscorable"),
    pytest.param({"clip_low": -0.1}, "clip_low", id="clip_low"),
    pytest.param({"clip_high": NAN}, "clip_high", id="clip_high"),
    pytest.param({"clip_ratio_c": 1.0}, "clip_ratio_c", id="clip_ratio_c"),
    pytest.param({"log_ratio_bound": 0.0}, "log_ratio_bound", id="no bound"),
    pytest.param({"log_ratio_bound": INF}, "log_ratio_bound", id="endless bound"),
    pytest.param({"denominator": 0.0}, "denominator", id="zero denominator"),
    pytest.param({"denominator": NAN}, "denominator", id="NaN denominator"),
    pytest.param({"denominator": torch.ones(2)}, "denominator", id="two denominators"),
    pytest.param({"loss": "dr_grpo"}, "dr_grpo needs a max_length", id="dr_grpo"),
]


@pytest.mark.parametrize(("options", "message"), BAD_CONFIGS)
def test_config_that_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}|^loss {message}"):
        PolicyLossConfig(**options)


def test_cispo_weight_is_capped_and_gradient_still_flows() -> None:
    new = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    old = torch.tensor([[-1.0 - math.log(3.0), -1.0 + math.log(2.0) - 0.7]])
    output = policy_loss(new, old, torch.tensor([2.0]), torch.ones(1, 2), config("cispo", clip_high=0.5))
    low = math.exp(0.7) / 2
    assert gradient_of(output, new).flatten().tolist() == pytest.approx([-1.5, -low])
    assert output.loss.item() == pytest.approx((2 * 1.5 + 2 * low) / 2)
    assert output.metrics["clip_high_fraction"].item() == 0.5


class _NoReadback(TorchDispatchMode):
    """Refuses what makes the host wait for the device: reading a value, or a shape that depends on one."""

    REFUSED = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "unique", "equal", "item")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert not name.startswith(self.REFUSED), name
        if name in ("index", "index_put", "index_put_"):
            assert all(index is None or index.dtype is not torch.bool for index in args[1]), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("denominator", [None, 5.0, torch.tensor(5.0)], ids=["own rule", "number", "tensor"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("loss", LOSSES)
def test_nothing_is_read_back_from_the_device(loss: str, packed: bool, denominator: Any) -> None:
    tensors, boundaries = list(make(4, 9)), None
    if packed:
        tensors = [x.detach().reshape(-1) for x in tensors]
        tensors[0].requires_grad_()
        boundaries = torch.tensor([0, 9, 18, 27, 36])
    chosen = config(loss, denominator=denominator)
    with _NoReadback():
        policy_loss(*tensors, chosen, cu_seqlens=boundaries).loss.backward()


def test_the_refusal_itself_works() -> None:
    with _NoReadback(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        torch.ones(()).item()
    with _NoReadback(), pytest.raises(AssertionError, match="index"):
        torch.ones(3)[torch.tensor([True, False, True])]


@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")  # dynamo does so
@pytest.mark.parametrize("loss", LOSSES)
def test_compiles_as_one_graph_to_the_same_bits(loss: str) -> None:
    torch._dynamo.reset()
    new, old, advantages, mask = make(4, 9)
    chosen = config(loss)
    compiled = torch.compile(lambda *tensors: policy_loss(*tensors, chosen), fullgraph=True, backend="aot_eager")
    expected, output = policy_loss(new, old, advantages, mask, chosen), compiled(new, old, advantages, mask)
    assert torch.equal(output.loss, expected.loss)
    assert torch.equal(gradient_of(output, new), gradient_of(expected, new))
    assert all(torch.equal(output.metrics[name], expected.metrics[name]) for name in METRICS)


def test_field_prime_rl_2084_masked_far_off_token() -> None:
    new = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    output = policy_loss(new, torch.tensor([[-1.0, -91.0]]), torch.tensor([-1.0]), torch.tensor([[1, 0]]))
    assert output.loss.item() == 1.0
    assert gradient_of(output, new).tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize("advantage", [1.0, -1.0], ids=["positive", "negative"])
def test_field_prime_rl_2972_log_ratio_89_is_bounded_and_counted(advantage: float) -> None:
    new = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    output = policy_loss(new, torch.tensor([[-1.0, -90.0]]), torch.tensor([advantage]), torch.ones(1, 2))
    expected = (-1.0 - 1.2) / 2 if advantage > 0 else (1.0 + math.exp(20.0)) / 2
    assert output.loss.item() == pytest.approx(expected)
    assert gradient_of(output, new).tolist() == [[-advantage / 2, 0.0]]
    assert output.metrics["clip_high_fraction"].item() == 0.5
    assert output.metrics["kl"].item() == pytest.approx((math.exp(20.0) - 21.0) / 2)


def test_field_openrlhf_1314_ratio_exp_1000() -> None:
    for loss, policy in itertools.product(LOSSES, POLICIES):
        new = torch.tensor([[-1.0, -1.0]], requires_grad=True)
        old = torch.tensor([[-1001.0, -1.0]])
        output = policy_loss(new, old, torch.tensor([-2.0]), torch.ones(1, 2), config(loss, policy))
        assert math.isfinite(output.loss.item()), loss
        assert gradient_of(output, new).isfinite().all(), loss
        assert all(math.isfinite(value.item()) for value in output.metrics.values()), loss


def test_field_miles_1363_endless_ratio_times_advantage_zero_is_zero() -> None:
    for loss in LOSSES:
        new = torch.tensor([[-1.0, -1.0]], requires_grad=True)
        output = policy_loss(new, torch.tensor([[-9000.0, -9000.0]]), torch.zeros(1), torch.ones(1, 2), config(loss))
        assert output.loss.item() == 0.0, loss
        assert gradient_of(output, new).tolist() == [[0.0, 0.0]], loss


def test_field_soup_342_log_ratio_100_at_padding() -> None:
    new = torch.tensor([[-1.0, 0.0]], requires_grad=True)
    output = policy_loss(new, torch.tensor([[-1.0, -100.0]]), torch.ones(1), torch.tensor([[True, False]]))
    assert output.loss.item() == -1.0
    assert gradient_of(output, new).tolist() == [[-1.0, 0.0]]
    assert output.metrics["kl"].item() == 0.0


@pytest.mark.parametrize("value", [NAN, INF], ids=str)
def test_field_pytorch_rl_4255_old_nan_and_inf_are_unscorable_new_nan_is_not(value: float) -> None:
    new = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    output = policy_loss(new, torch.tensor([[value, -1.0]]), torch.ones(1), torch.ones(1, 2))
    assert output.loss.item() == -1.0
    assert gradient_of(output, new).tolist() == [[-0.5, -0.5]]
    assert output.metrics["unscorable_fraction"].item() == 0.5
    broken = torch.tensor([[NAN, -1.0]], requires_grad=True)
    seen = policy_loss(broken, torch.tensor([[-1.0, -1.0]]), torch.ones(1), torch.ones(1, 2))
    assert math.isnan(seen.loss.item())
    assert seen.metrics["nonfinite_fraction"].item() == 0.5


def test_field_open_instruct_nan_is_never_replaced_by_one() -> None:
    """exp(new - 1.0) would be the ratio, and the token's gradient scaled by it."""
    new = torch.tensor([[-1.0, -4.0]], requires_grad=True)
    output = policy_loss(new, torch.tensor([[-1.0, NAN]]), torch.ones(1), torch.ones(1, 2))
    assert gradient_of(output, new).tolist() == [[-0.5, -0.5]]
    assert output.metrics["ratio_mean"].item() == 1.0


def test_field_trl_off_policy_mask_unscorable_is_no_evidence() -> None:
    """Three tokens, one of them lost: kl and ratio are those of the other two, a sequence's ratio as well."""
    new = torch.tensor([[-1.0, -1.0, -1.0]], requires_grad=True)
    old = torch.tensor([[-1.1, NAN, -1.1]])
    kl = math.exp(0.1) - 1.1
    for loss in ("dapo", "gspo"):
        output = policy_loss(new, old, torch.tensor([-1.0]), torch.ones(1, 3), config(loss))
        assert output.metrics["kl"].item() == pytest.approx(kl, rel=1e-4)
        assert output.metrics["ratio_mean"].item() == pytest.approx(math.exp(0.1))
        assert gradient_of(output, new)[0, 0].item() == pytest.approx(math.exp(0.1) / 3)


@pytest.mark.parametrize("masked", [False, True], ids=["unscorable", "masked"])
def test_field_verifiers_146_nothing_left_to_train_on(masked: bool) -> None:
    for loss in LOSSES:
        new = torch.tensor([[-1.0, -2.0]], requires_grad=True)
        mask = torch.full((1, 2), 0 if masked else 1)
        output = policy_loss(new, torch.full((1, 2), NAN), torch.ones(1), mask, config(loss, "drop"))
        assert output.loss.item() == 0.0, loss
        assert gradient_of(output, new).tolist() == [[0.0, 0.0]], loss
        assert output.metrics["unscorable_fraction"].item() == (0.0 if masked else 1.0), loss
