"""Log-probabilities of emitted tokens, from the rows that produced them."""

from __future__ import annotations

import torch
from torch import Tensor

from specmla.verify.accept import Acceptance
from specmla.verify.sampling import SamplingBatch


def raw_logprobs(logits: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """Give log softmax(logits) at tokens, as float64: temperature 1, nothing applied.

    Args:
        logits: [B, K+1, W] of the model.
        rows: [B, n] int64, the row that each token follows.
        tokens: [B, n] int64; of ids outside the vocabulary anything is given.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    total = torch.logsumexp(logits.to(dtype), dim=-1).gather(1, rows)
    return (_at(logits, rows, tokens).to(dtype) - total).double()


def drawn_logprobs(probs: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """Give log p at tokens, as float64; arguments as `raw_logprobs`, p for logits."""
    return _at(probs, rows, tokens).double().log()


def emitted_logprobs(
    logits: Tensor,
    probs: Tensor | None,
    sampling: SamplingBatch,
    tokens: Tensor,
    path_rows: Tensor | None,
    drawn: Tensor | None = None,
) -> Tensor:
    """Give the log-probabilities [B, K+1] float64 of a step, of the kind each request asks for.

    Args:
        logits: [B, K+1, W] of the model, before any processor.
        probs: [B, K+1, W] that the tokens came from; None: greedy, their probability is 1.
        sampling: says which kind.
        tokens: [B, K+1] int64, emitted ones, then -1.
        path_rows: [B, K] int64, the rows of accepted drafts in a tree; None in a chain.
        drawn: [B, K+1] float64, log p where it is known already, in place of `probs`.
    """
    if path_rows is None:
        rows = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    else:
        rows = torch.nn.functional.pad(path_rows.clamp(min=0), (1, 0))
    raw = raw_logprobs(logits, rows, tokens)
    if drawn is None:
        drawn = torch.zeros_like(raw) if probs is None else drawn_logprobs(probs, rows, tokens)
    assert sampling.raw_logprobs is not None
    return torch.where(sampling.raw_logprobs.bool()[:, None], raw, drawn)


def split_logprobs(
    sampling: SamplingBatch, host: Tensor, acceptance: Acceptance
) -> tuple[list[list[int]], list[list[float]]]:
    """Take a packed verdict apart: its words, and log-probabilities if there are any, by row."""
    if sampling.raw_logprobs is None:
        return host.tolist(), [[]] * len(host)
    reals = acceptance.tokens.shape[1]
    bits = host[:, -reals:].contiguous()
    return host[:, :-reals].tolist(), bits.view(torch.float64).tolist()


def _at(values: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    width = values.shape[2]
    cells = rows * width + tokens.clamp(0, width - 1)
    return values.reshape(len(values), -1).gather(1, cells)
