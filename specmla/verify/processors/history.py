"""Token counts of penalised requests on the device; a step sends what has changed since the last.

A request holds a line of the tables while it is alive. Lines are given to others, and then sent
whole again, only where there is no memory for more.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from specmla.verify.processors.counts import TokenCounts

MAX_CELLS = 1 << 22
"""Counted tokens of all lines up to which there is a line for everyone: 64 MB."""
LEAST_WIDTH = 256


class HeldHistory:
    """Distinct tokens of requests, and how often each is in the output.

    Args:
        device: where they lie.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._lines: weakref.WeakKeyDictionary[TokenCounts, int] = weakref.WeakKeyDictionary()
        self._cells = self._allocate(0, 0)
        self._step: list[tuple[TokenCounts, int]] = []

    def changes(self, counts: Sequence[TokenCounts]) -> dict[str, array[int]]:
        """Give what has to be sent for a step of these requests; `take` makes it hold.

        Nothing is noted before: what is not sent after all is given again.
        """
        self._grow(counts)
        free = self._free_lines(counts)
        self._step = [(c, self._lines[c] if c in self._lines else free.pop()) for c in counts]
        width = self._cells.shape[2]
        cell, token, output, whole = (array("q") for _ in range(4))
        for c, line in self._step:
            if c not in self._lines:
                whole.extend(c.ids + c.outputs)
                continue
            cell.extend([line * width + place for place in c.changed])
            token.extend([c.ids[place] for place in c.changed])
            output.extend([c.outputs[place] for place in c.changed])
        return {
            "history_line": array("q", [line for _, line in self._step]),
            "history_length": array("q", [len(c.ids) for c in counts]),
            "history_whole": whole,
            "changed_cell": cell,
            "changed_token": token,
            "changed_output": output,
        }

    def take(self, sent: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Write what `changes` gave, sent to the device; give the tables of that step's requests.

        Returns:
            Tokens and their numbers in the output, [P, E] int64 both; the first token of a request
            again where it has fewer than E.
        """
        for flat, name in zip(self._cells.flatten(1), ("token", "output"), strict=True):
            flat.index_copy_(0, sent["changed_cell"], sent[f"changed_{name}"])
        at, mine = 0, {line for _, line in self._step}
        for counts, line in self._step:
            if counts not in self._lines:
                length = len(counts.ids)
                whole = sent["history_whole"][at : at + 2 * length].view(2, length)
                self._cells[:, line, :length].copy_(whole)
                at += 2 * length
        for owner in [owner for owner, line in self._lines.items() if line in mine]:
            del self._lines[owner]
        for counts, line in self._step:  # those that were used last stand last
            self._lines[counts] = line
            counts.changed.clear()
        longest = max((len(counts.ids) for counts, _ in self._step), default=0)
        self._step = []  # requests that have gone are held by nobody
        found = self._cells[:, :, :longest].index_select(1, sent["history_line"])
        known = torch.arange(longest, device=self.device) < sent["history_length"][:, None]
        ids, outputs = found.where(known, found[:, :, :1]).unbind(0)
        return ids, outputs

    def _free_lines(self, counts: Sequence[TokenCounts]) -> list[int]:
        """Give lines of nobody, then those that have not been used for longest, to be popped."""
        step, taken = set(counts), set(self._lines.values())
        old = [line for owner, line in self._lines.items() if owner not in step]
        unused = [line for line in range(self._cells.shape[1]) if line not in taken]
        return [*reversed(old), *reversed(unused)]

    def _grow(self, counts: Sequence[TokenCounts]) -> None:
        """Make room for the longest of them, and for a line each beside those that are alive."""
        _, lines, width = self._cells.shape
        longest = max((len(c.ids) for c in counts), default=0)
        wide = width if longest <= width else max(LEAST_WIDTH, _power_of_2(longest))
        alive = len({*counts, *self._lines})
        many = lines if alive <= lines else _power_of_2(alive)
        if many * wide > MAX_CELLS:
            many = max(lines, _power_of_2(len(counts)))
        if (many, wide) != (lines, width):
            grown = self._allocate(many, wide)
            grown[:, :lines, :width] = self._cells
            self._cells = grown

    def _allocate(self, lines: int, width: int) -> Tensor:
        # Made under inference_mode, it may be written outside of it.
        with torch.inference_mode(False):
            return torch.zeros((2, lines, width), dtype=torch.int64, device=self.device)


def _power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()
