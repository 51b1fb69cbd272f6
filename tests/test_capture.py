"""Metadata of captured steps: buffers that stay, padded rows inert, nothing cut to fit."""

from __future__ import annotations

import math
from array import array

import pytest
import torch

from specmla.backends.fixed_heads import FixedHeads
from specmla.backends.reference import ReferenceBackend
from specmla.backends.rows import RowsBackend
from specmla.backends.triton import TritonBackend
from specmla.bucket import Bucket
from specmla.builder import MetadataBuilder
from specmla.capture import CapturedMetadata
from specmla.errors import ArgumentError
from specmla.kernels.launch import LaunchEntry
from specmla.metadata import RequestKind, RequestRows
from specmla.testing import ABSURD_PAGE, VerifyCase, assert_matches_oracle, make_case

HEADS, RANK, ROPE, PAGE = 5, 32, 16, 16
TILE = LaunchEntry(16, 16, 16, 4, 1)
BACKENDS = {
    "reference": ReferenceBackend(),
    "triton": TritonBackend(config=TILE),
    "rows": RowsBackend(config=TILE),
    "padded": FixedHeads(TritonBackend(config=TILE), 8),
}
# BL-20: five of eight, then eight of one key, then nobody, then the five again.
REPLAYS = [
    [(1, 1), (3, 64), (3, 65), (2, 700), (3, 3)],
    [(1, 1)] * 8,
    [(3, 16), (1, 17), (2, 2), (3, 300)],
    [],
    [(1, 1), (3, 64), (3, 65), (2, 700), (3, 3)],
]


def make_builder(backend, num_pages: int = 400, max_seq_len: int = 800) -> MetadataBuilder:
    return MetadataBuilder(
        backend=backend,
        page_size=PAGE,
        num_pages=num_pages,
        num_heads=HEADS,
        kv_lora_rank=RANK,
        device="cpu",
        max_seq_len=max_seq_len,
        dtype=torch.float32,
    )


def make_live(lens, seed: int = 0) -> VerifyCase:
    sizes = {"num_heads": HEADS, "kv_lora_rank": RANK, "rope_dim": ROPE, "page_size": PAGE}
    return make_case(lens, seed=seed, **sizes)


def places(lens, query_len: int) -> list[int]:
    """Rows of the bucket that the packed rows of these requests stand in."""
    return [i * query_len + t for i, (count, _) in enumerate(lens) for t in range(count)]


@pytest.mark.parametrize("name", BACKENDS)
def test_replays_attend_as_each_batch_alone_and_leave_padding_empty(name):  # BL-18, BL-20
    bucket, backend = Bucket(8, 3), BACKENDS[name]
    captured = CapturedMetadata(make_builder(backend), bucket)
    first = captured.for_capture()
    held = [first.positions, first.slot_mapping, first.verify.seq_lens, first.verify.block_table]
    for turn, lens in enumerate(REPLAYS):
        live = make_live(lens, turn)
        captured.for_replay(live.requests)
        step = captured.for_capture()
        now = [step.positions, step.slot_mapping, step.verify.seq_lens, step.verify.block_table]
        assert [t.data_ptr() for t in now] == [t.data_ptr() for t in held]
        if name == "triton":
            assert step.verify.plan is first.verify.plan, "a replay must not allocate"
        rows = places(lens, 3)
        q_latent = torch.full((24, HEADS, RANK), 9.0)
        q_rope = torch.full((24, HEADS, ROPE), 9.0)
        q_latent[rows], q_rope[rows] = live.q_latent, live.q_rope
        cache = torch.full((400, PAGE, RANK + ROPE), math.nan)
        cache[: len(live.latent_cache)] = live.latent_cache
        scale = live.softmax_scale
        got = backend.forward_mqa(q_latent, q_rope, cache, step.verify, softmax_scale=scale)
        idle = sorted(set(range(24)) - set(rows))
        assert (got.out[idle] == 0).all()
        assert (got.lse[idle] == -math.inf).all()
        if lens:
            assert_matches_oracle(type(got)(got.out[rows], got.lse[rows]), live, live.tables())


