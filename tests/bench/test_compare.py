"""Drafters x rules: chances against enumeration and frequencies, rows, intervals, prompts."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest
import torch

from drafters import DraftModelDrafter, DraftModelTreeDrafter, NgramDrafter
from specmla import ArgumentError, SparseProbs
from specmla.__main__ import main
from specmla.bench.bootstrap import interval, ratios, resamples
from specmla.bench.compare import cases_of, compare
from specmla.bench.compare_chances import depth_reach, overlap, reach_of
from specmla.bench.compare_prompts import held_out_files, held_out_prompts, is_held_out
from specmla.bench.compare_run import Contender, RunSettings, run_contender
from specmla.bench.figures import RESULTS
from specmla.verify.accept import LOSSLESS, decide
from specmla.verify.rules.terms import Ending, RuleTerms
from tests.drafters.networks import VOCAB, tiny_target

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from pairtrain.corpus import is_held_out as left_out_of_training

PROMPTS = [[3, 1, 4, 1, 5, 9, 3, 1], [2, 7, 1, 8], [5, 9] * 5]


@pytest.fixture(scope="module")
def target():
    return tiny_target(layers=2)


def models(target) -> list[Contender]:
    return [
        Contender("ngram", lambda step: NgramDrafter(VOCAB)),
        Contender("model", lambda step: DraftModelDrafter(target, num_pages=200, page_size=8)),
        Contender(
            "model-tree",
            lambda step: DraftModelTreeDrafter(
                target, num_pages=200, page_size=8, rates=(0.5, 0.4)
            ),
            tree=True,
            chain="model",
        ),
    ]


def test_overlap_is_the_same_in_every_form():
    torch.manual_seed(0)
    p, q = torch.rand(2, 3, 7, 5, dtype=torch.float64).softmax(-1)
    drafts = torch.randint(5, (3, 7))
    want = torch.minimum(p, q).sum(-1)
    assert torch.allclose(overlap(p, q, drafts), want, atol=1e-15)
    ids = torch.rand(3, 7, 5).argsort(-1)
    sparse = SparseProbs(ids, q.gather(-1, ids))
    assert torch.allclose(overlap(p, sparse, drafts), want, atol=1e-15)
    one_hot = torch.nn.functional.one_hot(drafts, 5).double()
    assert torch.allclose(overlap(p, None, drafts), overlap(p, one_hot, drafts), atol=1e-15)


@pytest.mark.parametrize("ending", [Ending.FIRST_REFUSAL, Ending.LAST_PASS])
def test_reach_is_the_mean_of_decisions(ending):
    torch.manual_seed(1)
    accept = torch.rand(1, 3, dtype=torch.float64)
    terms = RuleTerms(accept, torch.ones(1, 4, 2, dtype=torch.float64), ending)
    want = torch.zeros(3, dtype=torch.float64)
    for coins in itertools.product((True, False), repeat=3):
        u = torch.where(torch.tensor([coins]), accept / 2, accept + (1 - accept) / 2)
        passes = torch.tensor(coins)
        chance = torch.where(passes, accept[0], 1 - accept[0]).prod()
        drafts = torch.zeros(1, 3, dtype=torch.int64)
        count = decide(terms, drafts, u, torch.full((1,), 0.5, dtype=torch.float64)).num_accepted
        want += chance * (torch.arange(3) < count)
    assert torch.allclose(reach_of(terms)[0], want, atol=1e-15)


def test_depths_of_a_tree_add_up():
    """Anchor with children a, b; a with children c, d; b with child e, listed out of order."""
    from specmla.staging import send_arrays
    from specmla.verify.tree import keep_nodes, tree_arrays, tree_tables

    parents = [1, -1, -1, 1, 2]  # c, a, b, d, e
    tree = keep_nodes(parents, 9, 9)
    sent = send_arrays(tree_arrays([tree], [5], 5), torch.device("cpu"))
    tables = tree_tables(sent, [tree], [5])
    accept = torch.tensor([[0.5, 0.6, 0.25, 0.4, 0.3]], dtype=torch.float64)
    a, b = 0.6, 0.4 * 0.25
    deeper = a * (0.5 + 0.5 * 0.4) + b * 0.3
    assert depth_reach(accept, tables)[0] == pytest.approx([a + b, deeper], abs=1e-15)


@pytest.mark.parametrize(
    ("name", "rule"),
    [("model", r) for r in LOSSLESS] + [("model-tree", "token_level"), ("ngram", "block")],
)
def test_expected_tokens_are_what_many_runs_emit(target, name, rule):
    """Chances and outcomes of the same steps: their difference has mean 0 at every step."""
    contender = next(c for c in models(tiny_target(layers=1)) if c.name == name)
    settings = RunSettings(num_drafts=3, num_nodes=6, max_tokens=24, batch=16)
    run = run_contender(target, PROMPTS * 16, contender, rule, 1.0, settings)
    shown = "multi_round" if contender.tree else rule
    gaps = []
    for c in run.continuations:
        assert sum(c.stats.accepted_per_position) >= c.stats.num_emitted_tokens - c.stats.num_steps
        gaps.append(sum(c.reach.get(shown, [])) - sum(c.stats.accepted_per_position))
    gap = torch.tensor(gaps, dtype=torch.float64)
    assert gap.abs().max() > 0.01  # chances are no outcomes
    assert abs(float(gap.mean())) < 4 * float(gap.std()) / len(gap) ** 0.5


def test_greedy_chances_are_outcomes(target):
    for contender in models(tiny_target(layers=1)):
        settings = RunSettings(num_drafts=3, num_nodes=6, max_tokens=12, batch=2)
        run = run_contender(target, PROMPTS, contender, "block", 0.0, settings)
        for c in run.continuations:
            reach = c.reach.get("greedy", [])
            found = c.stats.accepted_per_position
            assert [round(n, 9) for n in reach] == found + [0] * (len(reach) - len(found))


def test_rows_and_gains(target):
    cases = cases_of(models(target), ["token_level", "block", "sample_match"], [0.0, 1.0])
    labels = [(c.contender.name, c.rule) for c in cases if c.temperature]
    assert labels[-2:] == [("model-tree", "multi_round"), ("model-tree", "sample_match")]
    assert [c.rule for c in cases if not c.temperature] == ["greedy"] * 3
    settings = RunSettings(num_drafts=3, num_nodes=6, max_tokens=7, batch=2)
    heard: list[str] = []
    found = compare(target, PROMPTS, cases, settings, 2, heard.append)
    assert len(heard) == 2 * 2 * (len(cases) + 2)
    assert len(found["rows"]) == len(cases)
    json.dumps(found, allow_nan=False)
    by = {(r["drafter"], r["rule"], r["temperature"]): r for r in found["rows"]}
    same = by["model", "greedy", 0.0]  # drafts of the target itself: all accepted
    assert same["overlap_per_position"] == [1, 1, 1]
    assert same["expected_acceptance_per_position"] == same["acceptance_rate_per_position"]
    assert by["model", "token_level", 1.0]["overlap_per_position"] == pytest.approx(
        [1] * 3, abs=1e-4
    )
    assert by["model", "token_level", 1.0]["continuations"] == 6
    assert same["continuations"] == 3
    for row in found["rows"]:
        low, high = row["expected_tokens_per_step_interval"]
        assert low - 1e-9 <= row["expected_tokens_per_step"] <= high + 1e-9
        assert row["tokens_per_s"] > 0 < row["plain_tokens_per_s"]
    kinds = {(g["what"], g["drafter"], g["temperature"]) for g in found["gains"]}
    assert ("block over token_level", "model", 1.0) in kinds
    assert ("tree over chain", "model-tree", 0.0) in kinds


def test_the_text_does_not_depend_on_the_drafter(target):
    settings = RunSettings(num_drafts=3, num_nodes=6, max_tokens=12)
    for rule, temperature in (("token_level", 0.0), ("sample_match", 1.0)):
        texts = {
            str(
                [
                    c.tokens
                    for c in run_contender(
                        target, PROMPTS, who, rule, temperature, settings
                    ).continuations
                ]
            )
            for who in [Contender("plain", None), *models(tiny_target(layers=1))]
        }
        assert len(texts) == 1


def test_bootstrap():
    drawn = resamples(200)
    torch.manual_seed(3)
    values = torch.rand(200, dtype=torch.float64)
    low, high = interval(ratios(values.tolist(), [1.0] * 200, drawn))
    error = float(values.std()) / 200**0.5
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.1)
    assert low < float(values.mean()) < high
    assert interval(ratios([1.0, 0.0], [2.0, 0.0], resamples(2))) == [0.5, 0.5]
    with pytest.raises(ArgumentError, match="num_prompts is 0"):
        resamples(0)


class Words:
    """Stands in for a tokenizer: an id a word."""

    def encode(self, text):
        return type("E", (), {"ids": [len(word) for word in text.split()]})()


def test_prompts_come_from_modules_that_training_left_out():
    modules = held_out_files()
    assert len(modules) >= 8
    trained = json.loads((RESULTS / "pair_training.json").read_text())["corpus"]
    for module in modules:
        assert left_out_of_training(module, 4)
        if sys.version_info[:2] == (3, 12):
            assert module in trained["held_out_modules"]
    for name in (*sys.stdlib_module_names, "torch", "numpy", "a", "b"):
        assert is_held_out(name) == left_out_of_training(name, 4)
    prompts = held_out_prompts(Words(), 9, seed=1)
    assert [len(p) for p in prompts[:4]] == [32, 64, 96, 160]
    assert prompts == held_out_prompts(Words(), 9, seed=1) != held_out_prompts(Words(), 9, seed=2)


def test_an_interpreter_without_sources_is_named(tmp_path):
    with pytest.raises(ArgumentError, match="--prompts"):
        held_out_files(tmp_path)


def test_command(tmp_path, capsys):
    texts = tmp_path / "texts.json"
    texts.write_text(json.dumps(["def add(a, b):\n    return", "import os\nimport"]))
    plot = tmp_path / "found.png"
    drafts = ["--draft", "draft_model,draft_model-tree", "--prompts", str(texts)]
    sizes = ["--max-tokens", "6", "-k", "2", "--nodes", "4", "--temperature", "1"]
    sizes += ["--rule", "block", "--json", "--plot", str(plot)]
    code = main(["compare", *drafts, *sizes])
    shown = capsys.readouterr()
    assert code == 0
    found = json.loads(shown.out)
    want = {"drafter", "rule", "temperature", "tokens_per_step", "mean_acceptance_length"}
    want |= {"draft_acceptance_rate", "tokens_per_s", "plain_tokens_per_s"}
    assert all(want <= row.keys() for row in found["rows"])
    assert len(found["rows"]) == 2
    assert found["options"]["target"] == "shipped"
    assert str(tmp_path) not in shown.out
    assert "multi_round" in shown.err
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert plot.stat().st_size > 20_000
