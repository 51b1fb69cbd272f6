"""Exact losslessness of the tree rules, and what the same sums say of wrong ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specmla.verify.rules.terms import RuleTerms
from specmla.verify.sampling import SamplingParams
from specmla.verify.sibling_draws import draw_siblings, without_replacement
from specmla.verify.sparse import DraftProbs, SparseProbs
from specmla.verify.tree import TreeTables
from specmla.verify.tree_rules import follow, multi_round
from specmla.verify.vocab import pad_vocab
from tests.verify.tree_enumeration import (
    DrafterFn,
    Drafts,
    Tables,
    TreeRuleFn,
    Walker,
    filtered,
    node_rows,
    random_tables,
    shape_tables,
    total_variation,
)

SHAPES: dict[str, list[int]] = {
    "one": [-1],
    "pair": [-1, -1],
    "three": [-1, -1, -1],
    "chain": [-1, 0],
    "fork": [-1, -1, 0, 0],
    "shuffled": [3, -1, 3, -1],  # children before their parent
    "uneven": [-1, 0, 0, -1, 3],
    "deep": [-1, -1, 0, 2, 2],
}


def assignments(shape: Walker, width: int, least: int = 0) -> Tensor:
    """Give every way [P, K] to put ids `least` .. width - 1 on the nodes."""
    ids = list(itertools.product(range(least, width), repeat=len(shape.parents)))
    return torch.tensor(ids, dtype=torch.int64)


def drawn(tables: Tables, *, replacement: bool) -> DrafterFn:
    """Draw the children of each node from the tables' rows and report what they were drawn from.

    Where q is exhausted no draft is made (-1).
    """

    def propose(n: int, shape: Walker) -> Drafts:
        width = tables[0].shape[1]
        tokens = assignments(shape, width, 0 if replacement and width == shape.width else -1)
        tokens = tokens.expand(shape.width**n, -1, -1).contiguous()
        r, p, k = tokens.shape
        rows = node_rows(tables, n, shape, tokens)
        q = torch.zeros(r, p, k, width, dtype=torch.float64)
        for row in range(k + 1):
            nodes = [c for c, parent in enumerate(shape.parents) if parent + 1 == row]
            given = rows[:, :, row].reshape(r * p, width)
            children = tokens[..., nodes].reshape(r * p, len(nodes))
            if replacement:
                found = given[:, None].expand(-1, len(nodes), -1)
            else:
                found = without_replacement(given, children)
            q[:, :, nodes] = found.reshape(r, p, len(nodes), width)
        at = q.gather(3, tokens.clamp(min=0)[..., None])[..., 0]
        none = (q.sum(-1) == 0) | q.isnan().any(-1)  # nothing can be drawn, or from nothing known
        chance = torch.where(tokens < 0, none.double(), torch.where(none, 0.0, at))
        return Drafts(tokens, chance.prod(-1), q.flatten(0, 1))

    return propose


def fixed(tables: Tables, *, distinct: bool) -> DrafterFn:
    """Propose the likeliest children of each node, or (not distinct) its likeliest one again and
    again; nothing is drawn, q is None."""

    def propose(n: int, shape: Walker) -> Drafts:
        r, k = shape.width**n, len(shape.parents)
        tokens = torch.zeros(r, 1, k, dtype=torch.int64)
        for node in shape.by_depth():
            parent = shape.parents[node]
            row = node_rows(tables, n, shape, tokens)[:, :, parent + 1]
            rank = shape.parents[:node].count(parent) if distinct else 0
            tokens[..., node] = row.argsort(-1, descending=True)[..., rank]
        return Drafts(tokens, torch.ones(r, 1, dtype=torch.float64), None)

    return propose


def unwritten(drafter: DrafterFn) -> DrafterFn:
    """Make no draft at some nodes, chosen by history and place; their q is NaN."""

    def propose(n: int, shape: Walker) -> Drafts:
        tokens, weight, q = drafter(n, shape)
        r, p, k = tokens.shape
        gone = (torch.arange(r)[:, None] + torch.arange(k) + n) % 3 == 0
        tokens = tokens.masked_fill(gone[:, None], -1)
        if isinstance(q, Tensor):
            gone = gone[:, None].expand(r, p, k).reshape(r * p, k)
            q = q.masked_fill(gone[..., None], torch.nan)
        return Drafts(tokens, weight, q)

    return propose


def cut(drafter: DrafterFn) -> DrafterFn:
    """Give q over the target's ids only, as the step does with a larger draft vocabulary."""

    def propose(n: int, shape: Walker) -> Drafts:
        tokens, weight, q = drafter(n, shape)
        assert isinstance(q, Tensor)
        return Drafts(tokens, weight, pad_vocab(q, shape.width, allow_mismatch=True))

    return propose