@pytest.mark.parametrize("lens", [[(3, 40), (3, 3)], [(1, 40), (3, 17), (2, 2)], []])
def test_live_rows_are_those_of_the_builder(lens):
    live, builder = make_live(lens), make_builder(ReferenceBackend())
    captured = CapturedMetadata(builder, Bucket(4, 3), {"mine": 2})
    captured.for_replay(make_live([(3, 700)] * 4, 1).requests, {"mine": array("q", [7, 8])})
    captured.for_replay(live.requests, {"mine": array("q", [5, -6])})
    step, rows = captured.for_capture(), places(lens, 3)
    idle = sorted(set(range(12)) - set(rows))
    assert step.along["mine"].tolist() == [5, -6]
    assert step.slot_mapping[idle].tolist() == [-1] * len(idle)
    assert step.verify.row_extent[idle].tolist() == [0] * len(idle)
    assert step.verify.seq_lens.tolist() == [s for _, s in lens] + [0] * (4 - len(lens))
    if not lens:
        return
    eager = builder.build(live.requests)
    assert step.positions[rows].tolist() == eager.positions.tolist()
    assert step.slot_mapping[rows].tolist() == eager.slot_mapping.tolist()
    assert step.verify.row_extent[rows].tolist() == eager.verify.row_extent.tolist()
    table = eager.verify.block_table
    width, used = table.shape[1], table >= 0
    assert torch.equal(step.verify.block_table[: len(lens), :width][used], table[used])


def rows_of(lens, kind=RequestKind.VERIFY) -> list[RequestRows]:
    return [r._replace(kind=kind) for r in make_live(lens).requests]


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        (rows_of([(4, 9)]), r"query_len is \[4\], captured is 1 to 3"),
        (rows_of([(0, 9)]), r"query_len is \[0\], captured is 1 to 3"),
        (rows_of([(1, 9)] * 3), "there are 3 requests, captured are 2"),
        (rows_of([(2, 9)], RequestKind.PROMPT), r"kind is \['prompt'\]"),
        (rows_of([(2, 9)], RequestKind.EXTEND), r"kind is \['extend'\]"),
        ([RequestRows(RequestKind.VERIFY, 2, 9, (400,))], r"block_ids has \[400\]"),
        ([RequestRows(RequestKind.VERIFY, 2, 9, (ABSURD_PAGE,))], "block_ids has"),
        ([RequestRows(RequestKind.VERIFY, 2, 9, ())], "9 tokens need 1"),
        ([RequestRows(RequestKind.VERIFY, 2, 801, tuple(range(51)))], r"max_seq_len \(800\)"),
        ([RequestRows(RequestKind.VERIFY, 2, 9, (1,), (-1, 0))], "parents or a window"),
        ([RequestRows(RequestKind.VERIFY, 2, 9, (1,), None, 3)], "parents or a window"),
    ],
    ids=[
        "longer",
        "none",
        "more",
        "prompt",
        "extend",
        "page",
        "absurd",
        "pages",
        "long",
        "tree",
        "window",
    ],
)
def test_what_was_not_captured_is_refused_and_nothing_is_written(requests, message):
    captured = CapturedMetadata(make_builder(ReferenceBackend()), Bucket(2, 3), {"mine": 1})
    captured.for_replay(rows_of([(3, 40), (2, 33)]), {"mine": array("q", [1])})
    step = captured.for_capture()
    held = [step.positions, step.slot_mapping, step.verify.seq_lens, step.verify.block_table]
    before = [t.clone() for t in (*held, step.verify.row_extent, step.along["mine"])]
    with pytest.raises(ArgumentError, match=message):
        captured.for_replay(requests, {"mine": array("q", [2])})
    for along in ({}, {"mine": array("q", [1, 2])}, {"mine": array("i", [1])}):
        with pytest.raises(ArgumentError, match="along has sizes"):
            captured.for_replay(rows_of([(3, 40)]), along)
    after = (*held, step.verify.row_extent, step.along["mine"])
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_uniform_bucket_takes_its_length_alone():
    captured = CapturedMetadata(make_builder(ReferenceBackend()), Bucket(2, 3, ragged=False))
    captured.for_replay(rows_of([(3, 40)]))
    assert captured.for_capture().verify.seq_lens.tolist() == [40, 0]
    with pytest.raises(ArgumentError, match=r"query_len is \[2\], captured is 3"):
        captured.for_replay(rows_of([(3, 40), (2, 5)]))


