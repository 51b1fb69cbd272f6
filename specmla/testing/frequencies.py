"""Are drafts as frequent as the distributions say that a drafter reports of them?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specmla.testing.drafter_trace import Proposed

LEAST_P = 1e-4
"""A frequency test fails below this probability of a deviation as large."""


def row_reasons(drafted: Sequence[Proposed], num_drafts: int) -> list[str]:
    """List the places whose drafts are not those of their rows."""
    reasons: list[str] = []
    for place in range(num_drafts):
        rows = [p for p in drafted if len(p.tokens) > place and int(p.tokens[place]) >= 0]
        if not rows or any(p.probs is None for p in rows):
            continue
        tokens = torch.stack([p.tokens[place] for p in rows])
        probs = torch.stack([p.probs[place].double() for p in rows if p.probs is not None])
        reasons += _place_reasons(place, tokens, probs)
    return reasons


def _place_reasons(place: int, tokens: Tensor, probs: Tensor) -> list[str]:
    reasons = []
    if not torch.allclose(probs.sum(-1), torch.ones(len(probs), dtype=probs.dtype), atol=1e-3):
        reasons.append(f"rows reported for draft {place} don't sum to 1")
    if bool((probs.gather(1, tokens[:, None]) <= 0).any()):
        reasons.append(f"draft {place} has tokens of reported probability 0")
    counts = torch.bincount(tokens, minlength=probs.shape[1]).double()
    p = chi_square_p(counts, probs.sum(0))
    if p < LEAST_P:
        reasons.append(f"draft {place} is not drawn from the reported rows, p = {p:.1e}")
    return reasons


def sibling_reasons(drafted: Sequence[Proposed]) -> list[str]:
    """Compare how often a node's token is that of an elder sibling with what its row says.

    Rows that forget the elder siblings may have the right frequencies place by place.
    """
    total, equal, expected = 0, 0, 0.0
    for p in drafted:
        if p.parents is None or p.probs is None:
            continue
        tokens = p.tokens.tolist()
        for place, parent in enumerate(p.parents):
            elder = {tokens[i] for i in range(place) if p.parents[i] == parent} - {-1}
            if elder and tokens[place] >= 0:
                total, equal = total + 1, equal + (tokens[place] in elder)
                expected += float(p.probs[place, list(elder)].double().sum())
    pair = [equal, total - equal], [expected, max(0.0, total - expected)]
    counts, mean = (torch.tensor(cells, dtype=torch.float64) for cells in pair)
    p_value = chi_square_p(counts, mean)
    if p_value >= LEAST_P:
        return []
    return [
        f"{equal} of {total} siblings have the token of an elder one, {expected:.1f} by the "
        f"reported rows, p = {p_value:.1e}: a row is what was drawn from given the elder siblings"
    ]


def chi_square_p(counts: Tensor, expected: Tensor, least: float = 5.0) -> float:
    """Give the probability of a chi-square as large; cells below `least` expected are pooled, and
    join the smallest other one where they are below it together.

    Where every draw has a row of its own the statistic is smaller than chi-square, so that the test
    errs on the drafter's side.
    """
    big = expected >= least
    cells = [counts[big], counts[~big].sum()[None]]
    wanted = [expected[big], expected[~big].sum()[None]]
    observed, mean = torch.cat(cells), torch.cat(wanted)
    kept = mean > 0
    if bool((observed[~kept] > 0).any()):
        return 0.0
    observed, mean = observed[kept], mean[kept]
    if len(mean) > 1 and mean[-1] < least:  # one draw of a rare rest is no deviation
        smallest = mean[:-1].argmin()
        observed[smallest] += observed[-1]
        mean[smallest] += mean[-1]
        observed, mean = observed[:-1], mean[:-1]
    if len(mean) < 2:
        return 1.0
    statistic = ((observed - mean).square() / mean).sum()
    freedom = torch.tensor((len(mean) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))
