"""Trees under a constraint: every node masked by its own path, nothing heard before it is emitted,
the output exactly the constrained target's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest
import torch
from torch import Tensor

from specmla import DraftProposal, NumericsError, SamplingParams, VerifyStep
from specmla.verify.accept import Acceptance
from specmla.verify.processors.apply import apply_processors, chain_history
from specmla.verify.processors.constraint import Drafted, constraint_rows
from specmla.verify.processors.dead_ends import cut_at_dead_ends
from specmla.verify.processors.tables import Masks, build_tables
from specmla.verify.rules.terms import RuleTerms
from specmla.verify.sampling import SamplingBatch, processed_probs
from specmla.verify.sparse import DraftProbs
from specmla.verify.tree import TreeTables, node_parents
from specmla.verify.tree_rules import TreePath, multi_round
from tests.verify.scripted import W, make_step, model, run
from tests.verify.test_dead_ends import END, WORDS, Words
from tests.verify.test_fused import make_step as make_fused_step
from tests.verify.test_processors import State
from tests.verify.test_step_processors import Brackets
from tests.verify.test_tree_enumeration import SHAPES, drawn, fixed, unwritten
from tests.verify.tree_enumeration import (
    DrafterFn,
    Drafts,
    Tables,
    Walker,
    block,
    continued,
    random_tables,
)


def allowed_tables(width: int, depth: int, seed: int) -> list[Tensor]:
    """What a grammar allows after each history [W**n, W], one id at least."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for n in range(depth):
        rows = torch.rand(width**n, width, generator=generator) < 0.6
        rows[torch.arange(width**n), torch.randint(width, (width**n,), generator=generator)] = True
        found.append(rows)
    return found


class Grammar:
    """Stands after a history of n tokens, by its number; hears of nothing."""

    def __init__(self, allowed: list[Tensor], n: int, history: int) -> None:
        self.allowed, self.n, self.history = allowed, n, history

    def masks(self, drafts: Sequence[int]) -> Tensor:
        rows, at = [], self.history
        for j, draft in enumerate([*drafts, -1]):
            rows.append(self.allowed[self.n + j][at])
            if draft < 0 or not rows[-1][draft]:
                break
            at = at * rows[-1].shape[0] + draft
        return torch.stack(rows)

    def advance(self, tokens: Sequence[int]) -> None:
        raise AssertionError("nothing was emitted")


