"""The prefill workspace: its size, its lock, what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specmla.errors import ArgumentError
from specmla.workspace import PrefillWorkspace, workspace_rows


@pytest.mark.parametrize(
    ("max_model_len", "max_num_seqs", "page_size", "rows"),
    [
        (1000, 4, 16, 8000),  # 8 * max_model_len
        (1001, 4, 16, 8016),  # 8008, up to a page
        (100, 64, 64, 16_384),  # 4 * max_num_seqs * G
        (163_840, 256, 64, 65_536),
        (163_840, 256, 48, 65_568),  # the cap is rounded up as well
        (1, 1, 1, 8),
    ],
)
def test_workspace_rows(max_model_len: int, max_num_seqs: int, page_size: int, rows: int) -> None:
    assert workspace_rows(max_model_len, max_num_seqs, page_size) == rows


def test_workspace_rows_refuses_limits_below_one() -> None:
    with pytest.raises(ArgumentError, match=r"max_model_len is 0.*max_num_seqs is -1.*page_size"):
        workspace_rows(0, -1, 0)


def test_claims_grow_to_the_largest_in_whole_pages_until_it_is_locked() -> None:
    workspace = PrefillWorkspace(24, 16, torch.float32, "cpu")
    for claimed, rows in ((20, 32), (16, 32), (40, 48)):
        workspace.claim(claimed)
        assert workspace.num_rows == rows
    workspace.lock()
    assert workspace.is_locked
    address = workspace.rows(1).data_ptr()
    workspace.claim(48)
    with pytest.raises(ArgumentError, match=r"num_rows is 49, accepted are at most 48.*locked"):
        workspace.claim(49)
    assert workspace.rows(48).data_ptr() == address
    assert workspace.rows(48).shape == (48, 24)
    for count in (49, -1):
        with pytest.raises(ArgumentError, match=f"count is {count}, accepted are 0 to 48"):
            workspace.rows(count)


def test_refusals() -> None:
    with pytest.raises(ArgumentError, match=r"width is 0.*; page_size is -3.*; dtype is"):
        PrefillWorkspace(0, -3, torch.int8, "cpu")
    workspace = PrefillWorkspace(24, 16, torch.float32, "cpu")
    with pytest.raises(ArgumentError, match=r"num_rows is 15, accepted .* page_size \(16\)"):
        workspace.claim(15)
    with pytest.raises(ArgumentError, match="0 rows are claimed"):
        workspace.lock()
    assert not workspace.is_locked


@pytest.mark.parametrize("count", ["64", 64.5, float("nan"), None, True])
def test_counts_that_are_no_integers_are_refused(count: Any) -> None:
    workspace = PrefillWorkspace(24, 16, torch.float32, "cpu")
    with pytest.raises(ArgumentError, match=f"num_rows is {count!r}, accepted are integers"):
        workspace.claim(count)
    assert workspace.num_rows == 0
