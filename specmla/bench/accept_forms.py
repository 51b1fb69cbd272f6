"""What `bench accept` times: forms of acceptance, and the inputs of one at any size."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specmla.errors import require
from specmla.staging import send_arrays
from specmla.verify.sampling import SamplingBatch, SamplingParams
from specmla.verify.tree import (
    MAX_DRAFT_NODES,
    DraftTree,
    TreeTables,
    keep_nodes,
    tree_arrays,
    tree_tables,
)

SAMPLINGS = {
    "greedy": SamplingParams(0.0),
    "plain": SamplingParams(1.0),
    "top-k": SamplingParams(1.0, 50),
    "top-p": SamplingParams(1.0, 0, 0.9),
    "top-k+top-p": SamplingParams(1.0, 50, 0.9),
    "min-p": SamplingParams(1.0, min_p=0.02),
}
"""Sampling parameters that are timed, the same for all requests of a step."""

SHAPES = ("chain", "tree")


@dataclass(frozen=True)
class AcceptOptions:
    """What all rows of a run share.

    Attributes:
        requests, drafts, vocab: B, K and W.
        nodes: drafts of each tree, binary from the anchor on.
        spread: standard deviation of the normal logits.
        dtype: of the logits; q is float32.
        device: where it runs.
        reps: timed repetitions, fewer of calls that would take longer than `row_seconds` together.
        row_seconds: see `reps`.
        seed: of the data.
    """

    requests: int
    drafts: int
    vocab: int
    nodes: int
    spread: float
    dtype: torch.dtype
    device: torch.device
    reps: int
    row_seconds: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse trees that no mask holds."""
        fits = 1 <= self.nodes <= MAX_DRAFT_NODES
        found = [f"nodes is {self.nodes}, accepted are 1 to {MAX_DRAFT_NODES}"]
        require([] if fits else found, "accept")


class Form(NamedTuple):
    """One way to decide a step.

    Attributes:
        shape: one of `SHAPES`.
        rule: name of a rule; `token_level` of trees is multi-round.
        sampling: one of `SAMPLINGS`.
        dense: whether drafts come with a q over the vocabulary, else they are one-hot.
    """

    shape: str
    rule: str
    sampling: str
    dense: bool

    @property
    def q(self) -> str:
        """Name what drafts come with."""
        return "dense" if self.dense else "one-hot"

    @property
    def is_lossy(self) -> bool:
        """Whether its rule is one that no kernels know, and that takes chains alone."""
        return self.rule.startswith("lossy")

    @property
    def compiled(self) -> tuple[str, str, bool, bool]:
        """Tell forms whose kernels differ."""
        filtered = self.sampling not in ("greedy", "plain")
        return self.shape, self.rule, self.dense, filtered


def list_forms(
    shapes: Iterable[str], rules: Iterable[str], samplings: Iterable[str], qs: Iterable[str]
) -> Iterator[Form]:
    """Give all combinations that are of their own.

    Greedy steps are the same under each rule and look at no q; sample-match looks at none; trees
    under block verification are those under `token_level`. Lossy rules take chains and look at no q
    either; what filters take is the same under each rule in torch.
    """
    for rule, shape, sampling, q in itertools.product(rules, shapes, samplings, qs):
        form = Form(shape, rule, sampling, q == "dense")
        same_greedy = sampling == "greedy" and (form.dense or rule != "token_level")
        no_q = rule == "sample_match" and form.dense
        same_lossy = form.is_lossy and (shape, sampling, q) != ("chain", "plain", "one-hot")
        if not (same_greedy or no_q or same_lossy or (shape == "tree" and rule == "block")):
            yield form


class Data(NamedTuple):
    """One copy of a step's inputs, of chains if `tree` is None."""

    logits: Tensor
    table: Tensor
    drafts: Tensor
    q: Tensor | None
    positions: Tensor
    tree: TreeTables | None

    @property
    def nbytes(self) -> int:
        """Count what acceptance must read: logits and q."""
        return self.logits.nbytes + (0 if self.q is None else self.q.nbytes)


def make_batch(form: Form, options: AcceptOptions) -> SamplingBatch:
    """Build the sampling parameters of a form, a seed for each request."""
    one = SAMPLINGS[form.sampling]
    params = [dataclasses.replace(one, seed=i) for i in range(options.requests)]
    return SamplingBatch.build(params, options.device)


def make_data(form: Form, options: AcceptOptions, seed: int) -> Data:
    """Draw logits and a q that lies near the target's distribution.

    Drafts are drawn from q; one-hot siblings of a tree are its likeliest ids.
    """
    b, width, device = options.requests, options.vocab, options.device
    k = options.drafts if form.shape == "chain" else options.nodes
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    logits = (normal(b, k + 1, width) * options.spread).to(options.dtype)
    tree = None if form.shape == "chain" else _make_trees(b, k, device)
    near = logits.float() + normal(b, k + 1, width) / 2
    if tree is None:
        near = near[:, :k]
    else:  # siblings share what they are drawn from
        near = near.gather(1, tree.parents[..., None].expand(-1, -1, width))
    q = torch.softmax(near, -1)
    drafts = torch.zeros(b, k, dtype=torch.int64, device=device)
    if tree is not None and not form.dense:
        drafts = torch.topk(q, min(2, width), -1).indices.gather(2, tree.ranks[..., None])[..., 0]
    elif k:
        drafts = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(b, k)
    table = torch.arange(b * (k + 1), device=device).view(b, k + 1)
    positions = torch.arange(b, device=device) * 13 + 100
    return Data(logits.flatten(0, 1), table, drafts, q if form.dense else None, positions, tree)


def _make_trees(requests: int, nodes: int, device: torch.device) -> TreeTables:
    kept = keep_nodes([(node - 2) // 2 for node in range(nodes)], nodes, nodes)
    trees: list[DraftTree | None] = [kept] * requests
    counts = [nodes] * requests
    return tree_tables(send_arrays(tree_arrays(trees, counts, nodes), device), trees, counts)
