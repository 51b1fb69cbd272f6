"""The merge of cut tiles against a plain softmax over the pieces; Gluon is not interpreted."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from specmla.kernels.merge import WARPS, merge_kernel


def to_slot(part: torch.Tensor) -> torch.Tensor:
    """Lay [64, 512] out as a slot: halves of 256 columns, groups of 8 rows x 8 columns."""
    return part.view(8, 8, 2, 32, 8).permute(2, 0, 3, 1, 4).reshape(2, 64, 256)


def to_sums(parts: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Give pieces as they are stored: values times the sum of weights, and (maximum, sum).

    Args:
        parts: [pieces, 64, 512], divided by the sum. lse: [pieces, 64], base 2; -inf: no key seen.
    """
    peak = torch.where(lse == -torch.inf, FLOOR, (lse - 1.5).floor())
    total = torch.exp2(lse - peak)
    return parts * total[:, :, None], torch.stack([peak, total], 1)


def random_stats(slots: int, generator: torch.Generator) -> torch.Tensor:
    """Draw maxima of scores and sums of weights, at least 1 each: [slots, 2, 64]."""
    peak = 3 * torch.randn(slots, 64, generator=generator)
    return torch.stack([peak, 1 + 8 * torch.rand(slots, 64, generator=generator)], 1)


FLOOR = -1.0e30
pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def make_table(
    records: list[list[int]], invariant: bool = False, wide: bool = False
) -> torch.Tensor:
    """Number the items of tiles (8 rows; 128, 64, 32, 16 or 8 columns), as a plan does."""
    limits = {4: 4, 1000: 8} if invariant else {4: 4, 8: 8, 16: 8 if wide else 16, 32: 32}
    total, rows = 0, []
    for record in records:
        shares = next((n for limit, n in limits.items() if record[3] <= limit), 64)
        items = -(-record[5] // 8) * shares
        rows.append([*record[:6], total, items])
        total += items
    return torch.tensor([[len(records), total, wide, *[0] * 5], *rows], dtype=torch.int32)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("programs", [1, 8, 64, 528, 1000])
@pytest.mark.parametrize("pieces", [2, 4, 5, 8, 9, 16, 17, 128, 130])
def test_merge_is_the_softmax_over_pieces(pieces: int, programs: int, wide: bool) -> None:
    generator = torch.Generator().manual_seed(pieces)
    live = 40
    parts = torch.randn(pieces, 64, 512, generator=generator)
    lse = 3 * torch.randn(pieces, 64, generator=generator)
    lse[0, 1] = -torch.inf
    lse[:, 2] = -torch.inf
    parts[lse == -torch.inf] = 0
    slots = [5, *(8 + 4 * i for i in range(pieces - 1))]
    scratch = torch.full((9 + 4 * pieces, 2, 64, 256), float("nan"))
    stats = torch.full((9 + 4 * pieces, 2, 64), float("nan"))
    for slot, part, stat in zip(slots, *to_sums(parts, lse), strict=True):
        scratch[slot], stats[slot] = to_slot(part), stat
    record = [5, 8, 4, pieces, 16, live, 0, 0]
    table = make_table([record], wide=wide)
    out, out_lse = torch.full((100, 512), 7.0), torch.full((100,), 7.0)
    held = [t.to(CUDA) for t in (scratch, stats, table, out, out_lse)]
    merge_kernel[(programs,)](*held, INVARIANT=False, num_warps=WARPS)
    out, out_lse = held[3].cpu(), held[4].cpu()

    weight = torch.softmax(lse.double() * torch.log(torch.tensor(2.0).double()), 0)
    weight = weight.nan_to_num(nan=0.0)
    exact = (weight[:, :, None] * parts.double()).sum(0)[:live]
    exact_lse = torch.logsumexp(lse.double() * torch.log(torch.tensor(2.0).double()), 0)[:live]
    torch.testing.assert_close(out[16 : 16 + live].double(), exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out_lse[16 : 16 + live].double(), exact_lse, rtol=1e-5, atol=1e-5)
    assert (out[16 + 2] == 0).all()
    assert (out[:16] == 7).all()
    assert (out[16 + live :] == 7).all()
    assert (out_lse[16 + live :] == 7).all()


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("programs", [8, 528, 1056])
def test_tiles_of_very_different_pieces(programs: int, wide: bool) -> None:
    """One long request among short ones: each tile merges as it would alone, to the bit."""
    generator = torch.Generator().manual_seed(programs)
    counts = [100, 2, 5, 17, 4, 12]
    scratch = torch.randn(sum(counts), 2, 64, 256, generator=generator).to(CUDA)
    stats = random_stats(sum(counts), generator).to(CUDA)
    begins = [sum(counts[:i]) for i in range(len(counts))]
    records = [
        [b, b + 1, 1, n, 64 * i, 64, 0, 0]
        for i, (b, n) in enumerate(zip(begins, counts, strict=True))
    ]

    def merge(chosen: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        table = make_table(chosen, wide=wide).to(CUDA)
        out = torch.full((64 * len(counts), 512), 7.0, device=CUDA)
        out_lse = torch.full((64 * len(counts),), 7.0, device=CUDA)
        merge_kernel[(programs,)](
            scratch.clone(),  # a merge leaves nothing behind
            stats,
            table,
            out,
            out_lse,
            INVARIANT=False,
            num_warps=WARPS,
        )
        return out, out_lse

    together, lse = merge(records)
    for i, record in enumerate(records):
        alone, alone_lse = merge([record])
        rows = slice(64 * i, 64 * i + 64)
        assert torch.equal(together[rows], alone[rows]), counts[i]
        assert torch.equal(lse[rows], alone_lse[rows]), counts[i]


@pytest.mark.parametrize("pieces", [3, 4, 8, 16, 32, 64, 70])
def test_an_unseen_last_piece_changes_no_bit_of_a_batch_invariant_merge(pieces: int) -> None:
    """A row of a verify may not see the last run of keys; as a decode it has one piece fewer."""
    generator = torch.Generator().manual_seed(pieces)
    scratch = torch.randn(pieces + 1, 2, 64, 256, generator=generator).to(CUDA)
    stats = random_stats(pieces + 1, generator).to(CUDA)
    scratch[-1], stats[-1, 0], stats[-1, 1] = 0, FLOOR, 0
    found = []
    for count in (pieces, pieces + 1):
        table = make_table([[0, 1, 1, count, 0, 64, 0, 0]], invariant=True).to(CUDA)
        out, lse = torch.full((64, 512), 7.0, device=CUDA), torch.full((64,), 7.0, device=CUDA)
        held = (scratch.clone(), stats, table, out, lse)  # a merge leaves nothing behind
        merge_kernel[(40,)](*held, INVARIANT=True, num_warps=WARPS)
        found.append((out, lse))
    for out, lse in found[1:]:
        assert torch.equal(found[0][0], out)
        assert torch.equal(found[0][1], lse)
