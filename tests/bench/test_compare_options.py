"""Options of the comparison that can't be: one line each, before a model is loaded."""

from __future__ import annotations

import pytest

from specmla.__main__ import main
from specmla.cli.compare_drafters import draft_problems, labels_of


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


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        ("ngram,suffix-tree,dflash-tree", ["ngram", "suffix-tree", "dflash-tree"]),
        ("mtp,here/mtp", ["mtp", "here/mtp"]),
        ("a/mtp, b/mtp", ["a/mtp", "b/mtp"]),
        ("dflash,a/dflash-tree", ["dflash", "a/dflash-tree"]),
        ("a/net,a/net-tree", ["net", "net-tree"]),
        ("a/net,a/net/", ["net", "net"]),
    ],
)
def test_drafters_are_told_apart(names, labels, monkeypatch, tmp_path):
    """What training writes is called as what ships is."""
    monkeypatch.chdir(tmp_path)
    for name in ("here/mtp", "a/mtp", "b/mtp", "a/dflash", "a/net"):
        (tmp_path / name).mkdir(parents=True)
    assert labels_of(names) == labels
    assert bool(draft_problems(names)) == (len(set(labels)) < len(labels))
