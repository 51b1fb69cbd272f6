"""`specmla.bench decode`: what is timed, what a row says, what is refused."""

from __future__ import annotations

import json

import pytest
import torch

from drafters import DraftModelDrafter, NgramDrafter
from specmla.bench import decode_case
from specmla.bench.__main__ import main
from specmla.bench.compare_run import Contender
from specmla.bench.decode import PLAIN, measure_decode
from specmla.bench.decode_case import DecodeCase, DecodeOptions
from specmla.bench.decode_overlap import OverlapCase
from specmla.cli import decode as command
from specmla.errors import ArgumentError
from tests.drafters.test_draft_model import tiny
from tests.e2e.conftest import VOCAB

PROMPTS = [[3, 1, 4, 1], [5, 9], [2, 6, 5, 3, 5, 8]]


@pytest.fixture(scope="module")
def target():
    return tiny(2, 32, 1)


def draft_model(target) -> Contender:
    """The target as its own draft: every draft of a greedy batch stands."""

    def make(step):
        return DraftModelDrafter(target, num_pages=60, page_size=16, backend="reference")

    return Contender("same", make)


def options(**changes) -> DecodeOptions:
    given = {"num_drafts": 3, "max_tokens": 24, "turns": 2, "backend": "reference"}
    return DecodeOptions(**(given | {"captured": False} | changes))


@pytest.mark.parametrize("captured", [False, True])
def test_rows_count_what_the_loop_did(target, captured):
    contenders = [draft_model(target), Contender("ngram", lambda step: NgramDrafter(VOCAB))]
    rows = measure_decode(target, contenders, PROMPTS, 0.0, options(captured=captured))
    assert [r["drafter"] for r in rows] == ["plain", "same", "ngram"]
    plain, same, ngram = rows
    # A token at a time: 24 less those of the prompt step and the one after it.
    assert (plain["steps"], plain["tokens_per_step"]) == (2 * 22, 1.0)
    assert plain["draft_acceptance_rate"] is None
    assert plain["speedup"] == 1.0
    # 1 + 4 tokens before the clock starts; then 4 a step until 24 are reached.
    assert same["steps"] == 2 * 5
    assert same["draft_acceptance_rate"] == 1.0
    assert 3.5 < same["tokens_per_step"] <= 4.0
    assert 1.0 <= ngram["tokens_per_step"] <= 4.0
    assert (same["draft_backend"], ngram["draft_backend"]) == ("reference", None)
    for row in rows:
        assert row["requests"] == 3
        assert row["captured"] is captured
        low, high = row["tokens_per_s_range"]
        assert 0 < low <= row["tokens_per_s"] <= high
        assert row["steps_per_s"] * row["step_us"] == pytest.approx(1e6, rel=0.5)
        assert row["host_us"] is None  # of a CPU all time is the host's


def test_the_step_decides_by_what_was_asked_for(target):
    """Interpreted, the kernels would take minutes: the step's choice and the row's word for it."""
    (row,) = measure_decode(target, [], PROMPTS[:1], 0.0, options(turns=1, max_tokens=8))
    assert row["acceptance"] == "torch"
    case = DecodeCase(target, PLAIN, PROMPTS[:1], 0.0, options(acceptance="torch"))
    assert case.step.acceptance == "torch"
    with pytest.raises(ArgumentError, match="acceptance is 'none'"):
        DecodeCase(target, PLAIN, PROMPTS[:1], 0.0, options(acceptance="none"))


def test_the_clock_runs_while_all_requests_do(target, monkeypatch):
    """A second a reading: three of a step, and one at both ends of the timed part."""
    ticks = iter(range(100_000))
    monkeypatch.setattr(decode_case.time, "perf_counter", lambda: float(next(ticks)))
    case = DecodeCase(target, PLAIN, PROMPTS, 0.0, options())
    turn = case.run(0)
    assert (turn.steps, turn.tokens) == (22, 3 * 22)
    assert turn.seconds == 22 * 4 + 1
    assert turn.host_seconds == 22 * 2
    assert not case.step.active
    assert case.step.blocks.num_free == case.step.blocks.num_pages


@pytest.mark.parametrize("captured", [False, True])
def test_steps_planned_ahead_emit_the_same_tokens(target, captured):
    ngram = Contender("ngram", lambda step: NgramDrafter(VOCAB))
    rows = measure_decode(
        target, [ngram, draft_model(target)], PROMPTS, 0.0,
        options(captured=captured, overlapped=True),
    )  # fmt: skip
    names = ["plain", "plain ahead", "ngram", "ngram ahead", "same"]
    assert [r["drafter"] for r in rows] == names
    # A step is under way when the clock starts, as one is when it stops.
    assert (rows[1]["steps"], rows[1]["tokens_per_step"]) == (2 * 22, 1.0)
    assert rows[3]["tokens_per_step"] >= 1.0
    case = OverlapCase(target, PLAIN, PROMPTS, 0.0, options(captured=captured))
    assert case.run(0).tokens == 3 * 22
    assert case.step.blocks.num_free == case.step.blocks.num_pages
    assert not case.step.active


def test_turns_have_seeds_of_their_own(target):
    case = DecodeCase(target, draft_model(target), PROMPTS, 1.0, options())
    seeds = {s.seed for turn in range(3) for _, s in case._batch(turn)}
    assert len(seeds) == 9
    assert case.run(1).tokens
    assert case.drafter.blocks.num_free == 60


def test_drafters_that_learn_are_made_anew(target):
    made = []

    def make(step):
        made.append(NgramDrafter(VOCAB))
        return made[-1]

    case = DecodeCase(target, Contender("ngram", make), PROMPTS, 0.0, options())
    case.run(0)
    case.run(1)
    assert len({id(d) for d in made}) == len(made) == 3


def test_the_command_writes_rows_and_where_they_come_from(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "use_one_thread", lambda device: None)
    file = tmp_path / "decode.json"
    words = ["decode", "--device", "cpu", "--batches", "1", "2", "--temperatures", "0", "1"]
    words += ["--max-tokens", "8", "--turns", "1", "--drafts", "2", "--json", str(file)]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "uncaptured (there are no graphs on a CPU)" in out
    assert out.count("draft_model") == 4
    found = json.loads(file.read_text())
    assert [(r["requests"], r["temperature"], r["drafter"]) for r in found["rows"]] == [
        (b, t, name)
        for b in (1, 2)
        for t in (0.0, 1.0)
        for name in ("plain", "ngram", "draft_model")
    ]
    env = found["env"]
    assert env["dtype"] == "float32"
    assert env["target"] == "shipped"
    assert env["prompts"]["count"] == 2
    assert str(tmp_path) not in json.dumps(found)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--draft", "nothing-there"], "draft has 'nothing-there'"),
        (["--draft", "draft_model-tree"], "accepted are drafters of chains"),
        (["--temperatures", "-1"], "is not served, accepted are values >= 0"),
        (["--temperatures", "warm"], "'warm' is no number"),
        (["--drafts", "0"], "is not an integer >= 1"),
        (["--json", "no/such/folder/x.json"], "can't be written"),
    ],
)
def test_bad_arguments_cost_one_line(words, message, capsys):
    try:
        status = main(["decode", "--device", "cpu", *words])
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
