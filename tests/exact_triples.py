"""The exact chances of a target's next three tokens, and a chi-square of draws against them."""

from __future__ import annotations

import torch

from specmla import DeepseekForCausalLM

Triple = tuple[int, int, int]


@torch.no_grad()
def exact_triples(
    model: DeepseekForCausalLM, prompt: list[int], temperature: float, total: int, least: float = 5
) -> dict[Triple, float]:
    """Give each triple that is expected at least `least` times in `total` draws, and how often."""
    found: list[tuple[list[int], float]] = [([], float(total))]
    device = model.model.embed_tokens.weight.device
    for _ in range(3):
        grown = []
        for start in range(0, len(found), 512):
            part = found[start : start + 512]
            tokens = torch.tensor([[*prompt, *drawn] for drawn, _ in part], device=device)
            logits = model.forward_full(tokens)[:, -1].double() / temperature
            expected = torch.softmax(logits, -1).cpu() * torch.tensor(
                [count for _, count in part], dtype=torch.float64
            ).unsqueeze(1)
            for row, token in (expected >= least).nonzero().tolist():
                grown.append(([*part[row][0], token], float(expected[row, token])))
        found = grown
    return {(a, b, c): count for (a, b, c), count in found}


def p_value(observed: list[int], expected: list[float], total: int) -> float:
    """Chance of a chi-square as large as this one; what is in no cell is pooled."""
    cells = [*zip(observed, expected, strict=True)]
    rest = total - sum(expected)
    if rest >= 5:
        cells.append((total - sum(observed), rest))
    chi = sum((o - e) ** 2 / e for o, e in cells)
    half_freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_freedom, torch.tensor(chi / 2).double()))