def test_a_uniform_backend_takes_no_ragged_bucket():
    from specmla.backends.flashmla import FlashMLABackend

    builder = make_builder(FlashMLABackend())
    with pytest.raises(ArgumentError, match="UNIFORM and accepts ragged=False"):
        CapturedMetadata(builder, Bucket(2, 3))
    assert CapturedMetadata(builder, Bucket(2, 3, ragged=False)).bucket.num_rows == 6


def test_sizes_below_one_are_refused_together():
    with pytest.raises(ArgumentError, match=r"num_requests is 0.*query_len is -1"):
        Bucket(0, -1)
    with pytest.raises(ArgumentError, match=r"num_requests is 1\.5.*query_len is True"):
        Bucket(1.5, True)


@pytest.mark.parametrize("name", ["reference", "triton", "rows"])
def test_advanced_rows_are_those_that_the_builder_makes(name):
    """Drafting: K rows one after another on the device, requests of fewer standing still."""
    backend, lens = BACKENDS[name], [(1, 15), (1, 16), (1, 30), (1, 1)]
    ahead = [3, 4, 0, 2]
    live = make_live([(1, s + n) for (_, s), n in zip(lens, ahead, strict=True)])
    now = [r._replace(seq_len=s) for r, (_, s) in zip(live.requests, lens, strict=True)]
    builder = make_builder(backend)
    captured = CapturedMetadata(builder, Bucket(6, 1))
    captured.for_replay(make_live([(1, 99)] * 6, 1).requests, ahead=[10] * 6)
    captured.for_replay(now, ahead=ahead)
    cache = torch.full((400, PAGE, RANK + ROPE), math.nan)
    cache[: len(live.latent_cache)] = live.latent_cache
    for row in range(5):
        step = captured.for_capture()
        chosen = [i for i in range(4) if row <= ahead[i]]
        due = [now[i]._replace(seq_len=now[i].seq_len + row) for i in chosen]
        eager = builder.build(due)
        assert step.positions[chosen].tolist() == eager.positions.tolist()
        assert step.slot_mapping[chosen].tolist() == eager.slot_mapping.tolist()
        assert step.verify.seq_lens[chosen].tolist() == eager.verify.seq_lens.tolist()
        idle = sorted(set(range(6)) - set(chosen))
        assert step.slot_mapping[idle].tolist() == [-1] * len(idle)
        assert step.verify.seq_lens[[4, 5]].tolist() == [0, 0]
        query = [torch.ones(6, HEADS, RANK), torch.ones(6, HEADS, ROPE)]
        scale = live.softmax_scale
        got = backend.forward_mqa(*query, cache, step.verify, softmax_scale=scale)
        few = [q[: len(chosen)] for q in query]
        alone = backend.forward_mqa(*few, cache, eager.verify, softmax_scale=scale)
        assert torch.allclose(got.out[chosen], alone.out, atol=1e-6)
        assert torch.allclose(got.lse[chosen], alone.lse, atol=1e-6)
        assert (got.lse[[4, 5]] == -math.inf).all()
        captured.advance()


def test_advancing_needs_pages_and_single_rows():
    captured = CapturedMetadata(make_builder(ReferenceBackend()), Bucket(2, 1))
    requests = rows_of([(1, 16)])
    with pytest.raises(ArgumentError, match="17 tokens need 2"):
        captured.for_replay(requests, ahead=[1])
    for ahead in ([], [0, 0], [-1]):
        with pytest.raises(ArgumentError, match="accepted are 1 values >= 0"):
            captured.for_replay(requests, ahead=ahead)
    captured.for_replay(requests)
    captured.advance()
    assert captured.for_capture().verify.seq_lens.tolist() == [16, 0]
    with pytest.raises(ArgumentError, match="query_len is 2, accepted is 1"):
        CapturedMetadata(make_builder(ReferenceBackend()), Bucket(2, 2)).advance()
