"""What all layers of a step share when FlashMLA's operator attends, made without a look at the
device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specmla.backends.flashmla_op import PAGE_SIZE, Schedule
from specmla.backends.step_size import StepSize
from specmla.buffers import Buffer
from specmla.errors import require
from specmla.mask import DraftMask
from specmla.metadata import VerifyPart

MASKS = frozenset({DraftMask.CAUSAL, DraftMask.FULL})


@dataclass
class FlashMLAPlan:
    """What all layers of a step share.

    Attributes:
        shape: (B, Q, H) that it is for.
        block_table: [B, M] int32, cells past a request's pages are 0: the operator looks at a first
            page even of a request without keys.
        is_set: [T, 1] bool, rows that the operator's result is not taken for: without keys, or (on
            a GPU, where nobody looks at extents) with an extent that it does not compute.
        out, lse: [T, 1] what they get: 0 and -inf, or NaN.
        schedule: of the step's first call, taken by the calls of later layers.
    """

    shape: tuple[int, int, int]
    block_table: Tensor
    is_set: Tensor
    out: Tensor
    lse: Tensor
    schedule: Schedule | None = None

    def tensors(self) -> tuple[Tensor, ...]:
        """All but the schedule."""
        return self.block_table, self.is_set, self.out, self.lse


def plan_buffers(size: StepSize) -> list[Buffer]:
    """Say what a plan holds; the operator's own scratch and schedule come on top."""
    rows, columns = size.num_rows, size.table_keys // size.page_size
    return [
        Buffer((size.num_requests, columns), torch.int32),
        Buffer((rows, 1), torch.bool),
        Buffer((rows, 1), size.dtype),
        Buffer((rows, 1), torch.float32),
    ]


def make_plan(part: VerifyPart, num_heads: int, dtype: torch.dtype) -> FlashMLAPlan:
    """Plan a step that `part_problems` has nothing against, in its earlier plan if that fits.

    Raises:
        ArgumentError: on a CPU, extents that are not those of the mask.
    """
    made, earlier = _fresh_plan(part, num_heads, dtype), part.plan
    if not isinstance(earlier, FlashMLAPlan) or not _is_alike(earlier, made):
        return made
    for held, fresh in zip(earlier.tensors(), made.tensors(), strict=True):
        held.copy_(fresh)
    earlier.schedule = None
    return earlier


def _fresh_plan(part: VerifyPart, num_heads: int, dtype: torch.dtype) -> FlashMLAPlan:
    length, lens = part.query_lens[0], part.seq_lens
    step = torch.arange(length, device=lens.device)
    if part.mask is DraftMask.CAUSAL:
        sees = lens[:, None] - length + 1 + step
    else:
        sees = lens[:, None].expand(-1, length)
    sees = sees.clamp(min=0).reshape(-1, 1)
    is_odd = part.row_extent.clamp(min=0).view(-1, 1) != sees
    if is_odd.device.type == "cpu" and bool(is_odd.any()):
        rows = is_odd.flatten().nonzero().flatten().tolist()
        reason = f"row_extent of rows {rows} is not that of a {part.mask.value} mask, accepted is"
        require([f"{reason} {sees.flatten()[rows].tolist()}"], "FlashMLABackend.plan")
    cell = torch.arange(part.block_table.shape[1], device=lens.device)
    used = cell < -(-lens[:, None] // PAGE_SIZE)
    nan = torch.full_like(sees, torch.nan, dtype=torch.float32)
    lse = torch.where(is_odd, nan, -torch.inf)
    return FlashMLAPlan(
        shape=(part.num_requests, length, num_heads),
        block_table=torch.where(used, part.block_table, 0),
        is_set=is_odd | (sees == 0),
        out=torch.where(is_odd, nan, 0.0).to(dtype),
        lse=lse,
    )


def _is_alike(earlier: FlashMLAPlan, made: FlashMLAPlan) -> bool:
    forms = [[(t.shape, t.dtype, t.device) for t in p.tensors()] for p in (earlier, made)]
    return earlier.shape == made.shape and forms[0] == forms[1]


def part_problems(part: VerifyPart) -> list[str]:
    """List what of a step's form the operator doesn't know."""
    found = []
    if len(set(part.query_lens)) > 1:
        found.append(f"query_lens are {sorted(set(part.query_lens))}, accepted is one for all")
    if part.mask not in MASKS or part.tree_bits is not None:
        found.append(f"mask is {part.mask.value!r}, accepted are 'causal' and 'full'")
    if part.row_start is not None:
        found.append("row_start is given, accepted is None: rows see their request from key 0")
    if part.page_size != PAGE_SIZE:
        found.append(f"page_size is {part.page_size}, accepted is {PAGE_SIZE}")
    return found