def sparse(drafter: DrafterFn) -> DrafterFn:
    """Report the same distributions by their ids, in falling order, -1 where there is none."""

    def propose(n: int, shape: Walker) -> Drafts:
        tokens, weight, q = drafter(n, shape)
        assert isinstance(q, Tensor)
        probs, ids = q.sort(-1, descending=True)
        return Drafts(tokens, weight, SparseProbs(ids.masked_fill(probs == 0, -1), probs))

    return propose


def reduced(tables: Tables) -> Tables:
    """Keep every second id, the last one too: what a head of a reduced vocabulary knows (d2t)."""
    width = tables[0].shape[1]
    known = (torch.arange(width) + width) % 2 == 1
    kept = [table * known for table in tables]
    return [table / table.sum(-1, keepdim=True) for table in kept]


def exhausted_but_drawn(drafter: DrafterFn) -> DrafterFn:
    """Put a token where q was exhausted: its row of zeros says that nothing drew it."""

    def propose(n: int, shape: Walker) -> Drafts:
        tokens, weight, q = drafter(n, shape)
        return Drafts(tokens.clamp(min=0), weight, q)

    return propose


TOP = SamplingParams(0.75, top_k=2)
NARROW = SamplingParams(1.5, top_k=2, top_p=0.9)


def make_case(kind: str, shape: Walker, seed: int = 0) -> tuple[Tables, DrafterFn]:
    depth, width = 2 * (shape.depth + 1) + 1, shape.width
    target = random_tables(width, depth, seed)
    draft = random_tables(width, depth, seed + 100)
    wide = random_tables(width, depth, seed + 200, known=width + 1)
    greedy = filtered(target, SamplingParams())
    cases: dict[str, Callable[[], tuple[Tables, DrafterFn]]] = {
        "with": lambda: (target, drawn(draft, replacement=True)),
        "without": lambda: (target, drawn(draft, replacement=False)),
        "top": lambda: (target, fixed(draft, distinct=True)),
        "repeated": lambda: (target, fixed(draft, distinct=False)),
        "with-equal": lambda: (target, drawn(target, replacement=True)),
        "without-equal": lambda: (target, drawn(target, replacement=False)),
        "with-zeros": lambda: (
            filtered(target, TOP),
            drawn(filtered(draft, NARROW), replacement=True),
        ),
        "without-exhausted": lambda: (target, drawn(filtered(draft, NARROW), replacement=False)),
        "without-all-zeros": lambda: (
            filtered(target, TOP),
            exhausted_but_drawn(drawn(filtered(draft, NARROW), replacement=False)),
        ),
        "without-certain": lambda: (
            target,
            drawn(filtered(draft, SamplingParams()), replacement=False),
        ),
        "with-greedy-target": lambda: (greedy, drawn(draft, replacement=True)),
        "without-greedy-target": lambda: (greedy, drawn(draft, replacement=False)),
        "top-greedy-target": lambda: (greedy, fixed(draft, distinct=True)),
        "top-zeros": lambda: (filtered(target, TOP), fixed(draft, distinct=True)),
        "with-unwritten": lambda: (target, unwritten(drawn(draft, replacement=True))),
        "without-unwritten": lambda: (target, unwritten(drawn(draft, replacement=False))),
        "top-unwritten": lambda: (target, unwritten(fixed(draft, distinct=True))),
        "with-larger": lambda: (target, cut(drawn(wide, replacement=True))),
        "without-larger": lambda: (target, cut(drawn(wide, replacement=False))),
        "without-sparse": lambda: (
            target,
            sparse(drawn(filtered(draft, NARROW), replacement=False)),
        ),
        "with-reduced": lambda: (target, drawn(reduced(draft), replacement=True)),
        "without-reduced": lambda: (target, sparse(drawn(reduced(draft), replacement=False))),
        "top-reduced": lambda: (filtered(target, TOP), fixed(reduced(draft), distinct=False)),
    }
    return cases[kind]()


