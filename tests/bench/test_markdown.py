"""Tables of the README."""

from __future__ import annotations

from specmla.bench.markdown import LONG, table


def test_columns_are_aligned_as_asked_the_rest_to_the_right() -> None:
    want = "| a | b | c |\n| --- | ---: | ---: |\n| 1 | 2 | 3 |"
    assert table(["a", "b", "c"], [["1", "2", "3"]]) == want
    assert table(["a", "b", "c"], [["1", "2", "3"]], "lrl").split("\n")[1] == "| --- | ---: | --- |"


def test_a_long_table_is_folded_under_its_summary() -> None:
    row, plain = ["1"], table(["a"], [["1"]] * LONG)
    assert table(["a"], [row] * (LONG - 1), summary="ones") == plain.rsplit("\n", 1)[0]
    folded = table(["a"], [row] * LONG, summary="ones")
    assert folded == f"<details>\n<summary>ones</summary>\n\n{plain}\n\n</details>"
