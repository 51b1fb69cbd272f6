"""Bad arguments of the benchmark command: one line on stderr, status 2, nothing measured."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specmla.bench import __main__ as command


def error_line(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run the command, which must end with status 2 and one line on stderr."""
    status: object
    try:
        status = command.main(list(words))
    except SystemExit as ended:
        status = ended.code
    captured = capsys.readouterr()
    assert status == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


GOOD = ["verify", "--batch", "1q1s8", "--impl", "reference"]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["verify", "--batch", "32x", "--impl", "reference"], "'32x' is not [count]q<rows>"),
        (["verify", "--batch", "4q0s8", "--impl", "reference"], "no query rows"),
        (["verify", "--batch", "1q65s99", "--mask", "tree", "--impl", "reference"], "at most 64"),
        (["verify", "--batch", "1q1s8", "--impl", "nope"], "provider is 'nope', accepted are"),
        (["verify", "--batch", "1q1s8"], "--impl"),
        ([*GOOD, "--mask", "odd"], "'causal', 'full', 'tree'"),
        ([*GOOD, "--heads", "0"], "'0' is not an integer >= 1"),
        ([*GOOD, "--page-size", "-1"], "'-1' is not an integer >= 1"),
        ([*GOOD, "--device", "abacus"], "'abacus' is not a device"),
        ([*GOOD, "--device", "meta"], "accepted are cpu and cuda"),
        ([*GOOD, "--device", "cuda:99"], "'cuda:99' is not there"),
        ([*GOOD, "--json", "/nowhere/at/all.json"], "existing folder"),
        ([*GOOD, "--json", "/"], "existing folder"),
        ([*GOOD, "--plot", "a.xyz"], ".png"),
        ([], "command"),
    ],
)
def test_bad_argument_costs_one_line(
    words: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert part in error_line(words, capsys)


def test_plot_without_matplotlib_says_which_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command.plot, "is_available", lambda: False)
    assert "specmla[bench]" in error_line([*GOOD, "--plot", "a.png"], capsys)
