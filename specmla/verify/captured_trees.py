"""Tree tables of a captured step: of fixed sizes, whatever trees its requests bring.

Of K nodes at most K / (r + 1) have r elder siblings, so that many are tried in round r of
`multi_round`, and what a request lacks is filled up with nodes that are none.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from specmla.bucket import Bucket
from specmla.verify.plan import PlannedRequest
from specmla.verify.tree import TREE_TABLES, TreeTables, tree_arrays, tree_views


def tree_sizes(bucket: Bucket) -> dict[str, int]:
    """Give the sizes of the arrays that travel with a step; none if the bucket has no trees."""
    cells = bucket.num_requests * (bucket.query_len - 1)
    return dict.fromkeys(TREE_TABLES, cells) if bucket.trees else {}


def padded_trees(bucket: Bucket, planned: Sequence[PlannedRequest]) -> dict[str, array[int]]:
    """Give these arrays; a request that is not there has no node."""
    if not bucket.trees:
        return {}
    width = bucket.query_len - 1
    given = tree_arrays([r.tree for r in planned], [r.num_drafts for r in planned], width)
    missing = array("q", [0]) * (width * (bucket.num_requests - len(planned)))
    return {name: values + missing for name, values in given.items()}


def padded_tables(bucket: Bucket, sent: Mapping[str, Tensor]) -> TreeTables:
    """Make the tables of `multi_round` from what was sent, on the device alone."""
    num, width = bucket.num_requests, bucket.query_len - 1
    parents, words, depths, ranks = tree_views(sent, num)
    room = [num * (width // (rank + 1)) for rank in range(width)]
    order = _rounds(ranks.reshape(-1), depths.reshape(-1), room)
    # Whether a request's tree is a chain is not known here: its tables say it.
    unknown = (False,) * num
    return TreeTables(
        parents, words, depths, ranks, order, tuple(accumulate(room)), unknown, padded=True
    )


def _rounds(ranks: Tensor, depths: Tensor, room: Sequence[int]) -> Tensor:
    """Give the nodes of each rank, in order, filled up to its room with the number of cells."""
    cells = len(ranks)
    rank = torch.where(depths > 0, ranks, len(room))
    ordered = rank.argsort(stable=True)
    each = torch.arange(len(room), device=ranks.device)
    counts = (rank == each[:, None]).sum(1)
    starts = counts.cumsum(0) - counts
    found = []
    for i, most in enumerate(room):
        place = torch.arange(most, device=ranks.device)
        at = (starts[i] + place).clamp(max=cells - 1)
        found.append(torch.where(place < counts[i], ordered[at], cells))
    return torch.cat(found)
