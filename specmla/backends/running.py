"""The state of a softmax over keys that come in parts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specmla.errors import UnsupportedError
from specmla.metadata import PrefillPart

MAX_FLOOR = -1.0e30
"""Start of a running maximum: below every score, yet finite."""
LN_2 = 0.6931471805599453


class RunningSoftmax(NamedTuple):
    """What rows have seen so far, float32, contiguous.

    Attributes:
        weighted: [T, H, V], values weighted by 2 ** (score - largest), added up.
        largest: [T, H], largest base-2 score.
        total: [T, H], the weights added up; 0 for a row that saw no key.
    """

    weighted: Tensor
    largest: Tensor
    total: Tensor

    @classmethod
    def start(cls, query: Tensor, value_width: int) -> RunningSoftmax:
        """Give the empty state of query rows `[T, H, D]`."""
        rows, heads, _ = query.shape
        made = query.new_zeros(rows, heads, value_width, dtype=torch.float32)
        total = query.new_zeros(rows, heads, dtype=torch.float32)
        return cls(made, torch.full_like(total, MAX_FLOOR), total)

    def finish(self, dtype: torch.dtype, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """Give values [T, H, V] in `dtype`, times `scale`, and natural-log LSE [T, H].

        A row that saw no key: exactly 0 and -inf. Element by element, row by row.
        """
        empty = self.total == 0
        total = torch.where(empty, 1.0, self.total)
        lse = torch.where(empty, -torch.inf, (self.largest + total.log2()) * LN_2)
        out = self.weighted * (scale / total).unsqueeze(-1)
        return out.to(dtype), lse


class PromptFolding:
    """What a backend has that attends prompts to keys in parts, for batch-invariant results."""

    folds_prompts: bool = False
    """Whether `fold_mha` is there."""

    def fold_mha(
        self,
        state: RunningSoftmax,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        part: PrefillPart,
        *,
        softmax_scale: float,
    ) -> None:
        """Carry the state of prompt rows on over more up-projected keys, in place.

        Keys are added in blocks from the first one of each request on, so parts that begin at
        multiples of `fold_step` give, one after another, the bits of all keys at once.

        Args:
            state: of the query rows.
            query: [T, H, P + R]. key: [sum of S, H, P + R]. value: [sum of S, H, V].
            part: row and key starts, and `first_extent`.
            softmax_scale: as in `AttentionBackend.forward_mqa`.
        """
        raise UnsupportedError(type(self).__name__, ["folds_prompts is False"])
