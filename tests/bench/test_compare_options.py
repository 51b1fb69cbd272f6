"""Options of the comparison that can't be: one line each, before a model is loaded."""

from __future__ import annotations

import pytest

from specmla.__main__ import main


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch):
    monkeypatch.setattr("specmla.cli.compare.load_tokenizer", None)
    monkeypatch.setattr("specmla.cli.compare.load_checkpoint", None)


@pytest.mark.parametrize(
    ("words", "reasons"),
    [
        (["--rule", "token_level,best", "--temperature", "0,warm"], ["'best'", "'warm'"]),
        (["--temperature", "-1", "--plot", "a.txt"], ["'-1'", "a.txt"]),
        (["--draft", "nothing"], ["'nothing'", "draft_model"]),
        (["--draft", "ngram,ngram"], ["different names"]),
        (["--draft", ""], ["draft has ''", "draft_model"]),
        (["--draft", "-tree,", "--rule", "best"], ["draft has '-tree'", "draft has ''", "'best'"]),
    ],
)
def test_bad_options_are_one_line(words, reasons, capsys):
    assert main(["compare", *words]) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert all(reason in shown for reason in reasons)


CONTENTS = {
    "broken": b'["a"',
    "no UTF-8": b'\xff["a"]',
    "deep": b"[" * 100_000,
    "object": b'{"a": 1}',
    "empty text": b'["a", ""]',
    "no text": b"[]",
    "half a pair": b'["\\ud800"]',
    "missing": None,
}


@pytest.mark.parametrize("kind", CONTENTS)
def test_prompts_that_are_no_texts_are_one_line(kind, tmp_path, capsys):
    path = tmp_path / "texts.json"
    if CONTENTS[kind] is not None:
        path.write_bytes(CONTENTS[kind])
    assert main(["compare", "--prompts", str(path), "--rule", "best"]) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert all(word in shown for word in (f"prompts is {str(path)!r}", "list of texts", "'best'"))
