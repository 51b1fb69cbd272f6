from __future__ import annotations

import pytest

from specmla.errors import ArgumentError
from specmla.testing import parse_batch


@pytest.mark.parametrize(
    ("text", "lens"),
    [
        ("32q4s8k", [(4, 8192)] * 32),
        ("16q4s1k", [(4, 1024)] * 16),
        ("q1s65", [(1, 65)]),
        ("2q0s0", [(0, 0)] * 2),
        ("1q2ks3k", [(2048, 3072)]),
        ("10q1-8s8k", [(q, 8192) for q in (1, 2, 3, 4, 5, 6, 7, 8, 1, 2)]),
        ("3q0-1s1", [(0, 1), (1, 1), (0, 1)]),
        ("2q4s8k, 1q1s65 ,q3s3", [(4, 8192), (4, 8192), (1, 65), (3, 3)]),
    ],
)
def test_parse_batch(text: str, lens: list[tuple[int, int]]) -> None:
    assert parse_batch(text) == lens


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("32x4s8k", "'32x4s8k' is not"),
        ("", "'' is not"),
        ("2q4", "'2q4' is not"),
        ("2q4s8m", "'2q4s8m' is not"),
        ("2q4s8k,,1q1s1", "'' is not"),
        ("-1q4s8k", "'-1q4s8k' is not"),
        ("0q4s8k", "'0q4s8k' has no requests"),
        ("2q4-2s8k", "'2q4-2s8k' has a falling range"),
        ("1q4s3", "'1q4s3' has more new rows than the 3 tokens"),
        ("9q1-4s3", "'9q1-4s3' has more new rows"),
    ],
)
def test_parse_batch_names_the_bad_spec(text: str, reason: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        parse_batch(text)
    assert reason in str(caught.value)


def test_parse_batch_names_every_bad_spec() -> None:
    with pytest.raises(ArgumentError) as caught:
        parse_batch("4q1s1,oops,1q9s2,0q1s1")
    assert [s for s in ("'oops'", "'1q9s2'", "'0q1s1'") if s not in str(caught.value)] == []
