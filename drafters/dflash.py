"""DFlash: a block of drafts in one non-causal pass, each position drawn by itself.

The joint distribution is the product of the positions' own, so the reported rows are exact.
"""

from __future__ import annotations

from drafters.block import BlockDrafter


class DFlashDrafter(BlockDrafter):
    """Draws every position of a block from its own marginal, see `BlockDrafter`."""
