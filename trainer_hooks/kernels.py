# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (a kernel's arguments are Triton's own values, which have no Python types)
"""Owns the arithmetic of `objective` as Triton kernels; `fused` launches them. The two must say the same.

Memory traffic per token with float32 logprobs, one advantage a sequence and a bool mask: 13 bytes forward (new 4,
old 4, mask 1, gradient 4), 8 more when backward scales; grpo reads the mask once more, gspo new, old and mask.

Sums go through partial results, one column a program, added up in a fixed order: no float atomics, so the same input
gives the same bits. Comparisons are written so that a NaN ratio is never clipped; tl.clamp would swallow it.
"""

import triton
import triton.language as tl

PARTIALS = 8
"""Rows of partial sums that the token kernel leaves for the finishing kernel."""


@triton.jit
def _hold(values, low, high):
    """Clamp that lets NaN through."""
    return tl.where(values < low, low, tl.where(values > high, high, values))


@triton.jit
def _scored(old, trained, floor, tolerance):
    return trained & (old > floor) & (old <= tolerance)


@triton.jit
def _finite(values):
    return tl.abs(values) < float("inf")


@triton.jit(do_not_specialize=["width", "sequences"])
def sequence_kernel(
    new_ptr, old_ptr, advantage_ptr, mask_ptr, boundary_ptr, sums_ptr,
    width, sequences, floor, tolerance, bound,
    RATIO: tl.constexpr, PACKED: tl.constexpr, TOKEN_ADVANTAGES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One sequence, or one of its splits: trained tokens; for gspo also scored tokens, the sum of their log-ratios, and
    the sums of their positive and negative advantages, which is all that the clipped objective needs to know."""
    sequence = tl.program_id(0)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    if PACKED:
        begin = tl.load(boundary_ptr + sequence).to(tl.int64)
        end = tl.load(boundary_ptr + sequence + 1).to(tl.int64)
    else:
        begin = sequence.to(tl.int64) * width
        end = begin + width
    trained_sum = tl.zeros([BLOCK], tl.float32)
    scored_sum = tl.zeros([BLOCK], tl.float32)
    log_ratio_sum = tl.zeros([BLOCK], tl.float32)
    positive_sum = tl.zeros([BLOCK], tl.float32)
    negative_sum = tl.zeros([BLOCK], tl.float32)
    for start in range(begin + split * BLOCK, end, splits * BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < end
        trained = tl.load(mask_ptr + offsets, mask=inside, other=0) != 0
        trained_sum += trained.to(tl.float32)
        if RATIO:
            new = tl.load(new_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
            old = tl.load(old_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
            if TOKEN_ADVANTAGES:
                advantage = tl.load(advantage_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
            else:
                advantage = tl.load(advantage_ptr + sequence).to(tl.float32)
            scored = _scored(old, trained, floor, tolerance)
            log_ratio = tl.where(_finite(new), _hold(new - old, -bound, bound), float("nan"))
            negative = advantage < 0.0
            scored_sum += scored.to(tl.float32)
            log_ratio_sum += tl.where(scored, log_ratio, 0.0)
            # A NaN advantage is not negative: it goes to the positive ones and stays visible.
            positive_sum += tl.where(scored, tl.where(negative, 0.0, advantage), 0.0)
            negative_sum += tl.where(scored, tl.where(negative, advantage, 0.0), 0.0)
    out = sums_ptr + split.to(tl.int64) * ROWS * sequences + sequence
    tl.store(out, tl.sum(trained_sum, 0))
    if RATIO:
        tl.store(out + sequences, tl.sum(scored_sum, 0))
        tl.store(out + 2 * sequences, tl.sum(log_ratio_sum, 0))
        tl.store(out + 3 * sequences, tl.sum(positive_sum, 0))
        tl.store(out + 4 * sequences, tl.sum(negative_sum, 0))


@triton.jit
def _clip(log_ratio, advantage, low_log, high_log, dual_log, bound):
    """-advantage * ratio with the ratio held in the range that the advantage's sign allows; where its two ends act."""
    low_end = tl.where(advantage < 0.0, low_log, -bound)
    high_end = tl.where(advantage < 0.0, dual_log, tl.where(advantage > 0.0, high_log, bound))
    surrogate = -advantage * tl.exp(_hold(log_ratio, low_end, high_end))
    return surrogate, log_ratio < low_end, log_ratio > high_end


@triton.jit
def _sequence_share(sums_ptr, row, sequences, mean, members, inside, low_log, high_log, dual_log):
    """What the shared ratio hands back to each of its tokens: the advantages that it still moves, by their sign."""
    positive = tl.load(sums_ptr + 3 * sequences + row, mask=inside, other=0.0)
    negative = tl.load(sums_ptr + 4 * sequences + row, mask=inside, other=0.0)
    moved = tl.where(mean > high_log, 0.0, positive)
    moved += tl.where((mean < low_log) | (mean > dual_log), 0.0, negative)
    return -moved * tl.exp(mean) / members


@triton.jit
def _rows(ids_ptr, offsets, start, width, inside, PACKED: tl.constexpr, BLOCK: tl.constexpr):
    """The sequence of each token of a block."""
    if PACKED:
        rows = tl.load(ids_ptr + offsets, mask=inside, other=0).to(tl.int64)
    else:
        # 64-bit division is slow: one for the block, the rest in 32 bits. Lanes past the end take row 0.
        first = start // width
        column = (start - first * width).to(tl.int32)
        rows = tl.where(inside, first + (column + tl.arange(0, BLOCK)) // width, 0)
    return rows


@triton.jit(do_not_specialize=["width", "sequences"])
def token_kernel(
    new_ptr, old_ptr, advantage_ptr, mask_ptr, ids_ptr, sums_ptr, gradient_ptr, partial_ptr,
    tokens, width, sequences, floor, tolerance, low_log, high_log, dual_log, bound,
    CISPO: tl.constexpr, GSPO: tl.constexpr, SEQUENCE_MEAN: tl.constexpr, DROP: tl.constexpr,
    PACKED: tl.constexpr, TOKEN_ADVANTAGES: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """STEPS blocks of tokens: writes their gradient and one column of PARTIALS sums."""
    program = tl.program_id(0)
    value_sum = tl.zeros([BLOCK], tl.float32)
    excess_sum = tl.zeros([BLOCK], tl.float32)
    kl_sum = tl.zeros([BLOCK], tl.float32)
    low_sum = tl.zeros([BLOCK], tl.float32)
    high_sum = tl.zeros([BLOCK], tl.float32)
    scored_sum = tl.zeros([BLOCK], tl.float32)
    broken_sum = tl.zeros([BLOCK], tl.float32)
    trained_sum = tl.zeros([BLOCK], tl.float32)
    for step in range(STEPS):
        start = (program.to(tl.int64) * STEPS + step) * BLOCK
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < tokens
        new = tl.load(new_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        old = tl.load(old_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        trained = tl.load(mask_ptr + offsets, mask=inside, other=0) != 0
        if GSPO or SEQUENCE_MEAN or not TOKEN_ADVANTAGES:
            row = _rows(ids_ptr, offsets, start, width, inside, PACKED, BLOCK)
        advantage_at = offsets if TOKEN_ADVANTAGES else row
        advantage = tl.load(advantage_ptr + advantage_at, mask=inside, other=0.0).to(tl.float32)

        scored = _scored(old, trained, floor, tolerance)
        kept = scored if DROP else trained
        broken = trained & (_finite(new) == 0)
        log_ratio = tl.where(scored, new - old, 0.0)
        log_ratio = tl.where(broken & kept, float("nan"), log_ratio)
        bounded = _hold(log_ratio, -bound, bound)
        excess = tl.exp(bounded) - 1.0
        kl_sum += excess - bounded
        if GSPO:
            members = tl.maximum(tl.load(sums_ptr + sequences + row, mask=inside, other=0.0), 1.0)
            mean = tl.load(sums_ptr + 2 * sequences + row, mask=inside, other=0.0) / members
            shared = tl.where(scored, mean, log_ratio)
            surrogate, low, high = _clip(shared, advantage, low_log, high_log, dual_log, bound)
            share = _sequence_share(sums_ptr, row, sequences, mean, members, inside, low_log, high_log, dual_log)
            below, above = log_ratio < -bound, log_ratio > bound
            # A token beyond the bound could move and change nothing; an unscorable one is no part of the mean.
            gradient = tl.where(scored, tl.where(below | above, 0.0, share), surrogate)
            value, low, high = surrogate, low | below, high | above
            excess = tl.exp(shared) - 1.0
        else:
            surrogate, low, high = _clip(log_ratio, advantage, low_log, high_log, dual_log, bound)
            value = surrogate * new if CISPO else surrogate
            gradient = surrogate if CISPO else tl.where(low | high, 0.0, surrogate)
        if SEQUENCE_MEAN:
            weight = 1.0 / tl.maximum(tl.load(sums_ptr + row, mask=inside, other=0.0), 1.0)
            value, gradient = value * weight, gradient * weight
        # Where a slot outside the loss meets the results: a choice, not a product, which would keep its NaN.
        tl.store(gradient_ptr + offsets, tl.where(kept, gradient, 0.0), mask=inside)
        value_sum += tl.where(kept, value, 0.0)
        excess_sum += excess
        low_sum += low.to(tl.float32)
        high_sum += high.to(tl.float32)
        scored_sum += scored.to(tl.float32)
        broken_sum += broken.to(tl.float32)
        trained_sum += trained.to(tl.float32)
    columns = tl.num_programs(0)
    out = partial_ptr + program
    tl.store(out, tl.sum(value_sum, 0))
    tl.store(out + columns, tl.sum(excess_sum, 0))
    tl.store(out + 2 * columns, tl.sum(kl_sum, 0))
    tl.store(out + 3 * columns, tl.sum(low_sum, 0))
    tl.store(out + 4 * columns, tl.sum(high_sum, 0))
    tl.store(out + 5 * columns, tl.sum(scored_sum, 0))
    tl.store(out + 6 * columns, tl.sum(broken_sum, 0))
    tl.store(out + 7 * columns, tl.sum(trained_sum, 0))


@triton.jit
def _row_sum(row_ptr, columns, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        total += tl.load(row_ptr + offsets, mask=offsets < columns, other=0.0)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["columns"])
def finish_kernel(
    partial_ptr, denominator_ptr, loss_ptr, scale_ptr, metrics_ptr, columns, denominator, tiny,
    COUNTED: tl.constexpr, GIVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: adds the partial sums up in a fixed order and divides."""
    value = _row_sum(partial_ptr, columns, BLOCK)
    excess = _row_sum(partial_ptr + columns, columns, BLOCK)
    kl = _row_sum(partial_ptr + 2 * columns, columns, BLOCK)
    low = _row_sum(partial_ptr + 3 * columns, columns, BLOCK)
    high = _row_sum(partial_ptr + 4 * columns, columns, BLOCK)
    scored = _row_sum(partial_ptr + 5 * columns, columns, BLOCK)
    broken = _row_sum(partial_ptr + 6 * columns, columns, BLOCK)
    trained = _row_sum(partial_ptr + 7 * columns, columns, BLOCK)
    evidence = tl.maximum(scored, 1.0)
    counted = tl.maximum(trained, 1.0)
    if GIVEN:
        scale = 1.0 / tl.maximum(tl.load(denominator_ptr).to(tl.float32), tiny)
    elif COUNTED:
        scale = 1.0 / counted
    else:
        scale = 1.0 / denominator
    tl.store(loss_ptr, value * scale)
    tl.store(scale_ptr, scale)
    tl.store(metrics_ptr, excess / evidence + 1.0)
    tl.store(metrics_ptr + 1, kl / evidence)
    tl.store(metrics_ptr + 2, low / counted)
    tl.store(metrics_ptr + 3, high / counted)
    tl.store(metrics_ptr + 4, (trained - scored) / counted)
    tl.store(metrics_ptr + 5, broken / counted)
