"""A step planned once and filled with other rows, requests and lengths, as a captured graph is."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from specmla.backends.triton import TritonBackend
from specmla.kernels.launch import LaunchEntry
from specmla.metadata import VerifyPart
from specmla.testing import ABSURD_PAGE, VerifyCase, assert_matches_oracle, make_case

SMALL: dict[str, Any] = {"num_heads": 5, "kv_lora_rank": 32, "rope_dim": 16, "page_size": 16}
TILE = LaunchEntry(16, 16, 16, 4, 1)
CAPTURED = [(3, 64)] * 8

REPLAYS = [
    [(3, 1), (3, 64), (3, 65), (3, 700), (3, 3)],
    [(3, 1)] * 8,
    [(7, 300), (1, 3), (0, 9), (9, 90), (2, 2)],
    [],
    [(3, 1), (3, 64), (3, 65), (3, 700), (3, 3)],
]


def put(static: VerifyPart, live: VerifyCase) -> None:
    """Write a smaller batch into the tables of a larger one; what is left over is absurd."""
    tables = live.tables()
    rows, requests = tables.num_rows, tables.num_requests
    static.query_start.fill_(rows)
    static.query_start[:requests] = tables.query_start[:requests]
    static.seq_lens.zero_()
    static.seq_lens[:requests] = tables.seq_lens
    static.block_table.fill_(ABSURD_PAGE)
    static.block_table[:requests, : tables.block_table.shape[1]] = tables.block_table
    static.row_extent.fill_(10**6)
    static.row_extent[:rows] = tables.row_extent


@pytest.mark.parametrize(
    "backend",
    [
        TritonBackend(config=TILE),
        TritonBackend(3, config=TILE),
        TritonBackend(config=TILE, batch_invariant=True, piece_keys=64),
    ],
    ids=["balanced", "three", "invariant"],
)
def test_replays_are_equal_to_eager(
    backend: TritonBackend, device: torch.device
) -> None:  # BL-18, BL-20
    capture = make_case(CAPTURED, device=device, **SMALL)
    part = capture.tables()
    wide = torch.full((8, 50), ABSURD_PAGE, dtype=torch.int32, device=device)
    wide[:, : part.block_table.shape[1]] = part.block_table
    part = capture.planned(backend, dataclasses.replace(part, block_table=wide))
    buffers = part.plan
    for lens in REPLAYS:
        live = make_case(lens, device=device, **SMALL)
        rows = sum(q for q, _ in lens)
        put(part, live)
        part = capture.planned(backend, part)
        assert part.plan is buffers, "a replay must not allocate"
        q_latent, q_rope = (
            torch.full_like(q, math.nan) for q in (capture.q_latent, capture.q_rope)
        )
        q_latent[:rows], q_rope[:rows] = live.q_latent, live.q_rope
        got = backend.forward_mqa(
            q_latent, q_rope, live.latent_cache, part, softmax_scale=live.softmax_scale
        )
        assert (got.out[rows:] == 0).all(), "rows of nobody"
        assert (got.lse[rows:] == -math.inf).all()
        held = type(got)(got.out[:rows], got.lse[:rows])
        if lens:
            assert_matches_oracle(held, live, live.tables())
        if lens and backend.batch_invariant:
            eager = live.attend(backend)
            assert torch.equal(held.out, eager.out)
            assert torch.equal(held.lse, eager.lse)
