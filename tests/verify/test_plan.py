"""The two ways to place drafts on the device give the same step."""

from __future__ import annotations

import pytest
import torch

from specmla import DraftProposal, SamplingParams
from specmla.staging import send_arrays
from specmla.verify.plan import (
    PlannedRequest,
    _is_uniform,
    _ragged_arrays,
    _ragged_rows,
    _uniform_rows,
    host_arrays,
)
from specmla.verify.requests import RequestState

CPU = torch.device("cpu")


def planned(count: int, drafts: int) -> list[PlannedRequest]:
    state = RequestState("r", [1], SamplingParams(seed=0), vocab_size=9, max_seq_len=9)
    return [
        PlannedRequest(state, i, [5 + i], 10 + i, drafts, i * drafts, is_prompt=False)
        for i in range(count)
    ]


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("vocab", [16, 20, 12])
@pytest.mark.parametrize("dense", [False, True])
def test_uniform_steps_equal_the_general_way(width, vocab, dense):
    """Padded (-1) and foreign ids (17) included, and draft vocabularies of other sizes."""
    requests = planned(4, width)
    tokens = torch.tensor([[1, 2, 3], [4, -1, 6], [17, 8, 9], [10, 11, 17]])[:, :width]
    probs = torch.rand(4, width, 16).softmax(-1) if dense else None
    proposal = DraftProposal(tuple(range(4)), (width,) * 4, tokens, probs)
    assert _is_uniform(requests, proposal, width)
    sent = send_arrays(host_arrays(requests, proposal), CPU)
    assert "anchors" in sent
    short = _uniform_rows(sent, proposal, vocab)
    sent = send_arrays(_ragged_arrays(requests, width), CPU)
    general = _ragged_rows(sent, len(requests), proposal, vocab)
    for name, got, expected in zip(general._fields, short, general, strict=True):
        if expected is None:
            assert got is None
        else:
            assert torch.equal(got, expected), name


def test_what_is_not_uniform():
    requests, tokens = planned(3, 2), torch.ones(3, 2, dtype=torch.int64)
    proposal = DraftProposal((0, 1, 2), (2, 2, 2), tokens)
    assert _is_uniform(requests, proposal, 2)
    assert not _is_uniform(requests[:2], proposal, 2)  # a request of the proposal is not planned
    assert not _is_uniform([requests[1], requests[0], requests[2]], proposal, 2)  # another order
    assert not _is_uniform([*requests[:2], requests[2]._replace(num_drafts=1)], proposal, 2)
    assert not _is_uniform([*requests[:2], requests[2]._replace(is_prompt=True)], proposal, 2)
    wide = DraftProposal((0, 1, 2), (2, 2, 2), torch.ones(3, 3, dtype=torch.int64))
    assert not _is_uniform(requests, wide, 2)
