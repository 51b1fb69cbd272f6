"""Corpus, tokenizer, windows, schedule and sizes of the training script."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("tokenizers")
pytest.importorskip("rich")
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from pairtrain.corpus import is_held_out, load_corpus, seen_before
from pairtrain.schedule import Schedule, rate_factor
from pairtrain.size import ModelSize
from pairtrain.source import read_source
from pairtrain.tokenizer import END_OF_TEXT_ID, encode_files, train_tokenizer
from pairtrain.windows import TokenWindows

HELD_OUT, TRAINED = "heapq", "bisect"  # by their hashes, at 4 percent


def code(seed: int, lines: int = 40) -> str:
    return "".join(f"value_{seed}_{i} = function_{seed}({i})\n" for i in range(lines))


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


class TestCorpus:
    def test_splits_by_top_level_name(self, tmp_path: Path) -> None:
        write(
            tmp_path,
            {
                f"{HELD_OUT}/a.py": code(1),
                f"{HELD_OUT}/deep/{TRAINED}.py": code(2),
                f"{TRAINED}.py": code(3),
                f"json/{HELD_OUT}.py": code(4),
            },
        )
        corpus = load_corpus([tmp_path], 10**6, 4, workers=1)
        assert {file.module for file in corpus.held_out} == {HELD_OUT}
        assert {file.module for file in corpus.train} == {TRAINED, "json"}
        assert len(corpus.held_out) == len(corpus.train) == 2

    def test_copy_of_a_held_out_file_leaves_the_training_part(self, tmp_path: Path) -> None:
        write(tmp_path, {f"{HELD_OUT}.py": code(1), f"{TRAINED}/vendored/{HELD_OUT}.py": code(1)})
        corpus = load_corpus([tmp_path], 10**6, 4, workers=1)
        assert [file.name for file in corpus.held_out] == [f"{HELD_OUT}.py"]
        assert corpus.train == ()
        assert corpus.duplicates == 1

    def test_drops_exact_and_near_duplicates(self, tmp_path: Path) -> None:
        text = code(1)
        write(
            tmp_path,
            {
                "json/a.py": text,
                "json/licensed.py": f"# Licence\n# of many lines\n\n{text}",
                "json/indented.py": "if True:\n" + text.replace("value", "    value"),
                "json/one_more.py": text + "value = 1234\n",
                "json/half_new.py": code(1, 20) + code(2, 20),
            },
        )
        corpus = load_corpus([tmp_path], 10**6, 4, workers=1)
        kept = {file.name for file in corpus.train}
        assert len(kept) == 2
        assert "json/half_new.py" in kept

    def test_stops_at_the_size_asked_for(self, tmp_path: Path) -> None:
        write(tmp_path, {f"json/m{i}.py": code(i) for i in range(20)})
        size = len(code(10))
        corpus = load_corpus([tmp_path], 3 * size, 4, workers=1)
        assert 3 <= len(corpus.train) <= 4

    def test_does_not_depend_on_the_number_of_processes(self, tmp_path: Path) -> None:
        write(tmp_path, {f"m{i}/a.py": code(i) for i in range(30)})
        one, two = (load_corpus([tmp_path], 10**6, 50, workers=n) for n in (1, 2))
        assert [file.name for file in one.train] == [file.name for file in two.train]
        assert one.summary() == two.summary()

    def test_nested_site_packages_are_another_root(self, tmp_path: Path) -> None:
        write(tmp_path, {"json.py": code(1), "site-packages/other/a.py": code(2)})
        corpus = load_corpus([tmp_path], 10**6, 4, workers=1)
        assert [file.name for file in corpus.train] == ["json.py"]

    def test_share_held_out_is_near_the_percentage(self) -> None:
        share = sum(is_held_out(f"module{i}", 4) for i in range(10_000)) / 10_000
        assert 0.034 < share < 0.046

    def test_seen_before_counts_earlier_arrays_only(self) -> None:
        parts = [[1, 2, 3, 4], [3, 4, 5, 6], [], [1, 6], [9]]
        shares = seen_before([np.array(part, dtype=np.int64) for part in parts])
        assert shares.tolist() == [0.0, 0.5, 1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        (code(1).encode(), True),
        (b"# only\n" * 50 + code(1).encode(), True),
        (b"x = 1\n", False),
        (b"\xff\xfe" + code(1).encode(), False),
        (b"x = '" + b"a" * 5000 + b"'\n", False),
        (code(1, 20_000).encode(), False),
    ],
    ids=["code", "header", "tiny", "not utf-8", "data", "huge"],
)
def test_read_source_takes_code_only(tmp_path: Path, content: bytes, kept: bool) -> None:
    path = tmp_path / "a.py"
    path.write_bytes(content)
    file = read_source(path, "a.py")
    assert (file is not None) == kept
    if file:
        assert file.text == code(1)


def test_tokenizer_is_lossless_and_ends_files() -> None:
    tokenizer = train_tokenizer([code(i) for i in range(5)], 290, 10**6)
    assert tokenizer.get_vocab_size() == 290
    texts = ["def f():\n\treturn 'Grüße 🙂 \\x00'\r\n", "", code(7)]
    tokens = encode_files(tokenizer, texts)
    assert tokens.dtype == np.int16
    ends = np.flatnonzero(tokens == END_OF_TEXT_ID)
    assert len(ends) == len(texts)
    parts = np.split(tokens, ends + 1)[:-1]
    assert [tokenizer.decode(part[:-1].tolist()) for part in parts] == texts


class TestTokenWindows:
    def test_windows_are_consecutive_and_reach_both_ends(self) -> None:
        windows = TokenWindows(torch.arange(20, dtype=torch.int16), 5)
        drawn = windows.draw(500, torch.Generator().manual_seed(0))
        assert (drawn.diff(dim=1) == 1).all()
        assert set(drawn[:, 0].tolist()) == set(range(16))
        assert windows.spread(4)[:, 0].tolist() == [0, 5, 10, 15]

    def test_short_corpus_is_named(self) -> None:
        with pytest.raises(ValueError, match="holds 3 tokens, a window needs 5"):
            TokenWindows(torch.zeros(3, dtype=torch.int16), 5)


class TestSchedule:
    def test_rate_rises_stays_and_falls_to_nothing(self) -> None:
        rates = [rate_factor(i / 1000) for i in range(1001)]
        assert 0 < rates[0] < 0.05
        assert max(rates) == 1.0
        assert rates[1000] == 0.0
        assert all(a >= b for a, b in pairwise(rates[20:]))

    def test_steps_or_clock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert [Schedule(9, 4).progress(step) for step in range(5)] == [0, 0.25, 0.5, 0.75, 1]
        now = [100.0]
        monkeypatch.setattr("time.monotonic", lambda: now[0])
        schedule = Schedule(0.5, None)
        now[0] += 1000
        assert schedule.progress(7) == 0  # compiling is not training
        schedule.start()
        now[0] += 15
        assert schedule.progress(8) == 0.5


def test_model_size_reads_what_it_writes() -> None:
    assert ModelSize.parse("11x160") == ModelSize(11, 160, 4, 448)
    assert str(ModelSize.parse("2x128x2x96")) == "2x128x2x96"
    for text in ("", "3", "2x", "2x0", "axb", "1x2x3"):
        with pytest.raises(ValueError, match="LAYERSxHIDDEN"):
            ModelSize.parse(text)
