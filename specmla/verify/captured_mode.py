"""What of a step is decided on the host, so that one graph holds one form of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specmla.verify.captured_processors import ProcessorRoom
from specmla.verify.plan import PlannedRequest
from specmla.verify.proposal import DraftProposal
from specmla.verify.sampling import SamplingBatch, SamplingParams
from specmla.verify.sparse import SparseProbs

Flags = tuple[tuple[str, object], ...]


class Mode(NamedTuple):
    """The form of a step.

    Attributes:
        flags: fields of its `SamplingBatch` by name, `Tensor` standing for any tensor.
        has_probs: drafts come with their distributions.
    """

    flags: Flags
    has_probs: bool

    @property
    def has_processors(self) -> bool:
        """Whether penalties, biases or masks are applied."""
        return ("has_processors", True) in self.flags

    def __str__(self) -> str:
        """Name what differs between modes."""
        flags = [f"{name}={value}" for name, value in self.flags if isinstance(value, bool)]
        return ", ".join([*flags, f"draft_probs={self.has_probs}"])


def batches_of(
    sampling: Sequence[SamplingParams], room: ProcessorRoom, device: torch.device
) -> list[SamplingBatch]:
    """Give a batch of each kind of parameters and one of all; those that processors may apply to
    with and without, since a request that is not in a step asks for nothing there.
    """
    groups = [[params] for params in sampling] + [list(sampling)]
    found = []
    for group in groups:
        plain = SamplingBatch.build(group, device)
        found.append(plain)
        mine = ProcessorRoom.of(group, room.history, room.masks)
        if mine.history or mine.biases or mine.masks:
            found.append(dataclasses.replace(plain, has_processors=True))
    return found


def modes_of(sampling: SamplingBatch, draft_probs: bool | None) -> Iterator[Mode]:
    """Give the modes of steps of such parameters, with and without distributions if None."""
    for has_probs in (False, True) if draft_probs is None else (draft_probs,):
        yield Mode(flags_of(sampling), has_probs and not sampling.all_greedy)


def find_mode(
    captured: Sequence[Mode],
    planned: Sequence[PlannedRequest],
    proposal: DraftProposal | None,
    sampling: SamplingBatch,
) -> Mode | str:
    """Give the captured mode that a step has, or the reason why it has none."""
    probs = None if proposal is None else proposal.probs
    has_probs = probs is not None and not sampling.all_greedy
    wanted = [Mode(flags_of(sampling), has_probs)]
    if not any(r.num_drafts for r in planned):  # no draft that a distribution would belong to
        wanted.append(Mode(flags_of(sampling), not has_probs))
    elif has_probs and probs is not None:
        dtype = probs.probs.dtype if isinstance(probs, SparseProbs) else probs.dtype
        if dtype != torch.float32:
            return f"draft probs are {dtype}, captured are torch.float32"
    for mode in wanted:
        if mode in captured:
            return mode
    return f"the sampling is {wanted[0]}; captured: {'; '.join(map(str, captured))}"


def flags_of(sampling: SamplingBatch) -> Flags:
    """Tell what of parameters is decided on the host; of processors, whether there are any."""
    names = [f.name for f in dataclasses.fields(sampling) if f.name != "processors"]
    values = [(name, getattr(sampling, name)) for name in names]
    return tuple((name, Tensor if isinstance(v, Tensor) else v) for name, v in values)
