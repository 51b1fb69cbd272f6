"""The one buffer that cached context of prompts is gathered into, whatever its length."""

from __future__ import annotations

import torch
from torch import Tensor

from specmla.errors import ArgumentError, count_problems, require

MAX_ROWS = 65_536
"""Most rows that `workspace_rows` asks for, up to a page: 75.5 MB of DeepSeek's bfloat16 rows."""


def workspace_rows(max_model_len: int, max_num_seqs: int, page_size: int) -> int:
    """Give the rows of a workspace that serves an engine with these limits.

    `min(max(8 * max_model_len, 4 * max_num_seqs * page_size), 65536)`, rounded up to a page: long
    contexts take few chunks, and a full batch of short ones four pages a request.

    Raises:
        ArgumentError: a limit below 1; all of them are listed.
    """
    limits = {
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "page_size": page_size,
    }
    require(count_problems(limits), "workspace_rows")
    rows = min(max(8 * max_model_len, 4 * max_num_seqs * page_size), MAX_ROWS)
    return _whole_pages(rows, page_size)


class PrefillWorkspace:
    """Holds rows [n, A] of cached context between gather and up-projection.

    Everyone who needs it claims their maximum, then it is locked: from there on its address and
    size are fixed, so that serving can't run out of memory and captured graphs stay valid. All
    layers of a model share one; calls that run at the same time (on two streams) need one each.

    Args:
        width: A, numbers a row.
        page_size: G of the cache; the size is a multiple of it.
        dtype: of the rows, the cache's.
        device: where it lies.

    Raises:
        ArgumentError: a size below 1, a dtype that is no floating-point one; all are listed.
    """

    def __init__(
        self, width: int, page_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        found = count_problems({"width": width, "page_size": page_size})
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            found.append(f"dtype is {dtype}, accepted are floating-point types")
        require(found, "PrefillWorkspace")
        self.width, self.page_size, self.dtype = width, page_size, dtype
        self.device = torch.device(device)
        self._is_locked = False
        self._buffer = self._allocate(0)

    @property
    def num_rows(self) -> int:
        """Rows claimed so far."""
        return self._buffer.shape[0]

    @property
    def is_locked(self) -> bool:
        """Whether the size is final."""
        return self._is_locked

    def claim(self, num_rows: int) -> None:
        """Grow to at least `num_rows`, rounded up to a page; fewer than there are change nothing.

        Raises:
            ArgumentError: fewer rows than a page, or growth after `lock`; nothing was allocated.
        """
        found = count_problems({"num_rows": num_rows}, self.page_size)
        require(
            [f"{text}: page_size ({self.page_size}) at least" for text in found],
            "PrefillWorkspace.claim",
        )
        wanted = _whole_pages(num_rows, self.page_size)
        if wanted <= self.num_rows:
            return
        if self._is_locked:
            raise ArgumentError(
                f"PrefillWorkspace.claim: num_rows is {num_rows}, accepted are at most "
                f"{self.num_rows}: the workspace is locked"
            )
        self._buffer = self._allocate(wanted)

    def lock(self) -> None:
        """Make the size final.

        Raises:
            ArgumentError: nothing has been claimed.
        """
        if not self.num_rows:
            raise ArgumentError(
                f"PrefillWorkspace.lock: 0 rows are claimed, accepted are at least page_size "
                f"({self.page_size})"
            )
        self._is_locked = True

    def rows(self, count: int) -> Tensor:
        """View the first `count` rows, [count, A]; what they hold is undefined.

        Raises:
            ArgumentError: more rows than there are.
        """
        if not 0 <= count <= self.num_rows:
            raise ArgumentError(
                f"PrefillWorkspace.rows: count is {count}, accepted are 0 to {self.num_rows}"
            )
        return self._buffer[:count]

    def _allocate(self, num_rows: int) -> Tensor:
        # Made under inference_mode, it may be written outside of it.
        with torch.inference_mode(False):
            return torch.empty(num_rows, self.width, dtype=self.dtype, device=self.device)


def _whole_pages(num_rows: int, page_size: int) -> int:
    return -(-num_rows // page_size) * page_size
