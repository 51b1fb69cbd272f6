"""How well a draft serves a target: chains of K drafts verified on held-out prompts, batched.

This recomputes whole sequences, without any cache: slow a token, but independent of the library's
decoding, and a few hundred prompts run side by side. All is computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

Logits = Callable[[Tensor, Tensor], Tensor]  # tokens [B, S], positions [B, n] -> [B, n, W]

LOOP_RATIO = 0.5  # a continuation with fewer distinct 4-grams than this share loops
ROUND_LENGTH = 64  # sequences are cut to a multiple of this, the end of the longest


@dataclass(frozen=True)
class ChainResult:
    """Counts of a run, one entry a prompt.

    Attributes:
        steps: [B] verify steps taken.
        emitted: [B] tokens those steps emitted.
        accepted: [B, K] steps in which draft i was accepted.
        distinct: [B] share of distinct 4-grams in the continuation.
    """

    steps: Tensor
    emitted: Tensor
    accepted: Tensor
    distinct: Tensor

    def summary(self) -> dict[str, object]:
        """Give the averages over steps; looping continuations count in `with_loops` only."""
        good = self.distinct >= LOOP_RATIO
        everything = torch.ones_like(good)
        return {
            **self._averages(good if bool(good.any()) else everything),
            "with_loops": self._averages(everything),
            "prompts": len(good),
            "looping_excluded": int((~good).sum()) if bool(good.any()) else 0,
            "loop_rule": f"distinct-4-gram ratio of the continuation < {LOOP_RATIO}",
        }

    def _averages(self, rows: Tensor) -> dict[str, object]:
        steps = self.steps[rows].sum()
        rates = self.accepted[rows].sum(0) / steps
        return {
            "tokens_per_step": round(float(self.emitted[rows].sum() / steps), 4),
            "acceptance_by_position": [round(rate, 4) for rate in rates.tolist()],
            "distinct_4gram_ratio": round(float(self.distinct[rows].mean()), 4),
        }


class _Verdict(NamedTuple):
    accepted: Tensor  # [B], drafts accepted
    next_token: Tensor  # [B], the correction or bonus token


@torch.inference_mode()
def run_chains(
    target: Logits,
    draft: Logits,
    prompts: list[Tensor],
    *,
    num_drafts: int,
    new_tokens: int,
    temperature: float,
    generator: torch.Generator,
) -> ChainResult:
    """Decode every prompt by draft and verify until it has `new_tokens` new tokens.

    Args:
        target, draft: logits of either.
        prompts: each [n] int64, n >= 1, on the models' device, as the generator.
        num_drafts: K.
        new_tokens: a prompt takes no further step from there on.
        temperature: 0 for greedy, else of target and draft.
    """
    device = prompts[0].device
    start = torch.tensor([len(prompt) for prompt in prompts], device=device)
    room = (0, new_tokens + 2 * num_drafts + 2)
    tokens = torch.nn.functional.pad(pad_sequence(prompts, batch_first=True), room)
    end, steps = start.clone(), torch.zeros_like(start)
    accepted = torch.zeros(len(prompts), num_drafts, dtype=torch.int64, device=device)
    offsets = torch.arange(num_drafts + 1, device=device)
    while bool((active := end - start < new_tokens).any()):
        window = tokens[:, : -(-int(end.max() + num_drafts) // ROUND_LENGTH) * ROUND_LENGTH]
        q = _propose(draft, window, end, num_drafts, temperature, generator)
        drafts = window.gather(1, end[:, None] + offsets[:-1])
        p = _probabilities(target(window, end[:, None] - 1 + offsets), temperature)
        verdict = _verify(p, q, drafts, generator)
        tokens.scatter_(1, (end + verdict.accepted)[:, None], verdict.next_token[:, None])
        end += torch.where(active, verdict.accepted + 1, 0)
        steps += active
        accepted += active[:, None] & (offsets[:-1] < verdict.accepted[:, None])
    distinct = torch.tensor(
        [distinct_4grams(tokens[r, start[r] : end[r]].tolist()) for r in range(len(prompts))]
    )
    return ChainResult(steps.cpu(), (end - start).cpu(), accepted.cpu(), distinct)


def distinct_4grams(tokens: list[int]) -> float:
    """Give the share of distinct 4-grams among those of `tokens`; 1 if there are none."""
    grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    return len(set(grams)) / len(grams) if grams else 1.0


def _propose(
    draft: Logits,
    tokens: Tensor,
    end: Tensor,
    count: int,
    temperature: float,
    generator: torch.Generator,
) -> Tensor:
    """Write `count` drafts into every row of `tokens` from `end` on; return their q [B, K, W]."""
    q = []
    for i in range(count):
        logits = draft(tokens, (end - 1 + i)[:, None])[:, 0]
        q.append(_probabilities(logits, temperature))
        tokens.scatter_(1, (end + i)[:, None], _choose(q[-1], generator)[:, None])
    return torch.stack(q, dim=1)


def _probabilities(logits: Tensor, temperature: float) -> Tensor:
    """Softmax at `temperature`; at 0 the one-hot of the likeliest token."""
    if temperature == 0:
        best = logits.argmax(-1, keepdim=True)
        return torch.zeros_like(logits).scatter_(-1, best, 1.0)
    return (logits.float() / temperature).softmax(-1)


def _choose(probabilities: Tensor, generator: torch.Generator) -> Tensor:
    """Draw one id a row; zero rows never occur."""
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]


def _verify(p: Tensor, q: Tensor, drafts: Tensor, generator: torch.Generator) -> _Verdict:
    """Accept a prefix of `drafts` [B, K] by p [B, K + 1, W] and q [B, K, W], and draw what follows.

    Draft x is accepted with probability min(1, p(x) / q(x)); after the first rejection the token
    comes from max(p - q, 0), after none from the last p (arXiv 2211.17192, algorithm 1). With
    one-hot p and q this is greedy decoding.
    """
    count = len(drafts)
    at = drafts[..., None]
    ratio = p[:, :-1].gather(-1, at)[..., 0] / q.gather(-1, at)[..., 0]
    uniform = torch.rand(ratio.shape, generator=generator, device=ratio.device)
    accepted = (uniform < ratio).long().cumprod(-1).sum(-1)
    rows = torch.arange(count, device=p.device)
    p_next = p[rows, accepted]
    q_next = torch.cat((q, torch.zeros_like(q[:, :1])), dim=1)[rows, accepted]
    residual = (p_next - q_next).clamp_min(0)
    # Rounding can leave nothing where p and q agree; then the test could not have failed either.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p_next)
    return _Verdict(accepted, _choose(residual, generator))
