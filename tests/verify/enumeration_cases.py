"""Targets and drafters for the enumeration: every draft shape, filters, zeros, padding."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specmla.verify.sampling import SamplingBatch, SamplingParams, processed_probs
from specmla.verify.sparse import SparseProbs
from tests.verify.enumeration import Case, Drafter, Drafts, Model, rows_along


def random_model(width: int, depth: int, seed: int, *, sharp: float = 1.5) -> Model:
    generator = torch.Generator().manual_seed(seed)
    logits = [
        torch.randn(width**n, width, generator=generator, dtype=torch.float64) * sharp
        for n in range(depth)
    ]
    return Model([torch.softmax(x, -1) for x in logits], width)


def filtered(model: Model, params: SamplingParams) -> Model:
    """Apply the processors that the sampler applies."""
    batch = SamplingBatch.build([params], "cpu")
    return Model(
        [processed_probs(t.log()[None], batch).probs[0] for t in model.tables], model.width
    )


def all_tokens(width: int, k: int) -> Tensor:
    """Give every chain of k tokens [width**k, k]."""
    return torch.cartesian_prod(*[torch.arange(width)] * k).reshape(-1, k)


def dense(model: Model, k: int, reported: Model | None = None) -> Drafter:
    """Draw each draft from the model, and report it (or `reported`) as q."""

    def propose(n: int, target_width: int) -> Drafts:
        tokens = all_tokens(model.width, k).expand(target_width**n, -1, k)
        drawn = rows_along(model, n, tokens, k)
        weight = drawn.gather(3, tokens[..., None])[..., 0].prod(-1)
        q = drawn if reported is None else rows_along(reported, n, tokens, k)
        return Drafts(tokens, weight, q)

    return propose


def embedded(width: int, target_width: int, k: int, depth: int, seed: int) -> Drafter:
    """Draft over `width` ids for a target of `target_width`; tables by the target's histories."""
    generator = torch.Generator().manual_seed(seed)
    tables = [
        torch.rand(target_width**n, width**j, width, generator=generator, dtype=torch.float64)
        for n in range(depth)
        for j in range(k)
    ]

    def propose(n: int, _: int) -> Drafts:
        chains = all_tokens(width, k)
        place = torch.zeros(len(chains), dtype=torch.int64)
        rows = []
        for j in range(k):
            table = tables[n * k + j]
            rows.append((table / table.sum(-1, keepdim=True))[:, place])
            place = place * width + chains[:, j]
        q = torch.stack(rows, dim=2)
        tokens = chains.expand(q.shape[0], -1, k)
        return Drafts(tokens, q.gather(3, tokens[..., None])[..., 0].prod(-1), q)

    return propose


def deterministic(k: int, depth: int, width: int, seed: int) -> Drafter:
    """Propose one chain a history, as an n-gram look-up does; q is None."""
    generator = torch.Generator().manual_seed(seed)
    chains = [torch.randint(width, (width**n, k), generator=generator) for n in range(depth)]

    def propose(n: int, _: int) -> Drafts:
        return Drafts(chains[n][:, None], torch.ones(len(chains[n]), 1, dtype=torch.float64), None)

    return propose


def padded(drafter: Drafter, *, poison: float | None) -> Drafter:
    """Keep 0 to K of the drafts, by history; q of the others is poison or what it was."""

    def propose(n: int, width: int) -> Drafts:
        drafts = drafter(n, width)
        r, _, k = drafts.tokens.shape
        count = (torch.arange(r) + n) % (k + 1)
        gone = torch.arange(k) >= count[:, None, None]
        tokens = drafts.tokens.masked_fill(gone, -1)
        q = drafts.q
        if isinstance(q, Tensor) and poison is not None:
            q = q.masked_fill(gone[..., None], poison)
        return Drafts(tokens, drafts.weight, q)

    return propose


def sparse(drafter: Drafter) -> Drafter:
    """Report only the ids that can be drawn, likeliest last; absent ones as -1 with NaN."""

    def propose(n: int, width: int) -> Drafts:
        drafts = drafter(n, width)
        assert isinstance(drafts.q, Tensor)
        c = int((drafts.q > 0).sum(-1).amax())
        probs, ids = drafts.q.topk(c, dim=-1)
        probs, ids = probs.flip(-1), ids.flip(-1)
        absent = ~(probs > 0)
        q = SparseProbs(ids.masked_fill(absent, -1), probs.masked_fill(absent, torch.nan))
        return Drafts(drafts.tokens, drafts.weight, q)

    return propose


