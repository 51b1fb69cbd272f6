"""Random streams: the documented function, statistical quality, keys that never meet."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from specmla.errors import ArgumentError
from specmla.verify.streams import (
    _GAMMA,
    MAX_NODES,
    MAX_ROWS,
    Stream,
    _mix,
    _signed,
    _to_unit,
    step_uniforms,
    uniforms,
)

MASK = (1 << 64) - 1
BATCH = 4096


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def slow_uniform(seed: int, position: int, row: int, stream: int, node: int) -> float:
    """Say the documented function with Python's unbounded integers."""

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    gamma = 0x9E3779B97F4A7C15
    key = mix((seed + gamma) & MASK)
    key = mix((key + gamma * (position + 1)) & MASK)
    word = (stream << 56) | (node << 31) | row
    return ((mix((key + gamma * (word + 1)) & MASK) >> 12) + 0.5) / 2**52


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 123456789012345678])
@pytest.mark.parametrize("position", [0, 1, 131071, 2**40])
def test_uniforms_equal_the_documented_function(seed: int, position: int) -> None:
    rows, nodes = [0, 1, 2, MAX_ROWS - 1], [0, 1, 63, MAX_NODES - 1]
    for stream, node in itertools.product(Stream, nodes):
        got = uniforms(ints(seed), ints(position), ints(*rows), stream, node)[0].tolist()
        assert got == [slow_uniform(seed, position, row, stream, node) for row in rows]


def test_mixing_of_splitmix64_has_its_published_outputs() -> None:
    # First outputs of SplitMix64 from state 0 (Vigna's reference program, seed 0).

    state = ints(1, 2, 3) * _signed(_GAMMA)
    want = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [v & MASK for v in _mix(state).tolist()] == want


def test_extreme_words_stay_inside_the_open_interval() -> None:

    u = _to_unit(ints(0, -1, 2**63 - 1, -(2**63)))
    assert u.dtype == torch.float64
    assert u.tolist() == [2.0**-53, 1 - 2.0**-53, 0.5 - 2.0**-53, 0.5 + 2.0**-53]


def test_numbers_do_not_depend_on_batch_mates() -> None:
    generator = torch.Generator().manual_seed(0)
    seed = torch.randint(0, 2**62, (37,), generator=generator)
    position = torch.randint(0, 10**6, (37,), generator=generator)
    together = uniforms(seed, position, torch.arange(5), Stream.ACCEPT)
    ragged = uniforms(seed, position, torch.arange(5).expand(37, 5), Stream.ACCEPT)
    assert torch.equal(together, ragged)
    for b in (0, 17, 36):
        alone = uniforms(seed[b : b + 1], position[b : b + 1], torch.arange(5), Stream.ACCEPT)
        assert torch.equal(alone[0], together[b])
        one = uniforms(seed[b : b + 1], position[b : b + 1], ints(3), Stream.ACCEPT)
        assert one.item() == together[b, 3].item()


@pytest.mark.parametrize("num_drafts", [0, 1, 7])
def test_step_uniforms_are_the_two_streams(num_drafts: int) -> None:
    seed, position = torch.arange(6) * 10**15, torch.arange(6) * 1000
    step = step_uniforms(seed, position, num_drafts)
    accept = uniforms(seed, position, torch.arange(num_drafts), Stream.ACCEPT)
    assert torch.equal(step.accept, accept)
    assert torch.equal(step.correction, uniforms(seed, position, ints(0), Stream.CORRECTION)[:, 0])


def test_no_two_keys_share_a_number() -> None:
    """Adjacent keys of every field, 1.6 million numbers of 52 bits: a clash has chance 2e-4."""
    seed = torch.arange(8).repeat_interleave(64)
    position = torch.arange(64).repeat(8)
    drawn = [
        uniforms(seed, position, torch.arange(32), stream, node).flatten()
        for stream, node in itertools.product(Stream, range(24))
    ]
    numbers = torch.cat(drawn)
    assert numbers.unique().numel() == numbers.numel() == 8 * 64 * 32 * 4 * 24


