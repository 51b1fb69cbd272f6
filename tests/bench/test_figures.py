"""The parts of the README that are made of results: what they say of aims and losses."""

from __future__ import annotations

import json
import re

import pytest

from specmla.bench.compare_aims import compare_aims
from specmla.bench.decode_figures import decode_figures
from specmla.bench.drafter_figures import drafter_figures
from specmla.bench.figures import RESULTS

FILES = sorted(RESULTS.glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_results_name_no_place_of_a_machine(path):
    text = path.read_text(encoding="utf-8")
    assert not re.search(r'"(?:[^"]*[ =])?/(?:tmp|home|root|work|opt|usr|var|mnt)\b', text)


def load(name: str):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def test_every_loop_is_shown_and_slower_ones_are_named():
    found = load("h200_decode")
    table, words, command = decode_figures(found)
    for row in found["rows"]:
        shown = f"{row['tokens_per_s']:.0f}, {row['steps_per_s']:.0f}"
        (line,) = [text for text in table.splitlines() if text.startswith(f"| {row['drafter']} ")]
        assert shown in line
        name = f"{row['drafter']} at T = {row['temperature']:g}, B = {row['requests']} ("
        if row["drafts"]:
            assert (name in words) == (round(row["speedup"], 2) < 1)
            assert f"{shown}, {row['speedup']:.2f}x" in line
    assert command.startswith("`python -m specmla.bench decode --draft ngram,draft_model,mtp")


def test_an_aim_of_speed_that_nobody_reaches_is_said():
    found = load("h200_decode")
    for row in found["rows"]:
        row["speedup"] = min(row["speedup"], 1.49)
    words = decode_figures(found)[1]
    assert words.count("none;") + words.count("none.") == 6


def test_trained_drafters_are_judged_by_the_better_one():
    found = load("drafter_training")
    assert found["bytes"] == {"mtp": 776185, "dflash": 2221264, "dspark": 3795136}
    found["evaluation"]["dflash"]["greedy"]["tokens_per_step"] = 3.5
    found["evaluation"]["dspark"]["temperature_1"]["tokens_per_step"] = 2.2
    words = "\n".join(drafter_figures(found))
    assert "3.2 greedy: reached (dflash 3.50)" in words
    assert "2.3 at temperature 1: not reached (dspark 2.20)" in words


def row(drafter, rule, temperature, tokens, speedup):
    return {
        "drafter": drafter,
        "rule": rule,
        "temperature": temperature,
        "tokens_per_step": tokens,
        "speedup": speedup,
    }


def gain(what, drafter, value):
    return {"what": what, "drafter": drafter, "rule": "block", "temperature": 1.0, "gain": value}


def test_aims_of_a_comparison():
    rows = [
        row("ngram", "greedy", 0.0, 9.0, 1.4),
        row("dspark", "greedy", 0.0, 3.2, 1.5),
        row("dflash-tree", "greedy", 0.0, 4.0, 1.2),
        row("dflash", "token_level", 1.0, 2.0, 1.1),
        row("dspark", "block", 1.0, 2.29, 1.2),
    ]
    gains = [
        gain("block over token_level", "dspark", 0.2),
        gain("block over token_level", "dflash", -0.1),
        gain("tree over chain", "dflash-tree", -0.01),
    ]
    text = compare_aims({"rows": rows, "gains": gains})
    assert "3.2 tokens a step of DFlash or DSpark at T = 0: reached (dspark, greedy 3.20)" in text
    assert "at T = 1: not reached (dspark, block 2.29)" in text
    assert "token-level, mean of 2 cases: reached (+0.050; least -0.100, dflash, block" in text
    assert "same depth, mean of 1 cases: not reached (-0.010;" in text
    assert "1.5 times plain decoding at T = 0: dspark (greedy)" in text
    assert text.endswith("1.5 times plain decoding at T = 1: none.")
    assert "tree" not in compare_aims({"rows": rows, "gains": []})
