"""A tree beside the chains that it holds: each path moved to the front and attended as a chain."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from specmla.backends.base import AttentionBackend, AttentionOutput
from specmla.cache.latent import LatentCache
from specmla.mask import DraftMask
from specmla.metadata import RequestRows
from specmla.testing import VerifyCase, assert_matches_oracle


def leaves(parents: list[int]) -> list[int]:
    """Give the nodes without children: their paths cover every node."""
    return [node for node in range(len(parents)) if node not in parents]


def path_to(parents: list[int], node: int) -> list[int]:
    """Give the rows from the anchor, whatever row it is, down to a node."""
    path = [node]
    while parents[path[-1]] != -1:
        path.append(parents[path[-1]])
    return path[::-1]


def chains_of(case: VerifyCase) -> Iterator[tuple[list[int], VerifyCase]]:
    """Give chain cases that together hold every path, each with the packed rows it stands for.

    Round i holds leaf i of every request that has one, in a copy of the cache where the rows of the
    paths have been moved to the front; what was there before is overwritten or past the end.
    """
    assert case.spec.mask is DraftMask.TREE
    starts, trees = [0], [list(r.parents or ()) for r in case.requests]
    for r in case.requests:
        starts.append(starts[-1] + r.query_len)
    ends = [leaves(tree) for tree in trees]
    for turn in range(max(map(len, ends))):
        rows, sources, targets, requests = [], [], [], []
        for i, (r, tree) in enumerate(zip(case.requests, trees, strict=True)):
            path = path_to(tree, ends[i][turn]) if turn < len(ends[i]) else []
            first, slots = r.seq_len - r.query_len, case.slots(i).tolist()
            rows += [starts[i] + row for row in path]
            sources += [slots[first + row] for row in path]
            targets += slots[first : first + len(path)]
            requests.append(RequestRows(r.kind, len(path), first + len(path), r.block_ids))
        yield rows, _moved(case, rows, sources, targets, tuple(requests))


def _moved(
    case: VerifyCase,
    rows: list[int],
    sources: list[int],
    targets: list[int],
    requests: tuple[RequestRows, ...],
) -> VerifyCase:
    device = case.latent_cache.device
    pool = case.latent_cache.clone(memory_format=torch.preserve_format)
    cache = LatentCache.from_pool([pool], format=case.spec.cache_format)
    cache.move(torch.tensor(sources, device=device), torch.tensor(targets, device=device))
    at = torch.tensor(rows, dtype=torch.int64, device=device)
    return dataclasses.replace(
        case,
        spec=dataclasses.replace(case.spec, mask=DraftMask.CAUSAL),
        q_latent=case.q_latent[at],
        q_rope=case.q_rope[at],
        latent_cache=pool,
        requests=requests,
    )


def assert_paths_are_chains(case: VerifyCase, backend: AttentionBackend) -> int:
    """Hold each path's rows of one tree call to the float64 oracle of its own chain; the backend's
    chain call too. Gives the number of chain calls."""
    got, count = case.attend(backend), 0
    for rows, chain in chains_of(case):
        tables, count = chain.tables(), count + 1
        assert_matches_oracle(AttentionOutput(got.out[rows], got.lse[rows]), chain, tables)
        assert_matches_oracle(chain.attend(backend), chain, tables)
    return count