# Neighbours of a key along each field: the sequences a served model really walks.
WALKS = {
    "position": lambda n: (torch.zeros(n, dtype=torch.int64), torch.arange(n), ints(0)),
    "seed": lambda n: (torch.arange(n), torch.full((n,), 17), ints(0)),
    "seed-high-bits": lambda n: (torch.arange(n) << 45, torch.full((n,), 17), ints(0)),
    "row": lambda n: (ints(5), ints(9), torch.arange(n)),
    "block": lambda n: (
        torch.zeros(n // 4, dtype=torch.int64),
        torch.arange(n // 4),
        torch.arange(4),
    ),
}


@pytest.mark.parametrize("stream", Stream)
@pytest.mark.parametrize("walk", WALKS)
def test_numbers_are_uniform_along_every_key(walk: str, stream: Stream) -> None:
    """Fixed keys, so nothing flickers; bounds at 5 sigma of a truly uniform source."""
    n = 1 << 18
    u = uniforms(*WALKS[walk](n), stream).flatten()
    assert u.numel() == n
    assert ((u > 0) & (u < 1)).all()
    assert abs(u.mean().item() - 0.5) < 5 / math.sqrt(12 * n)
    assert abs(u.var().item() - 1 / 12) < 5 / math.sqrt(180 * n)
    cells = torch.histc(u, bins=256, min=0, max=1)
    chi2 = ((cells - n / 256) ** 2 / (n / 256)).sum().item()
    assert abs(chi2 - 255) < 5 * math.sqrt(2 * 255)
    # The lowest bits kept are as good as the highest.
    low = (u * 2.0**52).to(torch.int64) & 255
    chi2 = ((low.bincount(minlength=256) - n / 256) ** 2 / (n / 256)).sum().item()
    assert abs(chi2 - 255) < 5 * math.sqrt(2 * 255)


@pytest.mark.parametrize("walk", WALKS)
@pytest.mark.parametrize("lag", [1, 2, 3, 4, 5, 8, 64])
def test_neighbouring_keys_are_uncorrelated(walk: str, lag: int) -> None:
    n = 1 << 18
    u = uniforms(*WALKS[walk](n), Stream.ACCEPT).flatten()
    x, y = u[:-lag] - 0.5, u[lag:] - 0.5
    assert abs((x * y).mean().item()) < 5 / (12 * math.sqrt(n))
    # Pairs fill the square: independence beyond correlation.
    cells = ((u[:-lag] * 16).long() * 16 + (u[lag:] * 16).long()).bincount(minlength=256)
    want = (n - lag) / 256
    chi2 = ((cells - want) ** 2 / want).sum().item()
    # Overlapping pairs spread slightly more than independent ones.
    assert abs(chi2 - 255) < 6 * math.sqrt(2 * 255)


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(Stream, 2)))
def test_streams_are_independent_of_each_other(one: Stream, other: Stream) -> None:
    n, rows = 1 << 16, torch.arange(4)
    seed, position = torch.zeros(n, dtype=torch.int64), torch.arange(n)
    a = uniforms(seed, position, rows, one).flatten()
    b = uniforms(seed, position, rows, other).flatten()
    assert not (a == b).any()
    cells = ((a * 16).long() * 16 + (b * 16).long()).bincount(minlength=256)
    want = 4 * n / 256
    chi2 = ((cells - want) ** 2 / want).sum().item()
    assert abs(chi2 - 255) < 5 * math.sqrt(2 * 255)


def test_a_position_redrawn_in_the_next_block_meets_new_noise() -> None:
    """Token position 12 is row 2 after anchor 9 and row 1 after anchor 10: two keys."""
    for stream in Stream:
        first = uniforms(ints(3), ints(9), ints(2), stream)
        again = uniforms(ints(3), ints(10), ints(1), stream)
        assert first.item() != again.item()


def test_uniforms_refuse_what_does_not_fit() -> None:
    with pytest.raises(ArgumentError, match=r"dtype torch\.int32"):
        uniforms(ints(1).int(), ints(1), ints(0), Stream.DRAFT)
    with pytest.raises(ArgumentError, match=r"accepted is \[B\] for both"):
        uniforms(ints(1, 2), ints(1), ints(0), Stream.DRAFT)
    with pytest.raises(ArgumentError, match=r"accepted is \[K\] or \[B, K\]"):
        uniforms(ints(1, 2), ints(1, 2), torch.zeros(3, 1, dtype=torch.int64), Stream.DRAFT)
    for node in (-1, MAX_NODES):
        with pytest.raises(ArgumentError, match=f"node={node}"):
            uniforms(ints(1), ints(1), ints(0), Stream.DRAFT, node)


@pytest.mark.gpu
def test_cuda_gives_the_same_numbers() -> None:
    generator = torch.Generator().manual_seed(1)
    seed = torch.randint(0, 2**63 - 1, (BATCH,), generator=generator)
    position = torch.randint(0, 2**40, (BATCH,), generator=generator)
    row = torch.randint(0, MAX_ROWS, (BATCH, 9), generator=generator)
    for stream in Stream:
        here = uniforms(seed, position, row, stream, 3)
        there = uniforms(seed.cuda(), position.cuda(), row.cuda(), stream, 3)
        assert torch.equal(here, there.cpu())
