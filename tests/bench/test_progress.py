from __future__ import annotations

import importlib.util
import sys

import pytest

from specmla.bench.progress import HINT, progress


def test_silent_where_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(2) as tell:
        tell("one")
    assert capsys.readouterr() == ("", "")


def test_plain_lines_and_a_hint_without_rich(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with progress(2) as tell:
        tell("one")
    assert capsys.readouterr() == ("", f"{HINT}\none\n")


def test_bar_stays_off_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with progress(2) as tell:
        tell("one")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "one" in captured.err
