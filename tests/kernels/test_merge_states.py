"""The merge of prompt states by a kernel, interpreted, against float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from specmla.kernels.merge_states import BLOCK_ROWS, merge_states_into
from specmla.lse_merge import merged_states

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def states(rows: int, heads: int, width: int, seed: int = 0) -> list[torch.Tensor]:
    """Draw two states; row 0 is empty in the first, 1 in the second, 2 in both."""
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(2, rows, heads, width, generator=generator)
    lse = 20 * torch.randn(2, rows, heads, generator=generator)
    for state, row in ((0, 0), (1, 1), (0, 2), (1, 2)):
        out[state, row] = torch.nan
        lse[state, row] = -torch.inf
    return [t.to(DEVICE) for t in (out[0], lse[0], out[1], lse[1])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("heads", "width"), [(1, 64), (20, 128), (3, 96), (128, 17)])
def test_the_merge_is_that_of_float64(heads, width, dtype):
    rows = 2 * BLOCK_ROWS // heads + 5
    out, lse, got, got_lse = states(rows, heads, width)
    got = got.to(dtype)
    kept = out[1].clone(), lse[1].clone()
    exact, exact_lse = merged_states(out.double(), lse.double(), got.double(), got_lse.double())
    merge_states_into(out, lse, got, got_lse)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-5)
    assert torch.equal(out[0], got[0].float()), "an empty state changes no bit of the other one"
    assert torch.equal(lse[0], got_lse[0])
    assert torch.equal(out[1], kept[0])
    assert torch.equal(lse[1], kept[1])
    assert not out[2].any()
    assert torch.equal(lse[2], torch.full_like(lse[2], -torch.inf))


def test_strides_are_followed_and_neighbours_left_alone():
    out, lse, got, got_lse = states(9, 4, 32, seed=3)
    exact, exact_lse = merged_states(out[3:7], lse[3:7], got[3:7], got_lse[3:7])
    wide_out = torch.full((9, 8, 40), 7.0, device=DEVICE)
    wide_lse = torch.full((4, 9), 7.0, device=DEVICE).t()
    wide_out[3:7, ::2, 4:36], wide_lse[3:7] = out[3:7], lse[3:7]
    wide_got = torch.full((4, 9, 64), torch.nan, device=DEVICE).transpose(0, 1)
    wide_got[:, :, :32] = got
    merge_states_into(
        wide_out[3:7, ::2, 4:36], wide_lse[3:7], wide_got[3:7, :, :32], got_lse.t().clone().t()[3:7]
    )
    torch.testing.assert_close(wide_out[3:7, ::2, 4:36], exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(wide_lse[3:7], exact_lse, rtol=1e-6, atol=1e-5)
    wide_out[3:7, ::2, 4:36], wide_lse[3:7] = 7.0, 7.0
    assert torch.equal(wide_out, torch.full_like(wide_out, 7.0))
    assert torch.equal(wide_lse, torch.full_like(wide_lse, 7.0))


def test_no_rows_are_no_launch():
    empty = torch.zeros(0, 4, 32, device=DEVICE)
    merge_states_into(empty, empty[..., 0], empty, empty[..., 0])
