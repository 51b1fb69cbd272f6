"""Fused acceptance under Triton's interpreter: equal to the pure rules on the same numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from specmla.kernels.accept import RULES  # noqa: E402
from specmla.kernels.splitmix import ACCEPT, CORRECTION, TARGET, uniform  # noqa: E402
from specmla.verify.sampling import SamplingParams, processed_probs  # noqa: E402
from specmla.verify.streams import step_uniforms, target_uniforms  # noqa: E402
from tests.kernels.accepting import DEVICE, MIXED, PLAIN, Step, make_step  # noqa: E402

BLOCK = 32 if DEVICE == "cpu" else 128  # on a GPU no less than a program has threads
SMALL = {"block": BLOCK, "slots": 32}


def check(step: Step, rule: str, *, block: int = BLOCK, slots: int = 32) -> Tensor:
    """Compare all decisions; give the numbers of accepted drafts."""
    got = step.fused(rule, block=block, slots=slots)
    want, flagged = step.pure(rule)
    k = step.inputs.drafts.shape[1]
    assert torch.equal(got.packed[:, -1] != 0, flagged)
    good = ~flagged
    assert torch.equal(got.packed[good, : k + 1], want.tokens[good])
    assert torch.equal(got.packed[good, -2], want.num_accepted[good])
    assert torch.equal(got.next_token[good], want.next_token[good])
    return got.packed[:, -2]


@triton.jit
def numbers_kernel(out_ptr, seed_ptr, position_ptr, N: tl.constexpr, STREAM: tl.constexpr):
    lane = tl.arange(0, N)
    seed, position = tl.load(seed_ptr), tl.load(position_ptr)
    if STREAM == TARGET:
        drawn = uniform(seed, position + lane, 0, STREAM)
    else:
        drawn = uniform(seed, position, lane, STREAM)
    tl.store(out_ptr + lane, drawn)


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 123456789012345678])
@pytest.mark.parametrize("position", [0, 5, 2**31 + 7])
def test_numbers_are_those_of_the_streams(seed: int, position: int) -> None:
    seeds = torch.tensor([seed], device=DEVICE)
    positions = torch.tensor([position], device=DEVICE)
    want = step_uniforms(seeds, positions, 8)
    tables = {
        ACCEPT: want.accept[0],
        TARGET: target_uniforms(seeds, positions, 8)[0],
        CORRECTION: want.correction,
    }
    for stream, numbers in tables.items():
        got = torch.zeros(8, dtype=torch.float64, device=DEVICE)
        numbers_kernel[(1,)](got, seeds, positions, N=8, STREAM=stream)
        assert torch.equal(got[: len(numbers)], numbers)


@pytest.mark.parametrize("dense", [True, False], ids=["dense", "one-hot"])
@pytest.mark.parametrize("rule", RULES)
def test_plain_temperature(rule: str, dense: bool) -> None:
    accepted = [check(make_step(PLAIN, dense=dense, seed=s), rule) for s in range(2)]
    assert 0 < torch.cat(accepted).sum() < 12


@pytest.mark.parametrize("dense", [True, False], ids=["dense", "one-hot"])
@pytest.mark.parametrize("rule", RULES)
def test_mixed_filters(rule: str, dense: bool) -> None:
    some = MIXED[:5] if dense else MIXED[3:]
    check(make_step(some, dense=dense, seed=2), rule)


@pytest.mark.parametrize("rule", RULES)
def test_greedy_beside_sampled_without_filters(rule: str) -> None:
    params = [SamplingParams(seed=1), SamplingParams(1.0, seed=2), SamplingParams(seed=3)]
    for dense in (True, False):
        step = make_step(params, dense=dense, seed=3)
        logits, table, drafts = step.inputs[:3]
        drafts[0] = logits[table[0, :-1]].argmax(-1)
        assert check(step, rule)[0] == 2


@pytest.mark.parametrize("params", [MIXED[2:5], MIXED[3:4]], ids=["mixed", "top-p"])
def test_rows_that_keep_more_than_is_collected_are_searched(params: list[SamplingParams]) -> None:
    check(make_step(params, seed=4, num_drafts=1), "token_level", slots=4)


@pytest.mark.parametrize("rule", RULES)
def test_gaps_and_ids_outside_the_vocabulary(rule: str) -> None:
    for dense in (True, False):
        step = make_step(PLAIN + PLAIN, dense=dense, seed=5)
        logits, table, drafts, q = step.inputs[:4]
        drafts[0, 1:] = -1
        drafts[1] = -1
        drafts[2, 1] = 50
        drafts[3, 0] = 2**40
        drafts[4, 1] = -1
        for b, first in ((0, 2), (1, 1), (4, 2)):  # nobody computed these rows, nor wrote their q
            logits[table[b, first:]] = math.nan
            if q is not None:
                q[b, first - 1 :] = math.nan
        # The pure rule reads rows of the table only; give it those of a plan: the last one again.
        for b, last in ((0, 1), (1, 0), (4, 1)):
            table[b, last:] = table[b, last]
        got = check(step, rule)
        rows = step.fused(rule, **SMALL)
        for b, first in ((0, 2), (1, 1), (4, 2)):
            assert not rows.row_max[b, first:].any()
            assert torch.equal(rows.row_mass[b, first:], torch.ones_like(rows.row_mass[b, first:]))
        assert got[1] == 0
        assert got[0] <= 1
        assert got[2] <= 1
        assert got[3] == 0


FILTERS = [
    SamplingParams(1.0, 7, seed=1),
    SamplingParams(0.7, 1, seed=2),
    SamplingParams(1.3, 0, 0.6, seed=3),
    SamplingParams(1.0, 9, 0.5, seed=4),
    SamplingParams(1.0, min_p=0.6, seed=5),
    SamplingParams(1.0, 20, 0.9, min_p=0.5, seed=6),
    SamplingParams(0.0, seed=7),
]


@pytest.mark.parametrize("slots", [4, 16, 64, 256])
def test_exactly_the_kept_ids_are_summed(slots: int) -> None:
    """Logits so flat that one id more or less is some percent: held in few slots, all or none."""
    step = make_step(FILTERS, width=50, sharp=0.4, seed=11)
    got = step.fused("token_level", block=BLOCK, slots=slots)
    torch.testing.assert_close(got.row_mass.double(), step.kept_mass(), rtol=1e-5, atol=0.0)


def test_rows_without_a_distribution_are_flagged() -> None:
    for rule, dense in (("token_level", True), ("block", False), ("sample_match", False)):
        step = make_step(PLAIN * 2, dense=dense, seed=6)
        logits, table = step.inputs[:2]
        logits[table[0, 0], 49] = math.nan
        logits[table[1, 2], 3] = math.inf
        logits[table[2, 2]] = -math.inf
        logits[table[3, 1], :40] = -math.inf  # a whole chunk, and no fault
        assert step.pure(rule)[1].tolist() == [True, True, True, False, False, False]
        check(step, rule)


def test_nan_of_q_is_flagged_where_a_token_comes_from_it() -> None:
    step = make_step(PLAIN, seed=7)
    q, drafts = step.inputs.q, step.inputs.drafts
    assert q is not None
    q[:, 0, 5] = math.nan
    drafts[:, 0] = 49  # improbable to both, so that some are refused
    for rule in ("token_level", "block"):
        got = step.fused(rule, **SMALL)
        refused = got.packed[:, -2] == 0
        assert refused.any()
        assert (got.packed[refused, -1] == 1).all()


@pytest.mark.parametrize("rule", ["token_level", "block"])
def test_empty_residual_falls_back_to_p(rule: str) -> None:
    """q twice as large as p covers it: half of the drafts are refused, and p is drawn from."""
    step = make_step(PLAIN * 3, seed=8, num_drafts=1)
    logits, table, _, q = step.inputs[:4]
    assert q is not None
    q.copy_(2 * processed_probs(logits[table], step.batch).probs[:, :1])
    got = check(step, rule)
    assert 0 < (got == 0).sum() < 9


@pytest.mark.parametrize("rule", RULES)
def test_no_drafts(rule: str) -> None:
    check(make_step(MIXED[:4], num_drafts=0, dense=rule == "block", seed=9), rule)


def test_ties_stand_in_the_order_of_ids() -> None:
    params = [
        SamplingParams(0.0, seed=1),
        SamplingParams(1.0, 3, seed=2),
        SamplingParams(1.0, 0, 0.5, seed=3),
        SamplingParams(1.0, seed=4, min_p=1.0),
    ]
    for slots in (32, 2):
        step = make_step(params, seed=10, num_drafts=1)
        logits = step.inputs.logits
        logits.copy_(logits.sign() * 0.0)  # zeros of both signs are one value
        logits[:, 30:40] = 2.0
        check(step, "token_level", slots=slots)
        check(step, "sample_match", slots=slots)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_of_16_bits(dtype: torch.dtype) -> None:
    check(make_step(MIXED, seed=11, dtype=dtype, num_drafts=2), "token_level")


@pytest.mark.parametrize("temperature", [1e-38, 1e-45, 50.0])
def test_extreme_temperatures(temperature: float) -> None:
    params = [SamplingParams(temperature, seed=1), SamplingParams(temperature, 5, 0.9, seed=2)]
    check(make_step(params, seed=12, num_drafts=1), "token_level")


def test_filters_that_keep_all_or_one() -> None:
    params = [
        SamplingParams(1.0, 50, seed=1),
        SamplingParams(1.0, 1000, 0.5, seed=2),
        SamplingParams(1.0, 0, 1e-30, seed=3),
        SamplingParams(1.0, 2, 0.999999, seed=4),
        SamplingParams(3.0, 0, 0.999999, seed=5),
    ]
    check(make_step(params, seed=13, num_drafts=1), "token_level", slots=64)


@pytest.mark.parametrize("rule", RULES)
def test_a_request_alone_is_decided_alike(rule: str) -> None:
    """To the bit of the stored mass: chunks are cut the same way whoever else is there."""
    step = make_step(MIXED, seed=14, num_drafts=2)
    logits, table, drafts, q, seeds, positions = step.inputs
    together = step.fused(rule, **SMALL)
    assert q is not None
    for b in (0, 4):
        one = make_step([MIXED[b]], seed=14, num_drafts=2)
        own = torch.arange(3, device=DEVICE)[None]
        inputs = one.inputs._replace(
            logits=logits[table[b]].contiguous(),
            table=own,
            drafts=drafts[b : b + 1],
            q=q[b : b + 1],
            seeds=seeds[b : b + 1],
            positions=positions[b : b + 1],
        )
        alone = Step(inputs, one.batch).fused(rule, **SMALL)
        assert torch.equal(alone.packed[0], together.packed[b])
        assert torch.equal(alone.row_mass[0], together.row_mass[b])
