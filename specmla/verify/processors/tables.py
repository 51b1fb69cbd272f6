"""What a step's processors need on the device, gathered from the host's view of its requests."""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specmla.staging import send, send_arrays
from specmla.verify.params import SamplingParams
from specmla.verify.processors.constraint import Drafted, TokenConstraint, constraint_rows
from specmla.verify.processors.counts import TokenCounts
from specmla.verify.processors.history import HeldHistory
from specmla.verify.tree import tree_shape

_ALWAYS = 2**62


class Penalties(NamedTuple):
    """Penalties of the P requests that have some.

    Attributes:
        request: [P] int64, their places in the step.
        ids: [P, E] int64, distinct tokens so far; the first one again where there are fewer.
        outputs: [P, E] int64, times in the output so far.
        repetition, presence, frequency: [P] float32.
    """

    request: Tensor
    ids: Tensor
    outputs: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor


class Biases(NamedTuple):
    """What is added to single logits; -inf bans a token.

    Attributes:
        request: [n] int64.
        token: [n] int64.
        until: [n] int64, for rows with fewer drafts before them than this.
        value: [n] float32.
    """

    request: Tensor
    token: Tensor
    until: Tensor
    value: Tensor


class Masks(NamedTuple):
    """Tokens allowed by constraints.

    Attributes:
        request: [M] int64.
        allowed: [M, K+1, W] bool; everything in a row that is dead.
        dead: [M, K+1] bool, rows after the anchor's for which nothing is allowed, bans included.
    """

    request: Tensor
    allowed: Tensor
    dead: Tensor


@dataclass(frozen=True, eq=False)
class ProcessorTables:
    """All that stands between a step's logits and its sampling; None where nobody asks for it."""

    penalties: Penalties | None
    biases: Biases | None
    masks: Masks | None


class Processed(Protocol):
    """What is known of a request on the host."""

    sampling: SamplingParams
    counts: TokenCounts | None
    constraint: TokenConstraint | None

    @property
    def num_output(self) -> int:
        """Tokens emitted so far."""
        ...


def any_processor(states: Sequence[Processed]) -> bool:
    """Tell whether some request has penalties, biases, bans or a constraint that apply now."""
    return any(s.counts is not None or s.constraint is not None or _has_biases(s) for s in states)


def build_tables(
    states: Sequence[Processed],
    drafts: Sequence[Drafted],
    num_rows: int,
    vocab_size: int,
    device: torch.device,
    history: HeldHistory | None = None,
) -> ProcessorTables:
    """Send the tables of a step in one copy, and one more for masks.

    Args:
        states: requests of the step, in its order.
        drafts: of each request with a constraint, the drafts that are verified; of others nothing.
        num_rows: K + 1 of the step.
        vocab_size: W.
        device: where they go.
        history: holds the token counts of earlier steps on that device; None: all are sent.
    """
    counts = [s.counts for s in states if s.counts is not None]
    history = history or HeldHistory(device)
    arrays = _penalty_arrays(states) | _bias_arrays(states)
    sent = send_arrays(arrays | (history.changes(counts) if counts else {}), device)
    penalties = biases = None
    if counts:
        reals = sent["reals"].view(torch.float32).view(-1, 4)
        penalties = Penalties(sent["penalised"], *history.take(sent), *reals[:, :3].unbind(1))
    if arrays["biased"]:
        value = sent["value"].view(torch.float32)[::2]
        biases = Biases(sent["biased"], sent["token"], sent["until"], value)
    return ProcessorTables(penalties, biases, _masks(states, drafts, num_rows, vocab_size, device))


def _penalty_arrays(states: Sequence[Processed]) -> dict[str, array[int]]:
    penalised, reals = array("q"), bytearray()
    for place, state in enumerate(states):
        if state.counts is None:
            continue
        params = state.sampling
        penalised.append(place)
        reals += struct.pack(
            "4f",
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            0.0,
        )
    packed = array("q", bytes(reals))
    return {"penalised": penalised, "reals": packed}


def _bias_arrays(states: Sequence[Processed]) -> dict[str, array[int]]:
    biased, tokens, until = array("q"), array("q"), array("q")
    values = bytearray()
    for place, state in enumerate(states):
        for token, before, value in _entries(state):
            biased.append(place)
            tokens.append(token)
            until.append(before)
            values += struct.pack("2f", value, 0.0)
    return {"biased": biased, "token": tokens, "until": until, "value": array("q", bytes(values))}


def _has_biases(state: Processed) -> bool:
    params = state.sampling
    early = state.num_output < params.min_tokens and params.stop_token_ids
    return bool(params.banned_token_ids or params.logit_bias or early)


def _entries(state: Processed) -> list[tuple[int, int, float]]:
    """Give token, first row that is free of it, and value; each token once for a value."""
    params, left = state.sampling, state.sampling.min_tokens - state.num_output
    found = [(token, _ALWAYS, value) for token, value in params.summed_bias.items()]
    found += [(token, _ALWAYS, -math.inf) for token in params.banned_token_ids]
    if left > 0:
        found += [(token, left, -math.inf) for token in params.stop_token_ids]
    return found


def _masks(
    states: Sequence[Processed],
    drafts: Sequence[Drafted],
    num_rows: int,
    vocab_size: int,
    device: torch.device,
) -> Masks | None:
    places = [i for i, state in enumerate(states) if state.constraint is not None]
    if not places:
        return None
    rows = []
    for place in places:
        constraint = states[place].constraint
        assert constraint is not None
        given = constraint_rows(constraint, drafts[place], vocab_size, num_rows)
        depths = torch.full((num_rows,), num_rows)  # of rows that are no draft's
        known = (0, *tree_shape(tuple(drafts[place].parents)).depths)
        depths[: len(known)] = torch.tensor(known)
        for token, until, value in _entries(states[place]):
            if value == -math.inf:
                given[depths < until, token] = False
        rows.append(given)
    allowed = torch.stack(rows)
    dead = ~allowed.any(-1)
    dead[:, 0] = False  # there is nothing to emit: an error, not an end
    allowed |= dead[:, :, None]
    return Masks(send(torch.tensor(places), device), send(allowed, device), send(dead, device))
