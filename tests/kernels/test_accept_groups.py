"""What top-p keeps, where maxima and sums of groups of ids say little about it."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from specmla.kernels.filter_groups import GROUP
from specmla.verify.sampling import SamplingParams
from tests.kernels.accepting import DEVICE, Step, make_step

BLOCK = GROUP if DEVICE == "cpu" else 4 * GROUP  # no less than a program has threads
DTYPES = [torch.float32, torch.float16]


def of_groups(rows: list[torch.Tensor], top_p: float, dtype: torch.dtype) -> Step:
    """Give requests of one row each, of logits [groups, GROUP]."""
    params = [SamplingParams(1.0, 0, top_p, seed=i) for i in range(len(rows))]
    step = make_step(params, num_drafts=0, width=rows[0].numel(), dense=False, dtype=dtype)
    logits = torch.stack([row.flatten() for row in rows]).to(dtype)
    inputs = step.inputs._replace(
        logits=logits.to(DEVICE), table=torch.arange(len(rows), device=DEVICE)[:, None]
    )
    return Step(inputs, step.batch)


def assert_exact(step: Step) -> None:
    got = step.fused("token_level", block=BLOCK, slots=512)
    torch.testing.assert_close(got.row_mass.double(), step.kept_mass(), rtol=1e-5, atol=0.0)
    want, _ = step.pure("token_level")
    assert torch.equal(got.next_token, want.next_token)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("top_p", [0.3, 0.5, 0.9])
def test_one_id_of_each_group_weighs(top_p: float, dtype: torch.dtype) -> None:
    """The share that is held first is the very one asked for: an id less, and some percent lack."""
    rows, draw = [], torch.Generator().manual_seed(1)
    for drop in (0.05, 0.1, 0.3):
        row = torch.full((40, GROUP), -40.0)
        place = torch.randint(GROUP, (40,), generator=draw)
        row[torch.randperm(40, generator=draw), place] = -drop * torch.arange(40)
        rows.append(row)
    assert_exact(of_groups(rows, top_p, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_guess_that_falls_short_is_made_good(dtype: torch.dtype) -> None:
    """A quarter of a group's rest is taken to lie with its maximum; here nothing of it does."""
    row = torch.full((8, GROUP), -3.0)
    row[:, 5] = 0.0
    weights = row.double().exp()
    rest = 1 + 0.25 * (weights.sum(1) - 1)
    assert rest.sum() > 0.5 * weights.sum() > 8, "the guess reaches the target, the maxima don't"
    assert_exact(of_groups([row], 0.5, dtype))