KINDS = [
    "with",
    "without",
    "top",
    "repeated",
    "with-equal",
    "without-equal",
    "with-zeros",
    "without-exhausted",
    "without-all-zeros",
    "without-certain",
    "with-greedy-target",
    "without-greedy-target",
    "top-greedy-target",
    "top-zeros",
    "with-unwritten",
    "without-unwritten",
    "top-unwritten",
    "with-larger",
    "without-larger",
    "without-sparse",
    "with-reduced",
    "without-reduced",
    "top-reduced",
]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_multi_round_keeps_the_target_distribution(kind: str, name: str) -> None:
    parents = SHAPES[name]
    for width in (2, 3) if len(parents) < 5 else (2,):
        if "top" in kind and max(parents.count(p) for p in parents) > width:
            continue  # there are not so many distinct ids
        shape = Walker(parents, width)
        target, drafter = make_case(kind, shape)
        assert total_variation(target, shape, drafter, multi_round) < 1e-12


@pytest.mark.parametrize("name", ["three", "fork", "shuffled"])
@pytest.mark.parametrize("kind", KINDS)
def test_following_the_targets_own_draws_keeps_its_distribution(kind: str, name: str) -> None:
    """Sample-match needs no q and is right whatever was drafted; two blocks as well."""
    parents = SHAPES[name]
    for width in (2, 3) if len(parents) < 4 else (2,):
        if "top" in kind and max(parents.count(p) for p in parents) > width:
            continue
        shape = Walker(parents, width)
        target, drafter = make_case(kind, shape, seed=2)
        assert total_variation(target, shape, drafter, None) < 1e-12


def test_drawing_once_more_after_the_path_is_caught(monkeypatch) -> None:
    """The token drawn at the path's last row is the next one; a fresh one gives others too much."""

    def redrawn(tokens, drafts, tree):
        result, path = follow(tokens, drafts, tree)
        last = result.num_accepted[:, None]
        fresh = tokens[:, :1].flip(0)  # of all draws of all rows: some other one
        return result._replace(tokens=result.tokens.scatter(1, last, fresh)), path

    shape = Walker(SHAPES["fork"], 2)
    target, drafter = make_case("with", shape, seed=2)
    assert total_variation(target, shape, drafter, None) < 1e-12
    monkeypatch.setattr("tests.verify.tree_enumeration.follow", redrawn)
    assert total_variation(target, shape, drafter, None) > 1e-3


def test_cases_are_what_they_say() -> None:
    """Exhausted rows, missing drafts and foreign ids do occur with a positive weight."""
    shape = Walker([-1, -1, -1], 3)
    drafts = make_case("without-exhausted", shape)[1](1, shape)
    assert ((drafts.tokens[..., 2] < 0) & (drafts.weight > 0)).any()
    drafts = make_case("without-larger", shape)[1](0, shape)
    assert ((drafts.tokens == 3).any(-1) & (drafts.weight > 0)).any()
    for kind in ("with", "without", "without-exhausted", "without-larger", "with-zeros"):
        weight = make_case(kind, shape)[1](1, shape).weight
        assert torch.allclose(weight.sum(1), torch.ones(3, dtype=torch.float64))


