"""Which steps of a backend a CUDA graph may hold."""

from __future__ import annotations

import enum


class GraphSupport(enum.Enum):
    """Verifies that can be captured and replayed over other requests; prompts never are.

    NEVER: none. UNIFORM: those whose requests all bring the captured number of rows. RAGGED: any
    number up to it for each, none included.
    """

    NEVER = "never"
    UNIFORM = "uniform"
    RAGGED = "ragged"

    def covers(self, other: GraphSupport) -> bool:
        """Tell whether all that `other` asks for is served."""
        order = list(GraphSupport)
        return order.index(self) >= order.index(other)
