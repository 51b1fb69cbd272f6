"""The whole loop, sampled, with trees: three tokens against the target's exact probabilities."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from specmla import (
    DeepseekConfig,
    DeepseekForCausalLM,
    DraftProposal,
    MLAConfig,
    SamplingParams,
    Stream,
    uniforms,
)
from specmla.verify.sibling_draws import draw_siblings
from tests.e2e.conftest import make_step, run

W, PROMPT = 7, [1, 5, 2]
PARENTS = [2, -1, -1, 2]  # two children of the anchor, two of the second one, out of order
TOTAL, BATCH = 6144, 512


@pytest.fixture(scope="module")
def target() -> DeepseekForCausalLM:
    torch.manual_seed(11)
    attention = MLAConfig(
        hidden_size=16,
        num_heads=2,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
    )
    made = DeepseekForCausalLM(DeepseekConfig(attention, 1, W, 32, 64))
    for weight in made.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.4)
    return made.eval()


class TableTrees:
    """Draws the children of a node from a table by the node's token (or takes the likeliest)."""

    vocab_size = W

    def __init__(self, kind: str) -> None:
        self.kind = kind
        generator = torch.Generator().manual_seed(2)
        self.table = torch.softmax(torch.randn(W, W, generator=generator).double() * 1.2, -1)

    def propose(self, requests) -> DraftProposal:
        b = len(requests)
        # A smaller budget ends the tree: its shape may not depend on what is drawn.
        count = 4 if min(r.num_nodes for r in requests) >= 4 else 0
        seeds = torch.tensor([r.sampling.seed for r in requests])
        anchors = torch.tensor([len(r.tokens) - 1 for r in requests])
        last = torch.tensor([r.tokens[-1] for r in requests])
        top, top_probs = self.children(last, seeds, anchors, 0)
        below, below_probs = self.children(top[:, 1], seeds, anchors, 3)
        tokens = torch.stack([below[:, 0], top[:, 0], top[:, 1], below[:, 1]], dim=1)[:, :count]
        probs = None
        if self.kind != "top":
            parts = [below_probs[:, 0], top_probs[:, 0], top_probs[:, 1], below_probs[:, 1]]
            probs = torch.stack(parts, dim=1)[:, :count]
        names = tuple(r.request_id for r in requests)
        return DraftProposal(names, (count,) * b, tokens, probs, (PARENTS[:count],) * b)

    def children(self, last: Tensor, seeds: Tensor, anchors: Tensor, row: int):
        q = self.table[last]
        if self.kind == "top":
            return q.topk(2).indices, None
        rows, nodes = torch.tensor([row, row]), torch.tensor([0, 1])
        u = uniforms(seeds, anchors, rows, Stream.DRAFT, nodes)
        drawn = draw_siblings(q, u, replacement=self.kind == "with")
        if self.kind == "raw":  # wrong: drawn without replacement, reported as drawn from q
            return drawn.tokens, q[:, None].expand(-1, 2, -1)
        return drawn

    def observe(self, results, hidden=None) -> None:
        pass

    def reset(self, request_id) -> None:
        pass


def exact(target: DeepseekForCausalLM, temperature: float) -> Tensor:
    """Give p(t1, t2, t3) [W**3]."""
    triples = torch.tensor(list(itertools.product(range(W), repeat=3)))
    whole = torch.cat([torch.tensor(PROMPT).expand(len(triples), -1), triples], dim=1)
    with torch.no_grad():
        logits = target.forward_full(whole)[:, len(PROMPT) - 1 : -1].double()
    probs = torch.softmax(logits / temperature, -1)
    return probs.gather(2, triples[..., None])[..., 0].prod(1)


def counts(target, kind: str, rule: str, temperature: float) -> tuple[Tensor, list]:
    found, history = torch.zeros(W**3, dtype=torch.int64), []
    for start in range(0, TOTAL, BATCH):
        batch = {
            i: (PROMPT, SamplingParams(temperature, seed=i, max_tokens=6))
            for i in range(start, start + BATCH)
        }
        step = make_step(target, 8, 2100, rule=rule)
        tokens, results = run(target, batch, TableTrees(kind), 4, step)
        history += [r for r in itertools.chain(*results) if r.num_drafts]
        for new in tokens.values():
            found[new[0] * W * W + new[1] * W + new[2]] += 1
    return found, history


def p_value(observed: Tensor, expected: Tensor) -> float:
    """Chance of a chi-square as large; cells expected below 5 times are pooled."""
    large = expected >= 5
    o = torch.cat([observed[large].double(), observed[~large].sum()[None].double()])
    e = torch.cat([expected[large], expected[~large].sum()[None]])
    chi = ((o - e) ** 2 / e).sum()
    freedom = torch.tensor((len(e) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, chi / 2))


@pytest.mark.parametrize(
    ("kind", "rule", "temperature"),
    [
        ("without", "token_level", 1.0),
        ("with", "token_level", 0.8),
        ("top", "token_level", 1.0),
        ("without", "sample_match", 1.0),
        ("without", "block", 0.8),
    ],
)
def test_three_tokens_follow_the_target(target, kind, rule, temperature):
    found, history = counts(target, kind, rule, temperature)
    assert p_value(found, exact(target, temperature) * TOTAL) > 1e-4
    lengths = [r.num_accepted for r in history]
    assert {0, 1, 2} == set(lengths)
    assert sum(r.path == (1,) for r in history) > TOTAL / 100  # the childless child of the anchor
    assert sum(r.path == (2, 3) for r in history) > 10  # the younger grandchild


def test_a_raw_q_for_siblings_without_replacement_is_noticed(target):
    found, _ = counts(target, "raw", "token_level", 1.0)
    assert p_value(found, exact(target, 1.0) * TOTAL) < 1e-4