# What is easily done wrong. Each variant breaks the distribution in the case named beside it.


def only_first_children(p: Tensor, drafts: Tensor, q: DraftProbs, tree: TreeTables) -> RuleTerms:
    """Correct the last refusal as if one child had been tried."""
    terms = multi_round(p, drafts, q, tree)
    alone = multi_round(p, drafts.masked_fill(tree.ranks > 0, -1), q, tree)
    return terms._replace(correction=alone.correction)


def every_child_against_p(p: Tensor, drafts: Tensor, q: DraftProbs, tree: TreeTables) -> RuleTerms:
    """Forget the residual between siblings."""
    terms = multi_round(p, drafts, q, tree)
    assert isinstance(q, Tensor)
    parent_rows = p.gather(1, tree.parents[..., None].expand(-1, -1, p.shape[2]))
    at = drafts.clamp(0, p.shape[2] - 1)[..., None]
    chance = parent_rows.gather(2, at) / q.gather(2, at)
    return terms._replace(accept=torch.where(drafts < 0, 0.0, chance[..., 0].clamp(0, 1)))


def not_renormalised(p: Tensor, drafts: Tensor, q: DraftProbs, tree: TreeTables) -> RuleTerms:
    """Test the second of two children against a residual that does not sum to 1."""
    terms = multi_round(p, drafts, q, tree)
    first = torch.nn.functional.one_hot(drafts[:, 0], p.shape[2]) if q is None else q[:, 0]
    mass = (p[:, 0] - first).clamp(min=0).sum(-1)
    return terms._replace(accept=terms.accept * torch.stack([torch.ones_like(mass), mass], dim=1))


def raw_q(p: Tensor, drafts: Tensor, q: DraftProbs, tree: TreeTables) -> RuleTerms:
    """Report the eldest sibling's q for all, though they were drawn without replacement."""
    assert isinstance(q, Tensor)
    same = (tree.parents[:, :, None] == tree.parents[:, None, :]) & (tree.ranks == 0)[:, None]
    eldest = same.long().argmax(-1)
    return multi_round(p, drafts, q.gather(1, eldest[..., None].expand_as(q)), tree)


def own_row(p: Tensor, drafts: Tensor, q: DraftProbs, tree: TreeTables) -> RuleTerms:
    """Judge each node by its own row instead of its parent's."""
    rows = torch.arange(1, p.shape[1]).expand_as(tree.parents)
    moved = p.clone()
    moved[:, 0] = p.gather(1, rows[:, :1, None].expand(-1, -1, p.shape[2]))[:, 0]
    return multi_round(moved, drafts, q, tree)


def one_hot_for_all(p: Tensor, drafts: Tensor, q: DraftProbs, tree: TreeTables) -> RuleTerms:
    """Drop q, though the children were drawn from it: right only for what is drawn alone."""
    terms = multi_round(p, drafts, q, tree)
    return terms._replace(correction=multi_round(p, drafts, None, tree).correction)


def no_residual(p: Tensor, drafts: Tensor, q: DraftProbs, tree: TreeTables) -> RuleTerms:
    return multi_round(p, drafts, q, tree)._replace(correction=p)


def missing_counts_as_refused(
    p: Tensor, drafts: Tensor, q: DraftProbs, tree: TreeTables
) -> RuleTerms:
    """Let a draft that was not made take its q away all the same."""
    return multi_round(p, torch.where(drafts < 0, p.shape[2], drafts), q, tree)


WRONG: list[tuple[TreeRuleFn, str, str]] = [
    (only_first_children, "with", "pair"),
    (only_first_children, "top", "pair"),
    (every_child_against_p, "with", "pair"),
    (every_child_against_p, "without", "fork"),
    (not_renormalised, "with", "pair"),
    (not_renormalised, "top", "pair"),
    (raw_q, "without", "pair"),
    (own_row, "with", "fork"),
    (one_hot_for_all, "with", "pair"),
    (no_residual, "without", "pair"),
    (no_residual, "top", "fork"),
]


