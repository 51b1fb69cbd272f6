"""Shares of `check_backend`: a form compiles for seconds, so that workers share its cases."""

from __future__ import annotations

import pytest

SHARES = [
    "^(contexts|totals|decodes|long|tail|wide|no-)",
    "^(repeats-one|repeats-many|rows|far)",
    "^(mask-full|heads-(1|3|8)$)",
    "^heads-(12|20|40|63)$",
    "^heads-(64|96|126|128)$",
    "^page",
    "^(windows|mask-tree|repeats-tree)",
    "^(heads-first|slice|small-page|refuses)",
]
REST = "^(?!" + "|".join(f"(?:{share.removeprefix('^')})" for share in SHARES) + ")"


@pytest.fixture(params=[*SHARES, REST])
def share(request: pytest.FixtureRequest) -> str:
    """Give a pattern of case names; together they match every name once."""
    pattern: str = request.param
    return pattern