class Masked:
    """`multi_round` over what the processors make of the target's own rows."""

    def __init__(self, allowed: list[Tensor], shape: Walker, parents: Sequence[int]) -> None:
        self.allowed, self.shape, self.parents, self.n = allowed, shape, parents, 0

    def watch(self, drafter: DrafterFn) -> DrafterFn:
        def propose(n: int, shape: Walker) -> Drafts:
            self.n = n
            return drafter(n, shape)

        return propose

    def __call__(self, p: Tensor, drafts: Tensor, q: DraftProbs, tree: TreeTables) -> RuleTerms:
        b, rows, width = p.shape
        each = b // width**self.n
        states = [
            State(SamplingParams(1.0), [], [], Grammar(self.allowed, self.n, i // each))
            for i in range(b)
        ]
        made = [Drafted(row, self.parents) for row in drafts.tolist()]
        tables = build_tables(states, made, rows, width, p.device)
        logits = apply_processors(p.nan_to_num(1.0).log(), tables, chain_history(drafts))
        batch = SamplingBatch.build([SamplingParams(1.0)] * b, "cpu")
        return multi_round(processed_probs(logits, batch).probs, drafts, q, tree)


def variation(kind: str, parents: list[int], width: int, masked_as: Sequence[int]) -> float:
    """Compare two constrained blocks with the constrained target, as `total_variation` does."""
    shape = Walker(parents, width)
    total = 2 * (shape.depth + 1)
    raw = random_tables(width, total + 1, 0)
    allowed = allowed_tables(width, total + 1 + len(parents), 7)
    target: Tables = [
        p * a / (p * a).sum(-1, keepdim=True) for p, a in zip(raw, allowed, strict=False)
    ]
    draft = random_tables(width, total + 1, 100)
    drafters = {
        "with": drawn(draft, replacement=True),
        "without": drawn(draft, replacement=False),
        "top": fixed(draft, distinct=True),
        "unwritten": unwritten(drawn(draft, replacement=True)),
    }
    rule = Masked(allowed, shape, masked_as)
    drafter = rule.watch(drafters[kind])
    got = torch.zeros(width**total, dtype=torch.float64)
    for m1, first in enumerate(block(raw, shape, drafter, rule, 0), start=1):
        for m2, second in enumerate(block(raw, shape, drafter, rule, m1), start=1):
            got += continued(target, (first[0][:, None] * second).flatten(), m1 + m2, total)
    want = continued(target, torch.ones(1, dtype=torch.float64), 0, total)
    return 0.5 * (got - want).abs().sum().item()


@pytest.mark.parametrize("name", ["pair", "chain", "fork", "shuffled"])
@pytest.mark.parametrize("kind", ["with", "without", "top", "unwritten"])
def test_constrained_trees_keep_the_constrained_distribution(kind: str, name: str) -> None:
    parents = SHAPES[name]
    for width in (2, 3) if len(parents) < 4 else (2,):
        assert variation(kind, parents, width, node_parents(parents)) < 1e-12


def test_masks_of_other_paths_are_caught() -> None:
    """A fork masked as if its nodes followed each other, and with the parents of its mirror."""
    fork = SHAPES["fork"]
    assert variation("with", fork, 2, range(4)) > 1e-2
    assert variation("with", fork, 2, node_parents([-1, -1, 1, 1])) > 1e-2


class Digits:
    """Allows after each history the ids that divide its sum and 1; says what it was asked."""

    def __init__(self, heard: list[int]) -> None:
        self.heard, self.asked = heard, []

    def row(self, before: Sequence[int]) -> Tensor:
        total = sum(self.heard) + sum(before)
        return torch.tensor([t < 2 or total % t == 0 for t in range(W)])

    def masks(self, drafts: Sequence[int]) -> Tensor:
        self.asked.append(tuple(drafts))
        return torch.stack([self.row(drafts[:j]) for j in range(len(drafts) + 1)])

    def advance(self, tokens: Sequence[int]) -> None:
        raise AssertionError("nothing was emitted")


@pytest.mark.parametrize("seed", range(8))
def test_each_row_has_the_mask_of_its_path(seed: int) -> None:
    rng = Random(seed)
    count = rng.randrange(1, 12)
    grown = [rng.randrange(-1, node) for node in range(count)]
    order = rng.sample(range(count), count)
    parents = [0] * count
    for node, parent in enumerate(grown):
        parents[order[node]] = 0 if parent < 0 else order[parent] + 1
    tokens = [rng.choice([-1, W, *range(W)]) for _ in range(count)]
    digits = Digits([3, 9])
    got = constraint_rows(digits, Drafted(tokens, parents), W, count + 3)
    asked = set()
    for row in range(count + 3):
        path, at = [], row if row <= count else 0
        while at:
            path.insert(0, tokens[at - 1])
            at = parents[at - 1]
        if row <= count and all(0 <= t < W for t in path):
            assert torch.equal(got[row], digits.row(path))
            asked |= {tuple(path)} - {()}
        elif row > count:
            assert got[row].all(), "no draft has this row"
    assert all(a == () or a in asked for a in digits.asked)
    assert len(digits.asked) == len(set(digits.asked)) <= count


def test_min_tokens_count_along_the_path() -> None:
    """Two siblings at depth 1 and a child of the first: bans end by depth, not by row."""
    state = State(SamplingParams(1.0, min_tokens=2, stop_token_ids=(5,)), [1], [], Digits([0]))
    drafted = Drafted([1, 2, 3], (0, 0, 1))
    tables = build_tables([state], [drafted], 4, W, torch.device("cpu"))
    assert tables.masks is not None
    assert tables.masks.allowed[0, :, 5].tolist() == [False, False, False, False]
    state = State(SamplingParams(1.0, min_tokens=2, stop_token_ids=(1,)), [1], [], Digits([0]))
    tables = build_tables([state], [drafted], 4, W, torch.device("cpu"))
    assert tables.masks is not None
    assert tables.masks.allowed[0, :, 1].tolist() == [False, False, False, True]


Trees = dict[str, tuple[list[int], list[int]]]


def run_trees(step: VerifyStep, trees: Trees):
    """Take one step in which each request has tokens and parents (-1 the anchor) of a tree."""
    width = max(len(tokens) for tokens, _ in trees.values())
    tokens = torch.tensor([t + [-1] * (width - len(t)) for t, _ in trees.values()])
    counts = tuple(len(t) for t, _ in trees.values())
    proposal = DraftProposal(
        tuple(trees), counts, tokens, parents=tuple(tuple(p) for _, p in trees.values())
    )
    plan = step.plan(proposal)
    logits = []
    for b, request in enumerate(plan.requests):
        rows: list[list[int]] = [list(request.state.tokens)]
        parents = request.tree.parents if request.tree else range(request.num_drafts)
        for node in range(request.num_drafts):
            rows.append([*rows[parents[node]], int(plan.drafts[b, node])])
        logits += [model(row) for row in rows]
    results = step.commit(plan, step.verify(plan, torch.stack(logits)))
    return {str(r.request_id): r for r in results}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", ["token_level", "block", "sample_match"])
def test_constraint_hears_of_the_emitted_path_only(rule: str, temperature: float) -> None:
    step, brackets = make_step(rule), Brackets()
    step.add("a", [1, 2, 3], SamplingParams(temperature, seed=3), brackets)
    step.add("b", [4, 5], SamplingParams(temperature, seed=4))
    emitted = [*run(step)["a"].new_tokens]
    accepted = 0
    shape = [-1, -1, 0, 0, 1, 1]
    for turn in range(12):
        drafts = [[1, 2, 1, 2, 1, 2], [9, 1, 1, 2, 2, 1], [2, 1, 1, W + 1, 2, 1]][turn % 3]
        brackets.asked.clear()
        result = run_trees(step, {"a": (drafts, shape), "b": ([3, 4], [-1, -1])})["a"]
        emitted += result.new_tokens
        accepted += result.num_accepted
        assert brackets.heard == emitted
        assert len(brackets.asked) <= 4, "a path for each leaf"
    assert accepted > 3
    assert set(emitted) == {1, 2}
    step.blocks.check_integrity()


FOREST: list[tuple[list[int], list[int]]] = [
    ([3, 6, 4, 5, END, 4], [-1, -1, 0, 0, 1, 3]),
    ([6, 3, END, 3, 4, 5], [-1, -1, 0, 0, 1, 1]),
    ([4, 5, END, END, 4, 7], [-1, -1, 0, 0, 1, 3]),
    ([7, 3, END, END], [-1, 0, 1, -1]),
]
"""The words' own branches, their ends, and what may not follow."""


def decode(step: VerifyStep, params: SamplingParams, trees: list) -> tuple[int, ...]:
    """Give what request a emits beside another one, until it ends or there is nothing to emit."""
    words = Words()
    step.add("a", [1, 2], params, words)
    step.add("b", [2, 1], SamplingParams())
    for one in [None, *trees, *[None] * 6]:
        try:
            done = run_trees(step, {"a": one, "b": ([1, 2], [-1, -1])}) if one else run(step)
            if done["a"].finish_reason:
                break
        except NumericsError:  # nothing is allowed and the word had no end
            break
    step.blocks.check_integrity()
    return tuple(words.heard)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", ["token_level", "block", "sample_match"])
def test_trees_change_no_word(rule: str, temperature: float) -> None:
    seen = set()
    for seed in range(4):
        params = SamplingParams(temperature, seed=seed, stop_token_ids=(END,), logprobs="raw")
        plain = decode(make_step(rule), params, [])
        seen.add(plain)
        for first in FOREST:
            got = decode(make_step(rule), params, [first, FOREST[2]])
            assert got in WORDS
            if temperature == 0 or rule == "sample_match":
                assert got == plain
    assert len(seen) > 1 or temperature == 0


@pytest.mark.parametrize("rule", ["token_level", "sample_match"])
def test_fused_decisions_end_paths_as_well(rule: str) -> None:
    pytest.importorskip("triton")
    from specmla.kernels.prims import INTERPRETED

    if not INTERPRETED:
        pytest.skip("the scripted step lives on the CPU, where Triton only interprets")
    for seed, tree in enumerate(FOREST[:2]):
        params = SamplingParams(1.0, seed=seed, stop_token_ids=(END,))
        got = decode(make_fused_step(rule, "triton"), params, [tree])
        assert got == decode(make_step(rule), params, [tree])


def test_words_have_their_chances_with_trees() -> None:
    """Every word by its exact chance, 3000 seeds: chi-square at p > 1e-4 (4 - 1 degrees: 21.1)."""
    chances = {}
    for word in WORDS:
        chance = 1.0
        for j, token in enumerate(word):
            logits = torch.full((W,), -torch.inf)
            for other in WORDS:
                if other[:j] == word[:j] and len(other) > j:
                    logits[other[j]] = model([1, 2, *word[:j]])[other[j]]
            chance *= torch.softmax(logits, -1)[token].item()
        chances[word] = chance
    assert sum(chances.values()) == pytest.approx(1, abs=1e-6)
    count = 3000
    got: Counter[tuple[int, ...]] = Counter()
    for start in range(0, count, 20):
        step = make_step("token_level")
        words = {f"r{i}": Words() for i in range(start, start + 20)}
        for i, (name, one) in enumerate(words.items(), start=start):
            step.add(name, [1, 2], SamplingParams(1.0, seed=i, stop_token_ids=(END,)), one)
        run(step)
        for tree in (FOREST[0], FOREST[1], FOREST[2]):
            left = [n for n, w in words.items() if tuple(w.heard) not in WORDS]
            for name in set(step.active) - set(left):
                step.remove(name)
            if left:
                run_trees(step, dict.fromkeys(left, tree))
        got.update(tuple(w.heard) for w in words.values())
    assert set(got) <= set(WORDS)
    odd = sum((got[w] - count * c) ** 2 / (count * c) for w, c in chances.items() if count * c > 5)
    assert odd < 21.1, (got, chances)


def test_a_path_is_cut_before_the_first_dead_end() -> None:
    """Rows 2 -> 5 -> 1 were accepted; row 5 is dead in request 0, row 4 (not met) in request 1."""
    path = TreePath(
        torch.tensor([[2, 5, 1, -1, -1]] * 3), torch.tensor([3] * 3), torch.tensor([1] * 3)
    )
    drafts = torch.tensor([[11, 12, 13, 14, 15]] * 3)
    tokens = torch.tensor([[12, 15, 11, 7, -1, -1]] * 3)
    found = Acceptance(
        path.num_accepted, torch.tensor([7] * 3), tokens, torch.tensor([True, False, False])
    )
    dead = torch.zeros(2, 6, dtype=torch.bool)
    dead[0, [5, 1]], dead[1, 4] = True, True
    masks = Masks(torch.tensor([0, 1]), torch.ones(2, 6, 16, dtype=torch.bool), dead)
    cut, short = cut_at_dead_ends(found, path, drafts, masks)
    assert short is not None
    assert cut.tokens.tolist() == [[12, 15, -1, -1, -1, -1], *tokens.tolist()[1:]]
    assert cut.next_token.tolist() == [15, 7, 7]
    assert cut.num_accepted.tolist() == short.num_accepted.tolist() == [1, 3, 3]
    assert cut.flagged.tolist() == [False, False, False]
    assert short.rows.tolist() == [[2, -1, -1, -1, -1], *path.rows.tolist()[1:]]
    assert short.end.tolist() == [2, 1, 1]
    chain, none = cut_at_dead_ends(found, None, drafts, masks)
    assert none is None
    assert chain.num_accepted.tolist() == [0, 3, 3], "rows 1 to 3 of a chain: the first is dead"
    assert chain.tokens[0].tolist() == [12, -1, -1, -1, -1, -1]