def renamed(drafter: Drafter, to_target: list[int]) -> Drafter:
    """Map the ids of a reduced draft vocabulary to the target's (d2t), q zero outside."""

    def propose(n: int, width: int) -> Drafts:
        drafts = drafter(n, width)
        assert isinstance(drafts.q, Tensor)
        ids = torch.tensor(to_target)
        q = drafts.q.new_zeros(*drafts.q.shape[:-1], width).index_copy(-1, ids, drafts.q)
        return Drafts(ids[drafts.tokens], drafts.weight, q)

    return propose


def depth(k: int) -> int:
    return 2 * (k + 1) + 1


def half_equal(target: Model, k: int, seed: int) -> Model:
    """Equal the target after every other history, so that half of the residuals are empty."""
    other = random_model(target.width, depth(k), seed)
    tables = []
    for t, o in zip(target.tables, other.tables, strict=True):
        every_other = (torch.arange(len(t)) % 2 == 0)[:, None]
        tables.append(torch.where(every_other, t, o))
    return Model(tables, target.width)


TOP = SamplingParams(0.75, top_k=3, top_p=0.8)
MIN_P = SamplingParams(0.9, min_p=0.35)
NARROW = SamplingParams(1.5, top_k=2, top_p=0.95)


def make_case(kind: str, width: int, k: int, seed: int = 0) -> Case:
    target = random_model(width, depth(k), seed)
    draft = random_model(width, depth(k), seed + 100)
    cases: dict[str, Callable[[], tuple[Model, Drafter]]] = {
        "dense": lambda: (target, dense(draft, k)),
        "one-hot": lambda: (target, deterministic(k, depth(k), width, seed)),
        "padded-dense": lambda: (target, padded(dense(draft, k), poison=torch.nan)),
        "padded-one-hot": lambda: (
            target,
            padded(deterministic(k, depth(k), width, seed), poison=None),
        ),
        "equal": lambda: (target, dense(target, k)),
        "half-equal": lambda: (target, dense(half_equal(target, k, seed + 7), k)),
        "target-has-zeros": lambda: (filtered(target, TOP), dense(draft, k)),
        "target-has-zeros-one-hot": lambda: (
            filtered(target, NARROW),
            deterministic(k, depth(k), width, seed),
        ),
        "draft-has-zeros": lambda: (target, dense(filtered(draft, NARROW), k)),
        "both-have-zeros": lambda: (filtered(target, TOP), dense(filtered(draft, TOP), k)),
        "target-greedy": lambda: (filtered(target, SamplingParams()), dense(draft, k)),
        "both-greedy": lambda: (
            filtered(target, SamplingParams()),
            dense(filtered(draft, SamplingParams()), k),
        ),
        "smaller-vocabulary": lambda: (target, embedded(width - 1, width, k, depth(k), seed)),
        "larger-vocabulary": lambda: (target, embedded(width + 1, width, k, depth(k), seed)),
        "sparse": lambda: (target, sparse(dense(filtered(draft, NARROW), k))),
        "sparse-padded": lambda: (target, padded(sparse(dense(draft, k)), poison=None)),
        "sparse-target-has-zeros": lambda: (
            filtered(target, TOP),
            sparse(dense(filtered(draft, NARROW), k)),
        ),
        "sparse-larger-vocabulary": lambda: (
            target,
            sparse(embedded(width + 1, width, k, depth(k), seed)),
        ),
        "reduced-vocabulary": lambda: (
            target,
            renamed(embedded(width - 1, width, k, depth(k), seed), [*range(1, width)][::-1]),
        ),
        "sparse-reduced-vocabulary": lambda: (
            target,
            sparse(renamed(embedded(width - 1, width, k, depth(k), seed), [*range(1, width)])),
        ),
        "min-p": lambda: (filtered(target, MIN_P), dense(filtered(draft, MIN_P), k)),
    }
    return Case(*cases[kind](), k)