@pytest.mark.parametrize(
    ("rule", "kind", "name"), WRONG, ids=[f"{r.__name__}-{k}-{n}" for r, k, n in WRONG]
)
def test_wrong_rules_are_caught(rule: TreeRuleFn, kind: str, name: str) -> None:
    shape = Walker(SHAPES[name], 3)
    target, drafter = make_case(kind, shape, seed=1)
    assert total_variation(target, shape, drafter, multi_round) < 1e-12
    assert not total_variation(target, shape, drafter, rule) <= 1e-6


def test_siblings_must_be_tried_in_the_order_of_drawing() -> None:
    shape = Walker([-1, -1], 3)
    target, drafter = make_case("without", shape, seed=1)

    def swapped(n: int, asked: Walker) -> Drafts:
        """The terms of swapped children, given back in the places that the sums expect."""
        tokens, weight, q = drafter(n, asked)
        assert isinstance(q, Tensor)
        return Drafts(tokens.flip(-1), weight, q.flip(1))

    assert total_variation(target, shape, swapped, multi_round) > 1e-3


def test_a_draft_that_was_not_made_takes_nothing_away() -> None:
    shape = Walker([-1, -1], 3)
    target = random_tables(3, 5, 1)
    inner = drawn(random_tables(3, 5, 101), replacement=True)

    def unmade(n: int, asked: Walker) -> Drafts:
        tokens, weight, q = inner(n, asked)
        return Drafts(torch.cat([tokens[..., :1] * 0 - 1, tokens[..., 1:]], -1), weight, q)

    assert total_variation(target, shape, unmade, multi_round) < 1e-12
    assert total_variation(target, shape, unmade, missing_counts_as_refused) > 1e-3


def test_more_children_without_replacement_are_accepted_more_often() -> None:
    """p uniform over 4 ids, q = (0.7, 0.1, 0.1, 0.1): chance that some child is accepted."""
    q = torch.tensor([0.7, 0.1, 0.1, 0.1], dtype=torch.float64)
    target = [torch.full((4**n, 4), 0.25, dtype=torch.float64) for n in range(4)]
    draft = [q.expand(4**n, 4) for n in range(4)]
    shape = Walker([-1, -1, -1], 4)

    def accepted(replacement: bool) -> float:
        tokens, weight, reported = drawn(draft, replacement=replacement)(0, shape)
        rows = node_rows(target, 0, shape, tokens).flatten(0, 1)
        made = shape_tables(shape.parents, tokens.shape[1])
        refused = 1 - multi_round(rows, tokens[0], reported, made).accept
        return 1 - float((weight[0] * refused.prod(-1)).sum())

    assert accepted(replacement=False) > accepted(replacement=True) + 0.1


@pytest.mark.parametrize("replacement", [False, True])
def test_drawn_siblings_have_the_reported_distributions(replacement: bool) -> None:
    q = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64)
    n, c = 20_000, 4
    u = torch.rand(n, c, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    tokens, probs = draw_siblings(q.expand(n, 4), u, replacement=replacement)
    assert torch.equal(probs[:, 0], q.expand(n, 4))
    if replacement:
        assert torch.equal(probs, q.expand(n, c, 4))
    else:
        assert torch.equal(probs, without_replacement(q.expand(n, 4), tokens))
        assert (tokens[:, 3] == -1).all()  # three ids were all there was
        assert (probs[:, 3] == 0).all()
        assert torch.equal(tokens[:, :3].sort(-1).values, torch.arange(3).expand(n, 3))
    for child in range(3):
        for elder in range(3):
            rows = tokens[:, 0] == elder if child else torch.ones(n, dtype=torch.bool)
            count = tokens[rows, child].clamp(min=0).bincount(minlength=4) / rows.sum()
            mean = probs[rows, child].mean(0)
            assert (count - mean).abs().max() < 5 * (0.25 / float(rows.sum())) ** 0.5
