"""Penalties, biases and masks of a captured step: tables of fixed sizes, in buffers that stay.

What a request lacks is there all the same and changes no bit: penalties of 1 and 0, biases of 0,
masks that allow everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specmla.bucket import Bucket
from specmla.config import is_count
from specmla.verify.params import SamplingParams
from specmla.verify.processors.tables import Biases, Masks, Penalties, ProcessorTables


class ProcessorRoom(NamedTuple):
    """What of processors is captured, and how much of it.

    Attributes:
        history: distinct tokens of a request, prompt and output, that penalties count; 0: none.
        biases: biased, banned and held back tokens, on average over a bucket's requests; 0: none.
        masks: whether constraints are captured.
    """

    history: int
    biases: int
    masks: bool

    @classmethod
    def of(
        cls, sampling: Sequence[SamplingParams], history: int, constraints: bool
    ) -> ProcessorRoom:
        """Give the room that requests of these parameters need."""
        penalised = any(params.has_penalties for params in sampling)
        return cls(
            history if penalised else 0, max(map(_entries, sampling), default=0), constraints
        )

    def problems(self, tables: ProcessorTables, num_requests: int) -> list[str]:
        """List what of a step's tables there is no room for, in a bucket of so many requests."""
        found, length, count = [], 0, 0
        if tables.penalties is not None:
            length = tables.penalties.ids.shape[1]
        if tables.biases is not None:
            count = len(tables.biases.token)
        if length > self.history:
            captured = f"captured are {self.history} (history)" if self.history else "none captured"
            found.append(f"penalties count {length} distinct tokens of a request, {captured}")
        if count > self.biases * num_requests:
            captured = f"captured are {self.biases * num_requests} for {num_requests} requests"
            found.append(f"{count} tokens are biased, banned or held back, {captured}")
        if tables.masks is not None and not self.masks:
            found.append("a request has a constraint, captured are requests without")
        return found


def room_problems(history: object, constraints: object) -> list[str]:
    """List what of these arguments of a captured step is none."""
    found = []
    if history is not None and not (isinstance(history, int) and is_count(history) and history > 0):
        found.append(f"history is {history!r}, accepted are integers >= 1 and None")
    if not isinstance(constraints, bool):
        found.append(f"constraints is {constraints!r}, accepted are True and False")
    return found


def _entries(params: SamplingParams) -> int:
    """Count the tokens whose logits are shifted; an id may be biased and banned."""
    held = len(params.stop_token_ids) if params.min_tokens else 0
    return len(params.summed_bias) + len(params.banned_token_ids) + held


class ProcessorBuffers:
    """Memory for the tables of the largest bucket, a part of which each other one uses.

    Args:
        room: what is captured.
        buckets: shapes.
        vocab_size: W.
        device: where the tables lie.
    """

    def __init__(
        self, room: ProcessorRoom, buckets: Sequence[Bucket], vocab_size: int, device: torch.device
    ) -> None:
        self.room, self._width = room, vocab_size
        most = max((b.num_requests for b in buckets), default=0)
        rows = max((b.num_rows for b in buckets), default=0) * room.masks
        self._each = torch.arange(most, device=device)
        self._history = torch.zeros((2, most * room.history), dtype=torch.int64, device=device)
        self._factors = torch.zeros((3, most), device=device)
        self._shifted = torch.zeros((3, most * room.biases), dtype=torch.int64, device=device)
        self._shifts = torch.zeros(most * room.biases, device=device)
        self._allowed = torch.zeros(rows * vocab_size, dtype=torch.bool, device=device)
        self._dead = torch.zeros(rows, dtype=torch.bool, device=device)

    def tables(self, bucket: Bucket) -> ProcessorTables:
        """View the tables of a bucket; `fill` makes them neutral before anything else."""
        num, room, each = bucket.num_requests, self.room, self._each[: bucket.num_requests]
        penalties = biases = masks = None
        if room.history:
            ids, outputs = (cells[: num * room.history].view(num, -1) for cells in self._history)
            repetition, presence, frequency = self._factors[:, :num].unbind(0)
            penalties = Penalties(each, ids, outputs, repetition, presence, frequency)
        if room.biases:
            count = num * room.biases
            request, token, until = self._shifted[:, :count].unbind(0)
            biases = Biases(request, token, until, self._shifts[:count])
        if room.masks:
            shape = (num, bucket.query_len)
            allowed = self._allowed[: bucket.num_rows * self._width].view(*shape, self._width)
            masks = Masks(each, allowed, self._dead[: bucket.num_rows].view(shape))
        tables = ProcessorTables(penalties, biases, masks)
        fill(tables, None)
        return tables


def fill(held: ProcessorTables, given: ProcessorTables | None) -> None:
    """Write the tables of a step, for which there is room; nothing waits for the device.

    Args:
        held: from `ProcessorBuffers.tables`.
        given: of the step, or None: nobody asks for anything.
    """
    if held.penalties is not None:
        _fill_penalties(held.penalties, given.penalties if given else None)
    if held.biases is not None:
        _fill_biases(held.biases, given.biases if given else None)
    if held.masks is not None:
        _fill_masks(held.masks, given.masks if given else None)


def _fill_penalties(held: Penalties, given: Penalties | None) -> None:
    held.repetition.fill_(1.0)
    held.presence.zero_()
    held.frequency.zero_()
    if given is None:
        return
    for buffer, values in ((held.ids, given.ids), (held.outputs, given.outputs)):
        # The first token again, where there are fewer: all its entries hold the same.
        buffer.index_copy_(0, given.request, _widened(values, buffer.shape[1]))
    for name in ("repetition", "presence", "frequency"):
        getattr(held, name).index_copy_(0, given.request, getattr(given, name))


def _widened(values: Tensor, width: int) -> Tensor:
    first = values[:, :1].expand(-1, width - values.shape[1])
    return torch.cat([values, first], dim=1)


def _fill_biases(held: Biases, given: Biases | None) -> None:
    count = 0 if given is None else len(given.token)
    held.value[count:].zero_()
    held.request[count:].zero_()  # a larger bucket may have left one that is not there
    if given is not None:
        for buffer, values in zip(held, given, strict=True):
            buffer[:count].copy_(values)


def _fill_masks(held: Masks, given: Masks | None) -> None:
    held.allowed.fill_(True)
    held.dead.zero_()
    if given is not None:  # rows that no request of the step has are those that allow all
        rows = given.allowed.shape[1]
        held.allowed[given.request, :rows] = given.allowed
        held.dead[given.request, :rows] = given.dead
