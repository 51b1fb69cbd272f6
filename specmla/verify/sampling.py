"""What a request asks of the sampler, and the one way from logits to probabilities.

The plain sampler, the verify step and honest drafters all call `processed_probs`, so a row of
logits becomes the same bits of probabilities whoever asks. Penalties, biases and bans have been
applied by then (`specmla.verify.processors`). The order is fixed:

1. temperature: logits less their maximum, divided by the temperature. Zero is no divisor: such a
   row is one-hot at its largest logit (the lowest id among equals).
2. min-p: ids whose probability is at least min_p times that of the likeliest.
3. top-k: the k largest. Equal logits at the edge are kept lowest id first, so exactly k remain and
   top_k=1 is the greedy choice.
4. top-p, on the row renormalised after min-p and top-k: ids are taken by falling probability
   (lowest id first among equals) until their mass reaches top_p; the id that crosses it is kept.

A row whose largest logit is NaN, +inf or -inf (so: any NaN, any +inf, or nothing finite) has no
distribution. It is flagged, and its probabilities are a placeholder, one-hot at id 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specmla.errors import ArgumentTypeError, require
from specmla.verify.params import SamplingParams
from specmla.verify.processors.tables import ProcessorTables

__all__ = [
    "RowProbs",
    "RowTop",
    "SamplingBatch",
    "SamplingParams",
    "processed_probs",
    "row_top",
]


@dataclass(frozen=True)
class SamplingBatch:
    """The parameters of B requests on the device, built once a step.

    Attributes:
        temperature: [B] float32.
        top_k: [B] int64.
        top_p: [B] float32.
        seeds: [B] int64; 0 for parameters without one (a step seeds those of its requests).
        all_greedy: every temperature is 0; known on the host.
        any_filter: some request that is not greedy sets top_k, top_p or min_p; known on the host.
        min_p: [B] float32, or None: nobody sets it.
        any_sort: some request that is not greedy sets top_k or top_p; known on the host.
        raw_logprobs: [B] int64, 1 where "raw" log-probabilities are asked for; None: nobody asks
            for any.
        has_processors: some request of a step has penalties, biases, bans or a constraint; then
            `processors` holds their tables, else None. `processed_probs` does not look at them.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seeds: Tensor
    all_greedy: bool
    any_filter: bool
    min_p: Tensor | None = None
    any_sort: bool = True
    raw_logprobs: Tensor | None = None
    has_processors: bool = False
    processors: ProcessorTables | None = None

    @classmethod
    def build(cls, params: Sequence[SamplingParams], device: torch.device | str) -> SamplingBatch:
        """Pack the parameters and copy them over in one transfer (pinned, not awaited, on CUDA)."""
        b, device = len(params), torch.device(device)
        packed = torch.empty(5, b, dtype=torch.int64, pin_memory=device.type == "cuda")
        packed[0] = torch.tensor([p.top_k for p in params], dtype=torch.int64)
        packed[1] = torch.tensor([p.seed or 0 for p in params], dtype=torch.int64)
        packed[2] = torch.tensor([p.logprobs == "raw" for p in params], dtype=torch.int64)
        reals = packed[3:].view(torch.float32).view(4, b)
        reals[0] = torch.tensor([p.temperature for p in params], dtype=torch.float32)
        reals[1] = torch.tensor([p.top_p for p in params], dtype=torch.float32)
        reals[2] = torch.tensor([p.min_p for p in params], dtype=torch.float32)
        reals[3] = 0.0
        soft = [p for p, t in zip(params, reals[0].tolist(), strict=True) if t > 0]
        any_sort = any(p.top_k > 0 or p.top_p < 1 for p in soft)
        any_min = any(p.min_p > 0 for p in soft)
        sent = packed.to(device, non_blocking=True)
        temperature, top_p, min_p, _ = sent[3:].view(torch.float32).view(4, b)
        return cls(
            temperature=temperature,
            top_k=sent[0],
            top_p=top_p,
            seeds=sent[1],
            all_greedy=not soft,
            any_filter=any_sort or any_min,
            min_p=min_p if any_min else None,
            any_sort=any_sort,
            raw_logprobs=sent[2] if any(p.logprobs for p in params) else None,
        )


class RowTop(NamedTuple):
    """The largest logit of each row.

    Attributes:
        value: [...] in the dtype of the logits.
        token: [...] int64, the lowest id that has it; 0 in a flagged row.
        flagged: [...] bool, the row holds NaN or +inf or nothing finite.
    """

    value: Tensor
    token: Tensor
    flagged: Tensor


class RowProbs(NamedTuple):
    """Processed probabilities of each row.

    Attributes:
        probs: [..., W] float32 (float64 for float64 logits).
        flagged: [...] bool, the row has no distribution and must not be used.
    """

    probs: Tensor
    flagged: Tensor


def row_top(logits: Tensor) -> RowTop:
    """Find the greedy token of each row [..., W] and whether the row can be used at all."""
    value, token = torch.max(logits, dim=-1)  # NaN wins a maximum, so one pass shows all defects
    flagged = _not_finite(value)
    return RowTop(value, token.masked_fill(flagged, 0), flagged)


