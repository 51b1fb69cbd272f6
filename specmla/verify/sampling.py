"""What a request asks of the sampler, and the one way from logits to probabilities.

The plain sampler, the verify step and honest drafters all call `processed_probs`, so a row of
logits becomes the same bits of probabilities whoever asks. The order of the processors is fixed:

1. temperature: logits less their maximum, divided by the temperature. Zero is no divisor: such a
   row is one-hot at its largest logit (the lowest id among equals).
2. top-k: the k largest. Equal logits at the edge are kept lowest id first, so exactly k remain and
   top_k=1 is the greedy choice.
3. top-p, on the row renormalised after top-k: ids are taken by falling probability (lowest id
   first among equals) until their mass reaches top_p; the id that crosses it is kept.

A row whose largest logit is NaN, +inf or -inf (so: any NaN, any +inf, or nothing finite) has no
distribution. It is flagged, and its probabilities are a placeholder, one-hot at id 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from specmla.errors import ArgumentTypeError, require

_FLOAT32_MAX = torch.finfo(torch.float32).max
_MAX_TOP_K = 2**31 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends.

    Attributes:
        temperature: 0 is greedy. Held in float32 on the device, so a value that rounds to 0 there
            is greedy as well.
        top_k: the number of ids kept; 0 keeps all.
        top_p: the mass kept, above 0 and at most 1; 1 keeps all.
        seed: names the request's random streams; equal seeds and equal inputs give equal tokens.
            None: `VerifyStep.add` draws one from torch's default generator, so that requests of
            equal prompts differ.
        max_tokens: new tokens at most; None sets no limit.
        stop_token_ids: ids that end the request; the id met is the last one emitted.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ArgumentError: lists all fields that cannot be used.
        """
        found = []
        if not _is_real(self.temperature) or not 0 <= self.temperature <= _FLOAT32_MAX:
            found.append(
                f"temperature={self.temperature!r}, accepted is a finite float32 of 0 (greedy) "
                "or more"
            )
        if not _is_int(self.top_k) or not 0 <= self.top_k <= _MAX_TOP_K:
            found.append(f"top_k={self.top_k!r}, accepted is 0 (off) to {_MAX_TOP_K}")
        if not _is_real(self.top_p) or not 0 < self.top_p <= 1:
            found.append(f"top_p={self.top_p!r}, accepted is above 0 and at most 1 (off)")
        if self.seed is not None and (not _is_int(self.seed) or not 0 <= self.seed < 2**63):
            found.append(f"seed={self.seed!r}, accepted is an int in 0 .. 2**63 - 1, or None")
        if self.max_tokens is not None and (not _is_int(self.max_tokens) or self.max_tokens < 1):
            found.append(f"max_tokens={self.max_tokens!r}, accepted is 1 or more, or None")
        stops = self.stop_token_ids
        if not isinstance(stops, tuple) or not all(_is_int(t) and t >= 0 for t in stops):
            found.append(f"stop_token_ids={stops!r}, accepted is a tuple of ids of 0 or more")
        require(found, "SamplingParams")

    def seeded(self) -> SamplingParams:
        """Give these parameters with a seed: their own, or a fresh one."""
        if self.seed is not None:
            return self
        return replace(self, seed=int(torch.randint(2**63 - 1, ())))


@dataclass(frozen=True)
class SamplingBatch:
    """The parameters of B requests on the device, built once a step.

    Attributes:
        temperature: [B] float32.
        top_k: [B] int64.
        top_p: [B] float32.
        seeds: [B] int64; 0 for parameters without one (a step seeds those of its requests).
        all_greedy: every temperature is 0; known on the host.
        any_filter: some request that is not greedy sets top_k or top_p; known on the host.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seeds: Tensor
    all_greedy: bool
    any_filter: bool

    @classmethod
    def build(cls, params: Sequence[SamplingParams], device: torch.device | str) -> SamplingBatch:
        """Pack the parameters and copy them over in one transfer (pinned, not awaited, on CUDA)."""
        b, device = len(params), torch.device(device)
        packed = torch.empty(3, b, dtype=torch.int64, pin_memory=device.type == "cuda")
        packed[0] = torch.tensor([p.top_k for p in params], dtype=torch.int64)
        packed[1] = torch.tensor([p.seed or 0 for p in params], dtype=torch.int64)
        reals = packed[2].view(torch.float32)
        reals[:b] = torch.tensor([p.temperature for p in params], dtype=torch.float32)
        reals[b:] = torch.tensor([p.top_p for p in params], dtype=torch.float32)
        sampled = [t > 0 for t in reals[:b].tolist()]
        sent = packed.to(device, non_blocking=True)
        sent_reals = sent[2].view(torch.float32)
        return cls(
            temperature=sent_reals[:b],
            top_k=sent[0],
            top_p=sent_reals[b:],
            seeds=sent[1],
            all_greedy=not any(sampled),
            any_filter=any(
                s and (p.top_k > 0 or p.top_p < 1) for s, p in zip(sampled, params, strict=True)
            ),
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
    flagged = ~torch.isfinite(value)
    return RowTop(value, token.masked_fill(flagged, 0), flagged)


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
        largest = rows.amax(-1)
        flagged, greedy = ~torch.isfinite(largest), batch.temperature[index] == 0
        probs = _soft_probs(rows.to(dtype) - largest.to(dtype)[:, None], batch, index)
        hard = flagged | greedy
        # One-hot rows are rare here, and to look for them is to wait on a GPU only.
        if hard.device.type != "cpu" or hard.any():
            _harden_(probs, hard, row_top(rows).token)
    return RowProbs(probs.view(logits.shape), flagged.view(logits.shape[:-1]))


def _soft_probs(shifted: Tensor, batch: SamplingBatch, index: Tensor) -> Tensor:
    """Softmax logits less their maximum [T, W], overwritten; greedy rows may come out anyhow."""
    temperature = batch.temperature[index]
    shifted.div_(temperature.masked_fill(temperature == 0, 1.0).to(shifted.dtype)[:, None])
    if batch.any_filter:
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


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
