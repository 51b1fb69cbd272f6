"""Captured metadata of blocks, trees and windows, and rounds that follow another bucket's rows."""

from __future__ import annotations

import math

import pytest
import torch

from specmla.backends.reference import ReferenceBackend
from specmla.bucket import Bucket
from specmla.capture import CapturedMetadata
from specmla.mask import DraftMask
from tests.test_capture import BACKENDS, HEADS, PAGE, RANK, ROPE, make_builder, make_live, places


@pytest.mark.parametrize("name", ["reference", "triton"])
@pytest.mark.parametrize("mask", [DraftMask.FULL, DraftMask.TREE])
def test_blocks_and_trees_attend_as_each_batch_alone(mask, name):
    backend, bucket = BACKENDS[name], Bucket(4, 4)
    captured = CapturedMetadata(make_builder(backend), bucket, mask=mask)
    trees = {4: (-1, 0, 0, 1), 3: (2, 2, -1), 2: (-1, 0), 1: None}
    for turn, lens in enumerate([[(4, 40), (3, 17), (2, 64)], [(1, 5)], [(4, 33), (4, 9)]]):
        live = make_live(lens, turn)
        rows = [
            r._replace(parents=trees[r.query_len] if mask is DraftMask.TREE else None)
            for r in live.requests
        ]
        eager = captured.builder.build(rows, mask)
        captured.for_replay(rows)
        step, at = captured.for_capture(), places(lens, 4)
        assert step.positions[at].tolist() == eager.positions.tolist()
        assert step.slot_mapping[at].tolist() == eager.slot_mapping.tolist()
        query = [torch.full((16, HEADS, width), 9.0) for width in (RANK, ROPE)]
        query[0][at], query[1][at] = live.q_latent, live.q_rope
        cache, scale = torch.full((400, PAGE, RANK + ROPE), math.nan), live.softmax_scale
        cache[: len(live.latent_cache)] = live.latent_cache
        got = backend.forward_mqa(*query, cache, step.verify, softmax_scale=scale)
        alone = backend.forward_mqa(
            live.q_latent, live.q_rope, cache, eager.verify, softmax_scale=scale
        )
        assert torch.allclose(got.out[at], alone.out, atol=1e-6)
        idle = sorted(set(range(16)) - set(at))
        assert (got.out[idle] == 0).all()


def test_rounds_follow_the_rows_of_another_bucket_windows_included():
    """Two requests of one and three rows, then three rounds, from the keys that they may see."""
    builder = make_builder(ReferenceBackend())
    first = CapturedMetadata(builder, Bucket(3, 3), windows=True)
    rounds, ahead = first.rounds(), [3, 2]
    live = make_live([(1, 19), (3, 66)])
    now = [
        r._replace(seq_len=r.seq_len - n, window_start=w)
        for r, n, w in zip(live.requests, ahead, (5, 0), strict=True)
    ]
    first.for_replay(now, ahead=ahead)
    assert first.for_capture().verify.row_start.tolist() == [5, 0, 0, 0, 0, 0, 0, 0, 0]
    rounds.follow(first)
    for row in range(1, 4):
        rounds.advance()
        step = rounds.for_capture()
        chosen = [i for i in range(2) if row <= ahead[i]]
        due = [now[i]._replace(seq_len=now[i].seq_len + row, query_len=1) for i in chosen]
        eager = builder.build(due)
        assert step.positions[chosen].tolist() == eager.positions.tolist()
        assert step.slot_mapping[chosen].tolist() == eager.slot_mapping.tolist()
        assert step.verify.seq_lens[chosen].tolist() == eager.verify.seq_lens.tolist()
        assert step.verify.row_start.tolist() == [5, 0, 0]
        idle = sorted({0, 1, 2} - set(chosen))
        assert step.slot_mapping[idle].tolist() == [-1] * len(idle)
