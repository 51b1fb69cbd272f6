"""Times what trees add after the model: acceptance on W ids, and the move of a path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specmla.bench.timing import time_calls
from specmla.cache.latent import LatentCache
from specmla.errors import require
from specmla.staging import send_arrays
from specmla.verify.rules.sample_match import sample_match
from specmla.verify.rules.token_level import token_level
from specmla.verify.sampling import SamplingBatch, SamplingParams, processed_probs, row_top
from specmla.verify.tree import (
    MAX_DRAFT_NODES,
    TreeTables,
    keep_nodes,
    tree_arrays,
    tree_shape,
    tree_tables,
)
from specmla.verify.tree_judge import TreeStep, decide_trees
from specmla.verify.tree_rules import follow, multi_round


@dataclass(frozen=True)
class TreeOptions:
    """What is measured.

    Attributes:
        num_requests: B. num_nodes: drafts of each tree, binary from the anchor on. vocab_size: W.
        num_layers, width: L and A of the cache whose rows move.
        params: temperature and filters of all requests.
    """

    num_requests: int
    num_nodes: int
    vocab_size: int
    num_layers: int
    width: int
    params: SamplingParams
    dtype: torch.dtype
    device: torch.device
    reps: int
    seed: int

    def __post_init__(self) -> None:
        """Refuse trees that no mask holds."""
        require(
            [f"nodes is {self.num_nodes}, accepted are 1 to {MAX_DRAFT_NODES}"]
            if not 1 <= self.num_nodes <= MAX_DRAFT_NODES
            else [],
            "trees",
        )


@dataclass(frozen=True)
class _Inputs:
    logits: Tensor  # [B, K+1, W]
    drafts: Tensor  # [B, K]
    q: Tensor  # [B, K, W] float32
    tree: TreeTables
    sampling: SamplingBatch
    seeds: Tensor
    positions: Tensor


def measure_trees(options: TreeOptions) -> list[dict[str, Any]]:
    """Time every part; the first row is a copy of logits and q, to compare with."""
    made = _inputs(options)
    parts: dict[str, Callable[[], object]] = {"copy": _copy(made), **_acceptance(made)}
    if options.device.type == "cuda":
        parts |= _fused(made)
    parts["move"] = _move(options)
    rows: list[dict[str, Any]] = []
    for name, call in parts.items():
        timing = time_calls([call], options.device, reps=options.reps)
        # A copy reads and writes every byte: half of it is the time of reading once.
        read_once = rows[0]["us"] / 2 if rows else timing.us / 2
        rows.append({"part": name, **timing._asdict(), "times_read_once": timing.us / read_once})
    return rows


def tree_lines(rows: Sequence[dict[str, Any]]) -> str:
    """Give the rows as text."""
    lines = [f"{'part':28} {'us':>10} {'p10':>10} {'p90':>10} {'x read once':>12}"]
    for r in rows:
        times = f"{r['us']:10.1f} {r['us_p10']:10.1f} {r['us_p90']:10.1f}"
        lines.append(f"{r['part']:28} {times} {r['times_read_once']:12.2f}")
    return "\n".join(lines)


def _inputs(o: TreeOptions) -> _Inputs:
    """Draw logits and a q near their softmax, as a good drafter's is; drafts are likely ids."""
    generator = torch.Generator(o.device).manual_seed(o.seed)
    b, k = o.num_requests, o.num_nodes
    shape = (b, k + 1, o.vocab_size)
    logits = torch.randn(shape, generator=generator, device=o.device).mul_(3).to(o.dtype)
    trees = [keep_nodes([(node - 2) // 2 for node in range(k)], k, k)] * b
    tree = tree_tables(send_arrays(tree_arrays(trees, [k] * b, k), o.device), trees, [k] * b)
    parents = logits.float().gather(1, tree.parents[..., None].expand(-1, -1, o.vocab_size))
    q = torch.softmax(
        parents + torch.randn(parents.shape, generator=generator, device=o.device), -1
    )
    drafts = q.argmax(-1)
    sampling = SamplingBatch.build([o.params] * b, o.device)
    seeds = torch.arange(b, device=o.device)
    return _Inputs(logits, drafts, q, tree, sampling, seeds, seeds + 1000)


def _copy(made: _Inputs) -> Callable[[], object]:
    logits, q = torch.empty_like(made.logits), torch.empty_like(made.q)
    return lambda: (logits.copy_(made.logits), q.copy_(made.q))


def _acceptance(made: _Inputs) -> dict[str, Callable[[], object]]:
    logits, drafts, tree = made.logits, made.drafts, made.tree
    p = processed_probs(logits, made.sampling).probs

    def whole(rule: Any, q: Tensor | None) -> object:
        probs = processed_probs(logits, made.sampling).probs
        step = TreeStep(tree, probs, drafts, q)
        return decide_trees(rule, step, made.seeds, made.positions)

    return {
        "probabilities": lambda: processed_probs(logits, made.sampling),
        "multi_round, one-hot": lambda: multi_round(p, drafts, None, tree),
        "multi_round, dense q": lambda: multi_round(p, drafts, made.q, tree),
        "greedy, all of it": lambda: follow(row_top(logits).token, drafts, tree),
        "token_level, one-hot, all": lambda: whole(token_level, None),
        "token_level, dense q, all": lambda: whole(token_level, made.q),
        "sample_match, all": lambda: whole(sample_match, None),
    }


def _fused(made: _Inputs) -> dict[str, Callable[[], object]]:
    """Time the kernels on the same step."""
    from specmla.kernels.accept import AcceptInputs, Filters
    from specmla.kernels.accept_tree import fused_accept_tree

    logits, tree, batch = made.logits.flatten(0, 1), made.tree, made.sampling
    shape = (tree.parents, tree.ranks, tree.depths)
    table = torch.arange(len(logits), device=logits.device).view(made.logits.shape[:2])
    min_p = torch.zeros_like(batch.top_p) if batch.min_p is None else batch.min_p
    filters = Filters(batch.temperature, batch.top_k, batch.top_p, min_p, batch.any_filter)

    def whole(rule: str, q: Tensor | None) -> object:
        inputs = AcceptInputs(logits, table, made.drafts, q, made.seeds, made.positions)
        return fused_accept_tree(inputs, filters, shape, rule)

    return {
        "token_level, one-hot, fused": lambda: whole("token_level", None),
        "token_level, dense q, fused": lambda: whole("token_level", made.q),
        "sample_match, fused": lambda: whole("sample_match", None),
    }


def _move(o: TreeOptions) -> Callable[[], object]:
    """Move the longest path of each tree, its rows apart, in all layers."""
    parents = keep_nodes([(node - 2) // 2 for node in range(o.num_nodes)], o.num_nodes, 64).parents
    depth, page = max(tree_shape(parents).depths), 64
    cache = LatentCache(o.num_layers, o.num_requests, page, o.width, dtype=o.dtype, device=o.device)
    first = torch.arange(o.num_requests, device=o.device)[:, None] * page
    step = torch.arange(1, depth + 1, device=o.device)
    sources, targets = (first + 2 * step).flatten(), (first + step).flatten()
    return lambda: cache.move(sources, targets)
