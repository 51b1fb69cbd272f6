"""The parts of the README that are made of results: what they say of aims and losses."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from specmla.bench.__main__ import main
from specmla.bench.compare_aims import compare_aims
from specmla.bench.decode_figures import decode_figures
from specmla.bench.drafter_figures import drafter_figures
from specmla.bench.figures import RESULTS, figures
from specmla.config import MLAConfig
from specmla.models.config import DeepseekConfig

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


def test_who_decides_in_a_loop_is_said():
    found = load("h200_decode")
    assert "fused" not in decode_figures(found)[0]
    for row in found["rows"]:
        row["acceptance"] = "triton"
    assert decode_figures(found)[0].startswith("**Whole loops, captured, fused acceptance**")


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


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_what_has_not_been_measured_is_left_out(path, tmp_path):
    whole = figures()
    for other in FILES:
        if other != path:
            shutil.copy(other, tmp_path)
    fewer = figures(tmp_path)
    assert len(fewer) < len(whole)
    kept = set(whole.splitlines())
    # The host time of a step is one paragraph of two files.
    assert path.stem == "h200_step" or kept >= set(fewer.splitlines())


def test_without_results_there_are_no_figures(tmp_path):
    assert figures(tmp_path) == ""


def test_prompts_of_the_command_are_shown(tmp_path):
    """Of a run on a CPU, where no peak is known; then with times and peaks put in."""
    file = tmp_path / "h200_prefill.json"
    words = "prefill --contexts 20 64 200 --workspace 32 --rows 16 --kernel 2q40s40 --heads 2"
    words += " --rank 32 --nope 16 --rope 16 --value 24 --page-size 16 --reps 1 --device cpu"
    words += " --providers reference sdpa fa3"
    assert main([*words.split(), "--json", str(file)]) == 0
    assert "Peak of full chunks over the contexts: not measured." in figures(tmp_path)
    found = json.loads(file.read_text())
    for row in found["rows"]:
        if row.get("form") == "chunks":
            row |= {"us": 1500.0, "ratio": 1.05, "peak_bytes": (64 + (row["context"] > 64)) << 20}
        elif row.get("form") == "one pass":
            row |= {"us": 2000.0, "peak_bytes": row["context"] << 20}
        elif row["provider"] == "reference":
            row |= {"provider": "triton", "us": 50.0, "tflops": 40.4, "of_best": 0.6}
    found["rows"][-4] |= {"us": None, "peak_bytes": None, "ratio": None}
    file.write_text(json.dumps(found))
    text = figures(tmp_path)
    assert "| 64 | 2.00 | 1.50 (1.05) | 64 | 64 |" in text
    assert "| 200 | 2.00 | no room | 200 | - |" in text
    assert "chunks of 32: 64 to 64 MiB from 64 to 64 tokens" in text
    assert "5 % slower than one pass (the aim): reached (most 1.05 times, chunks of 32" in text
    assert "40 (50)" in text
    assert "refused" in text
    assert "60 % of the best one's rate or more (the aim): reached (least 60 %, `2q40s40`)" in text
    assert "`python -m specmla.bench prefill --contexts 20 64 200" in text
    for row in found["rows"]:
        row |= {"ratio": 1.06} if row.get("ratio") else {}
        row |= {"of_best": 0.59} if row.get("of_best") else {}
    file.write_text(json.dumps(found))
    text = figures(tmp_path)
    assert "(the aim): reached" not in text
    assert text.count("(the aim): not reached") == 2


def test_steps_of_a_model_are_shown_by_batch_and_drafts(tmp_path):
    config = MLAConfig(48, 4, 32, 16, 16, 24)
    where = tmp_path / "config.json"
    where.write_text(json.dumps(DeepseekConfig(config, 2, 61, 64, 256).to_hf()))
    file = tmp_path / "results" / "h200_step_model.json"
    file.parent.mkdir()
    words = f"step --config {where} --layers 1 --acceptance 0.9,0.5 --batches 1 3 --context 20"
    words += f" --reps 1 --page-size 4 --device cpu --json {file}"
    assert main(words.split()) == 0
    found = json.loads(file.read_text())
    text = figures(file.parent)
    assert "**Whole steps**, one CPU" in text
    assert "| batch | K = 0 | K = 1 | K = 2 | best K | break-even K |" in text
    assert "if all before it do: 0.9, 0.5; a draft costs 0 µs" in text
    assert "bench step --config FILE --layers 1" in text
    assert str(tmp_path) not in text
    for batch, summary in zip((1, 3), found["summaries"], strict=True):
        rows = [r for r in found["rows"] if r["requests"] == batch]
        cells = [f"{r['tokens_per_s']:.0f} ({r['eager_us']:.0f})" for r in rows]
        ends = [str(summary["best_drafts"]), str(summary["break_even_drafts"])]
        assert f"| {' | '.join([str(batch), *cells, *ends])} |" in text
    for row in found["rows"]:
        row["captured_us"] = 7.0
    file.write_text(json.dumps(found))
    text = figures(file.parent)
    assert "**Whole steps, captured**" in text
    assert text.count("(7)") == 6


def test_variants_of_a_layer_stand_behind_the_plain_one(tmp_path):
    for name in ("h200_layer", "h200_layer_invariant", "h200_layer_codes"):
        shutil.copy(RESULTS / "h200_layer.json", tmp_path / f"{name}.json")
    text = figures(tmp_path)
    assert text.count("| `1q4s8k` captured |") == 3
    assert "The same layer batch-invariant" in text
    assert text.endswith("`python -m specmla.bench layer --codes`")
    (tmp_path / "h200_layer.json").unlink()
    assert figures(tmp_path) == "", "a variant is not shown without what it is compared with"


def test_deciding_is_shown_by_form_and_judged_by_its_aims(tmp_path):
    file = tmp_path / "results" / "h200_accept.json"
    file.parent.mkdir()
    words = "accept --rule token_level block --sampling greedy plain --q one-hot --requests 2 "
    words += f"--vocab 40 --reps 1 --device cpu --nodes 3 --json {file}"
    assert main(words.split()) == 0
    found = json.loads(file.read_text())
    kernels = [r for r in found["rows"] if r["provider"] == "triton"]
    for i, row in enumerate(kernels):
        row |= {"us": 3.0 + i, "times_read": 1.9 if i else 2.1, "status": "timed", "reason": None}
    for row in found["rows"]:
        if row["provider"] == "torch":
            row["us"] = 3.5
    found["rows"] = [r for r in found["rows"] if r["provider"] != "sort" or r["shape"] == "chain"]
    file.write_text(json.dumps(found))
    text = figures(file.parent)
    assert "2 requests, 40 ids, chains of 4 drafts and trees of 3 drafts, float32 logits" in text
    assert "| chain | token_level | greedy | one-hot |" in text
    assert "| 3 | 2.1 | 2 | 4 |" in text, "half a microsecond is rounded to even"
    (tree,) = [line for line in text.splitlines() if line.startswith("| tree | token_level | pl")]
    assert tree.endswith("| - | - |"), "no sort was timed"
    assert tree.count("| - |") == 2, "trees have no aim"
    assert "2 of 3 forms of chains; not for chain token_level greedy one-hot (2.1)." in text
    assert "Slower than torch: chain token_level plain one-hot, tree" in text
    assert "not measured" not in text
    assert "`python -m specmla.bench accept --rule token_level block" in text
    assert str(tmp_path) not in text
    trees = json.loads((RESULTS / "h200_trees.json").read_text())
    trees["rows"] = [row for row in trees["rows"] if "fused" not in row["part"]]
    (file.parent / "h200_trees.json").write_text(json.dumps(trees))
    assert "have not been timed yet" not in figures(file.parent)
    found["forms_left"] = 4
    found["rows"] = [r for r in found["rows"] if r["shape"] == "chain"]
    found["rows"][0] |= {"status": "wrong", "us": None, "reason": "2 of 2"}
    file.write_text(json.dumps(found))
    text = figures(file.parent)
    assert "4 forms more were not measured" in text
    assert "Wrong: chain token_level greedy one-hot." in text
    assert "have not been timed yet" in text


@pytest.mark.parametrize("name", ["h200_trees", "h200_decode"])
def test_what_a_cpu_measures_is_shown_as_a_cpus(name, tmp_path):
    file = tmp_path / "results" / f"{name}.json"
    file.parent.mkdir()
    words = {
        "h200_trees": "trees --requests 2 --nodes 5 --vocab 50 --layers 2 --rank 8 --rope 8 "
        "--reps 1",
        "h200_decode": "decode --draft ngram --batches 1 --temperatures 0 --max-tokens 8 --turns 1",
    }[name]
    assert main([*words.split(), "--device", "cpu", "--json", str(file)]) == 0
    text = figures(file.parent)
    assert "one CPU (" in text
    assert "captured" not in text.replace("uncaptured", "")
    assert f"`python -m specmla.bench {words.split()[0]} " in text
    assert str(tmp_path) not in text
    if name == "h200_trees":
        assert "of 6 nodes, 2 requests, 50 ids, float32, by the rules in torch, one" in text
        assert "| token_level, dense q, all |" in text
        assert "fused kernels (`acceptance=" in text
    else:
        assert "| ngram |" in text
        assert "Host time of a step, µs" not in text  # of a CPU all time is the host's


def test_the_hosts_time_of_captured_loops_is_shown_by_batch():
    rows = json.loads((RESULTS / "h200_decode.json").read_text())["rows"]
    text = figures()
    for batch in {row["requests"] for row in rows}:
        for drafts in (False, True):
            us = [
                row["host_us"]
                for row in rows
                if row["requests"] == batch and bool(row["drafts"]) == drafts
            ]
            assert f"{min(us):.0f} to {max(us):.0f}" in text.split("plain and then with")[1]