def _not_finite(values: Tensor) -> Tensor:
    """Tell NaN and infinities, in fewer launches than `isfinite`: less itself they are not 0."""
    return values.sub(values).ne(0)


def processed_probs(
    logits: Tensor, batch: SamplingBatch, row_request: Tensor | None = None
) -> RowProbs:
    """Turn logits into the probabilities that tokens are drawn from.

    Args:
        logits: [B, Q, W] floating, or [T, W] together with `row_request`.
        batch: the parameters of B requests, on the same device.
        row_request: [T] int64, the request of each row of packed logits.

    Raises:
        ArgumentError: shapes that do not fit each other.
        ArgumentTypeError: logits that are not floating.
    """
    _check_logits(logits, batch, row_request)
    rows = logits.reshape(-1, logits.shape[-1])
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if batch.all_greedy:
        _, token, flagged = row_top(rows)
        probs = torch.zeros(rows.shape, dtype=dtype, device=rows.device)
        probs.scatter_(1, token[:, None], 1.0)
    else:
        index = _request_of_row(logits, row_request)
        temperature, may_look = batch.temperature[index], _may_look(rows)
        top = None if may_look else row_top(rows)
        largest = rows.amax(-1) if top is None else top.value
        flagged, greedy = _not_finite(largest) if top is None else top.flagged, temperature == 0
        wide = rows.to(dtype) if may_look else rows  # in one pass on a GPU, to the same numbers
        shifted = torch.sub(wide, largest.to(dtype)[:, None])
        probs = _soft_probs(shifted, temperature.masked_fill(greedy, 1.0), batch, index)
        hard = flagged | greedy
        if top is not None:
            _harden_(probs, hard, top.token)
        elif hard.any():
            _harden_(probs, hard, row_top(rows).token)
    return RowProbs(probs.view(logits.shape), flagged.view(logits.shape[:-1]))


def _may_look(rows: Tensor) -> bool:
    """Tell whether one-hot rows, which are rare, may be looked for: on a GPU that is to wait."""
    return rows.device.type == "cpu"


def _soft_probs(
    shifted: Tensor, temperature: Tensor, batch: SamplingBatch, index: Tensor
) -> Tensor:
    """Softmax logits less their maximum [T, W], overwritten, at temperatures [T] that are not 0."""
    shifted.div_(temperature.to(shifted.dtype)[:, None])
    if batch.min_p is not None:
        # The likeliest id is at 0. A min_p of 1 keeps it, whatever the logarithm rounds to.
        least = batch.min_p[index].to(shifted.dtype).log_()[:, None]
        shifted.masked_fill_(shifted < least, -math.inf)
    if batch.any_filter and batch.any_sort:
        _filter_(shifted, batch.top_k[index], batch.top_p[index])
    return torch.softmax(shifted, dim=-1)


def _harden_(probs: Tensor, hard: Tensor, token: Tensor) -> None:
    """Make the rows [T, W] that are `hard` [T] one-hot at `token` [T], in place."""
    hard, token = hard[:, None], token[:, None]
    peak = probs.gather(1, token).masked_fill_(hard, 1.0)
    probs.masked_fill_(hard, 0.0).scatter_(1, token, peak)


def _filter_(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> None:
    """Set the scaled logits [T, W] outside top-k, then outside top-p, to -inf, in place."""
    ordered, ids = torch.sort(scaled, dim=-1, descending=True, stable=True)
    width = scaled.shape[-1]
    rank = torch.arange(width, device=scaled.device)
    kept = top_k.masked_fill(top_k == 0, width)[:, None]
    ordered.masked_fill_(rank >= kept, -math.inf)
    probs = torch.softmax(ordered, dim=-1)
    mass_before = probs.cumsum(-1, dtype=torch.float64).sub_(probs)
    outside = (mass_before >= top_p[:, None]) & (top_p < 1)[:, None]
    outside[:, 0] = False  # a top_p that rounds to 0 still keeps the likeliest id
    scaled.scatter_(1, ids, ordered.masked_fill_(outside, -math.inf))


def _request_of_row(logits: Tensor, row_request: Tensor | None) -> Tensor:
    if row_request is not None:
        return row_request
    b, q = logits.shape[:2]
    return torch.arange(b, device=logits.device)[:, None].expand(b, q).reshape(-1)


def _check_logits(logits: Tensor, batch: SamplingBatch, row_request: Tensor | None) -> None:
    if not logits.is_floating_point():
        raise ArgumentTypeError(f"logits has dtype {logits.dtype}, accepted is a floating dtype")
    b, shape, found = batch.seeds.shape[0], tuple(logits.shape), []
    if not shape or shape[-1] == 0:
        found.append(f"logits has shape {shape}, the vocabulary (last axis) must not be empty")
    if row_request is None:
        if len(shape) != 3 or shape[0] != b:
            found.append(f"logits has shape {shape}, accepted is [{b}, Q, W] without row_request")
    elif len(shape) != 2 or row_request.shape != shape[:1]:
        found.append(
            f"logits has shape {shape} and row_request {tuple(row_request.shape)}, accepted are "
            "[T, W] and [T]"
        )
    require(found, "processed_probs")
