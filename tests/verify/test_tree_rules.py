"""The tree rules by themselves: the walk, chains as trees, greedy requests, numbers by hand."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

from specmla.staging import send_arrays
from specmla.verify.accept import decide, greedy, token_level
from specmla.verify.tree import TreeTables, keep_nodes, tree_arrays, tree_tables
from specmla.verify.tree_rules import decide_tree, follow, multi_round, num_judged, walk
from tests.verify.test_tree import random_parents

SHAPES: dict[str, list[int]] = {
    "one": [-1],
    "siblings": [-1, -1, -1],
    "chain": [-1, 0, 1],
    "chain-backwards": [1, 2, -1],
    "fork": [-1, -1, 0, 0, 1],
    "fork-shuffled": [3, -1, 1, -1, 3, 1],
    "comb": [-1, 0, 0, 1, 1, 3],
}


def tables(*all_parents: list[int] | int, width: int | None = None) -> TreeTables:
    """Give the tables of requests with these trees; a number is a chain of so many drafts."""
    counts = [p if isinstance(p, int) else len(p) for p in all_parents]
    trees = [None if isinstance(p, int) else keep_nodes(p, 63, 63) for p in all_parents]
    k = width or max(counts)
    return tree_tables(
        send_arrays(tree_arrays(trees, counts, k), torch.device("cpu")), trees, counts
    )


def naive_walk(parents: list[int], stands: list[bool]) -> list[int]:
    """Give the rows of the accepted path."""
    at, rows = -1, []
    while True:
        child = next((c for c, p in enumerate(parents) if p == at and stands[c]), None)
        if child is None:
            return rows
        rows.append(child + 1)
        at = child


@pytest.mark.parametrize("name", SHAPES)
def test_walk_equals_the_naive_one_for_every_outcome(name: str) -> None:
    parents = SHAPES[name]
    outcomes = list(itertools.product([False, True], repeat=len(parents)))
    padded = torch.tensor([[*outcome, True, True] for outcome in outcomes])  # must not matter
    made = tables(*[parents] * len(outcomes), width=len(parents) + 2)
    path = walk(padded, made)
    for b, outcome in enumerate(outcomes):
        rows = naive_walk(parents, list(outcome))
        got = path.rows[b].tolist()
        assert got == rows + [-1] * (len(got) - len(rows))
        assert path.num_accepted[b] == len(rows)
        assert path.end[b] == (rows[-1] if rows else 0)


def test_walk_goes_down_to_row_63() -> None:
    """Bit 63 is the sign: a chain of 63, upwards and downwards, and 63 children."""
    up, down = list(range(-1, 62)), [*range(1, 63), -1]
    made = tables(up, down, [-1] * 63)
    stands = torch.ones(3, 63, dtype=torch.bool)
    stands[2, :62] = False
    path = walk(stands, made)
    assert path.rows[0].tolist() == list(range(1, 64))
    assert path.rows[1].tolist() == list(range(63, 0, -1))
    assert path.rows[2].tolist() == [63] + [-1] * 62
    assert path.num_accepted.tolist() == [63, 63, 1]


def rows(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(*shape, generator=generator, dtype=torch.float64) * 2
    return torch.softmax(logits, -1).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dense", [False, True])
def test_chains_in_tree_tables_equal_the_chain_rule_to_the_bit(dense, dtype) -> None:
    b, k, width = 40, 4, 7
    generator = torch.Generator().manual_seed(2)
    drafts = torch.randint(-1, width + 2, (b, k), generator=generator)
    p = rows(0, b, k + 1, width, dtype=dtype)
    q = rows(1, b, k, width, dtype=dtype) if dense else None
    made = tables(*[k] * b)
    want, got = token_level(p, drafts, q), multi_round(p, drafts, q, made)
    assert torch.equal(got.accept, want.accept)
    assert torch.equal(got.correction, want.correction)
    u = torch.rand(b, k + 1, generator=generator, dtype=torch.float64)
    chain = decide(want, drafts, u[:, :k], u[:, k])
    tree, path = decide_tree(got, drafts, made, u[:, :k], u[:, k])
    for one, other in zip(chain, tree, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(path.end, chain.num_accepted)


def test_greedy_chains_equal_the_chain_rule() -> None:
    generator = torch.Generator().manual_seed(4)
    target = torch.randint(3, (60, 5), generator=generator)
    drafts = torch.randint(-1, 3, (60, 4), generator=generator)
    want = greedy(target, drafts)
    got, _ = follow(target, drafts, tables(*[4] * 60))
    for one, other in zip(want, got, strict=True):
        assert torch.equal(one, other)


def test_follow_equals_multi_round_with_a_certain_target() -> None:
    """Greedy requests: p is one-hot, whatever q and whatever the random numbers."""
    rng = random.Random(1)
    for seed in range(40):
        parents = random_parents(6, seed)
        made = tables(parents)
        target = torch.tensor([[rng.randrange(3) for _ in range(7)]])
        drafts = torch.tensor([[rng.randrange(-1, 4) for _ in range(6)]])
        p = torch.nn.functional.one_hot(target, 3).double()
        q = rows(seed, 1, 6, 3, dtype=torch.float64)
        want, want_path = follow(target, drafts, made)
        u = torch.rand(1, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        for given in (None, q):
            terms = multi_round(p, drafts, given, made)
            got, path = decide_tree(terms, drafts, made, u[:, :6], u[:, 6])
            assert torch.equal(path.rows, want_path.rows)
            for one, other in zip(want, got, strict=True):
                assert torch.equal(one, other)


def test_a_path_by_hand() -> None:
    """Nodes 4 (under anchor), 9 (under anchor), 5 (under 9), 6 (under 5); accepted 9, 5."""
    made = tables([-1, -1, 1, 2])
    target = torch.tensor([[9, 0, 5, 7, 1]])
    got, path = follow(target, torch.tensor([[4, 9, 5, 6]]), made)
    assert path.rows.tolist() == [[2, 3, -1, -1]]
    assert got.tokens.tolist() == [[9, 5, 7, -1, -1]]
    assert (got.num_accepted.item(), got.next_token.item()) == (2, 7)


def test_one_hot_siblings_take_their_share_of_p() -> None:
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).expand(1, 4, 3)
    terms = multi_round(p, torch.tensor([[1, 0, 1]]), None, tables([-1, -1, -1]))
    # 0.3; then 0.5 of 0.7; the younger of two equal siblings is never accepted.
    assert terms.accept[0].tolist() == pytest.approx([0.3, 0.5 / 0.7, 0.0], abs=1e-15)
    left = terms.correction[0, 0]
    assert (left / left.sum()).tolist() == pytest.approx([0, 0, 1], abs=1e-15)


def test_missing_drafts_and_what_hangs_on_them_are_not_judged() -> None:
    made = tables([-1, -1, 0, 2, 1], 3, width=5)
    drafts = torch.tensor([[-1, 4, 5, 6, 7], [1, -1, 2, 9, 9]])
    assert num_judged(drafts, made).tolist() == [2, 1]


def test_nan_rows_out_of_reach_change_nothing() -> None:
    """What follows a refused node may hold anything."""
    made = tables([-1, -1, 0])
    p = rows(0, 1, 4, 5, dtype=torch.float64)
    drafts = torch.tensor([[9, 2, 1]])  # 9 is outside of the vocabulary, 1 hangs on it
    spoilt = p.clone()
    spoilt[0, 1] = torch.nan
    u = torch.full((1, 4), 1e-9, dtype=torch.float64)
    for one, other in zip(
        *(
            decide_tree(multi_round(x, drafts, None, made), drafts, made, u[:, :3], u[:, 3])[0]
            for x in (p, spoilt)
        ),
        strict=True,
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dense", [False, True])
def test_children_that_cover_the_support_leave_something_to_draw_from(dense: bool) -> None:
    """Float32, filters of two ids, both of them children: rounding must not end in an empty row."""
    b = 4000
    generator = torch.Generator().manual_seed(9)
    first = torch.rand(b, generator=generator).clamp(1e-7, 1)
    p = torch.zeros(b, 3, 5)
    p[:, :, 1], p[:, :, 3] = first[:, None], 1 - first[:, None]
    made, drafts = tables(*[[-1, -1]] * b), torch.tensor([[1, 3]]).expand(b, 2)
    q = None
    if dense:  # drawn without replacement from nearly the same
        q = torch.zeros(b, 2, 5)
        q[:, 0] = p[:, 0]
        q[:, 1, 3] = 1.0
    for u in (2.0**-53, 0.5, 1 - 2.0**-53):
        numbers = torch.full((b, 2), u, dtype=torch.float64)
        terms = multi_round(p, drafts, q, made)
        assert ((terms.accept >= 0) & (terms.accept <= 1)).all()
        got, _ = decide_tree(terms, drafts, made, numbers, numbers[:, 0])
        assert not got.flagged.any()
        assert ((got.tokens[:, 0] == 1) | (got.tokens[:, 0] == 3)).all()
