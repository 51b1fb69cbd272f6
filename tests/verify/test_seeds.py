"""Same request, same seed, same tokens: whatever its batch mates, for two rules whatever drafts.

The model is a fixed function of the tokens before a row, so logits are equal to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from specmla import SamplingParams, Stream, sample, uniforms
from specmla.verify.rules.registry import LOSSLESS
from specmla.verify.sibling_draws import draw_siblings
from tests.verify.scripted import W, make_step, model, run

PARAMS = {
    "greedy": SamplingParams(seed=11),
    "plain": SamplingParams(1.0, seed=11),
    "filtered": SamplingParams(0.8, 9, 0.95, seed=11, min_p=0.01),
    "penalised": SamplingParams(1.2, seed=11, frequency_penalty=0.8, repetition_penalty=1.3),
}
MATES = [
    SamplingParams(seed=11),
    SamplingParams(1.5, seed=11),
    SamplingParams(0.6, 3, 0.7, seed=2),
    SamplingParams(0.9, seed=3, min_p=0.2, logprobs="raw"),
    SamplingParams(1.0, seed=11, presence_penalty=1.0, banned_token_ids=(1, 2)),
]


def draw_drafts(tokens: list[int], seed: int, count: int) -> tuple[list[int], Tensor]:
    """Draft as an honest model does: another fixed function, its own stream of numbers."""
    drafts: list[int] = []
    rows = []
    where = torch.tensor([len(tokens) - 1])
    for j in range(count):
        q = torch.softmax(model([*tokens, *drafts]).double() + model([j, *tokens[-2:]]) / 2, -1)
        u = uniforms(torch.tensor([seed]), where, torch.tensor([j]), Stream.DRAFT)[:, 0]
        drafts.append(int(sample(q[None], u)))
        rows.append(q)
    return drafts, torch.stack(rows)


def tokens_of(
    rule: str, requests: Mapping[str, tuple[SamplingParams, int]], steps: int = 6
) -> list[int]:
    """Run requests together, each with its own number of drafts; give what "x" emitted."""
    step, out = make_step(rule), []
    for name, (params, _) in requests.items():
        prompt = [3, 1, 4] if name == "x" else [5, 9, 2, 6]
        step.add(name, prompt, params)
    for _ in range(steps):
        drafts, probs = {}, {}
        for wanted in step.draft_requests({n: k for n, (_, k) in requests.items() if k}):
            name, seed = str(wanted.request_id), wanted.sampling.seed
            if wanted.num_drafts:
                assert seed is not None
                drafts[name], probs[name] = draw_drafts(
                    list(wanted.tokens), seed, wanted.num_drafts
                )
        out += run(step, drafts, probs)["x"].new_tokens
    return out


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("kind", PARAMS)
def test_batch_mates_do_not_matter(rule: str, kind: str) -> None:
    alone = tokens_of(rule, {"x": (PARAMS[kind], 3)})
    for turn in range(3):
        mates = {f"m{i}": (MATES[(i + turn) % len(MATES)], i) for i in range(2 + turn)}
        before, after = dict(list(mates.items())[:turn]), dict(list(mates.items())[turn:])
        assert tokens_of(rule, {**before, "x": (PARAMS[kind], 3), **after}) == alone


TREES = [[-1], [-1, -1, 0, 0, 1], [-1, -1, -1], [-1, 0, 1, 2, 0, 1, -1], [-1, 0, -1, 2]]


def draw_tree(tokens: list[int], seed: int, parents: list[int]) -> tuple[list[int], Tensor]:
    """Draw siblings without replacement, by numbers of their parent and rank."""
    nodes, q = [-1] * len(parents), torch.zeros(len(parents), W, dtype=torch.float64)
    before = {-1: tokens}
    for parent in dict.fromkeys(parents):
        children = [c for c, p in enumerate(parents) if p == parent]
        history = before[parent]
        row = torch.softmax(model(history).double() + model([9, *history[-2:]]) / 2, -1)
        where, n = torch.tensor([len(tokens) - 1]), torch.full((len(children),), parent + 1)
        u = uniforms(torch.tensor([seed]), where, n, Stream.DRAFT, torch.arange(len(children)))
        drawn = draw_siblings(row[None], u)
        q[children] = drawn.probs[0]
        for child, token in zip(children, drawn.tokens[0].tolist(), strict=True):
            nodes[child], before[child] = token, [*history, token]
    return nodes, q


def tokens_of_trees(
    rule: str, requests: Mapping[str, tuple[SamplingParams, list[int]]]
) -> tuple[list[int], int]:
    """Run requests together, each with its own tree, none or a chain; give what "x" emitted, and
    how many of its nodes stood."""
    step, out, stood = make_step(rule), list[int](), 0
    for name, (params, _) in requests.items():
        step.add(name, [3, 1, 4] if name == "x" else [5, 9, 2, 6], params)
    for _ in range(6):
        drafts, probs, parents = {}, {}, {}
        for wanted in step.draft_requests({n: len(t) for n, (_, t) in requests.items() if t}):
            name, seed = str(wanted.request_id), wanted.sampling.seed
            tree = requests[name][1]
            if wanted.num_nodes >= len(tree):
                assert seed is not None
                drafts[name], probs[name] = draw_tree(list(wanted.tokens), seed, tree)
                if tree != list(range(-1, len(tree) - 1)):
                    parents[name] = tree
        result = run(step, drafts, probs, parents)["x"]
        out += result.new_tokens
        stood += result.num_accepted
    return out, stood


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("kind", ["plain", "penalised"])
@pytest.mark.parametrize("tree", [1, 3])
def test_trees_of_batch_mates_do_not_matter(rule: str, kind: str, tree: int) -> None:
    """Narrower and wider trees, chains and requests without drafts beside a tree."""
    mine = (PARAMS[kind], TREES[tree])
    alone = tokens_of_trees(rule, {"x": mine})
    assert alone[1] > 0
    for turn in range(3):
        mates = {
            f"m{i}": (MATES[(i + turn) % len(MATES)], [[], [-1, 0, 1], *TREES][(i + turn) % 7])
            for i in range(2 + turn)
        }
        before, after = dict(list(mates.items())[:turn]), dict(list(mates.items())[turn:])
        assert tokens_of_trees(rule, {**before, "x": mine, **after}) == alone


@pytest.mark.parametrize("rule", LOSSLESS)
def test_the_seed_matters_and_nothing_else_is_random(rule: str) -> None:
    one = tokens_of(rule, {"x": (SamplingParams(1.0, seed=1), 3)})
    assert tokens_of(rule, {"x": (SamplingParams(1.0, seed=1), 3)}) == one
    assert tokens_of(rule, {"x": (SamplingParams(1.0, seed=2), 3)}) != one


@st.composite
def histories(draw: st.DrawFn) -> list[list[int]]:
    chain = st.lists(st.integers(-1, W + 1), max_size=5)
    return draw(st.lists(chain, min_size=8, max_size=8))


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        ("token_level", "greedy"),
        ("block", "greedy"),
        *(("sample_match", kind) for kind in PARAMS),
    ],
)
@hypothesis.given(histories())
@hypothesis.settings(max_examples=8)
def test_greedy_and_sample_match_do_not_depend_on_drafts(
    rule: str, kind: str, drafts: list[list[int]]
) -> None:
    """Any drafts, of any number, that change from step to step: those of nobody's model too."""
    plain = tokens_of(rule, {"x": (PARAMS[kind], 0)}, steps=24)
    step, out = make_step(rule), []
    step.add("x", [3, 1, 4], PARAMS[kind])
    out += run(step)["x"].new_tokens
    for turn, chain in enumerate(drafts):
        if turn % 2:  # every other time begin with what will come
            chain = [*plain[len(out) : len(out) + 2], *chain][:5]
        out += run(step, {"x": chain} if chain else None)["x"].new_tokens
    assert out == plain[: len(out)]


def test_block_and_token_level_do_depend_on_drafts() -> None:
    """What the test above would miss if it compared nothing."""
    for rule in ("token_level", "block"):
        plain = tokens_of(rule, {"x": (PARAMS["plain"], 0)}, steps=12)
        drafted = tokens_of(rule, {"x": (PARAMS["plain"], 3)}, steps=12)
        assert drafted[:12] != plain
