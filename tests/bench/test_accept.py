"""`specmla.bench accept` at sizes that a CPU runs in moments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specmla.bench import accept, accept_command
from specmla.bench.__main__ import main
from specmla.bench.accept_forms import SAMPLINGS, AcceptOptions, Form, list_forms, make_data
from specmla.bench.accept_warm import warm_in_processes
from specmla.verify.rules.registry import LOSSLESS, RULES

SIZES = ["--requests", "2", "--drafts", "1", "--vocab", "50", "--reps", "2", "--device", "cpu"]
ALL = list(list_forms(["chain", "tree"], LOSSLESS, SAMPLINGS,
                      ["one-hot", "dense"]))  # fmt: skip


def run(tmp_path: Path, *words: str) -> tuple[int, dict[str, Any]]:
    file = tmp_path / "accept.json"
    status = main(["accept", *words, *SIZES, "--nodes", "3", "--json", str(file)])
    found: dict[str, Any] = json.loads(file.read_text())
    return status, found


def options(**changes: Any) -> AcceptOptions:
    sizes = {"requests": 3, "drafts": 2, "vocab": 60, "nodes": 6, "spread": 4.0, "reps": 1}
    kind = {"dtype": torch.float32, "device": torch.device("cpu")}
    return AcceptOptions(**(sizes | kind | changes))


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_every_form_is_checked_and_timed(tmp_path: Path, shape: str) -> None:
    words = ["--shape", shape, "--rule", "token_level", "--sampling", "greedy", "plain", "min-p"]
    status, found = run(tmp_path, *words)
    assert status == 0
    rows = found["rows"]
    forms = {(r["sampling"], r["q"], r["provider"]) for r in rows}
    assert len(forms) == len(rows) == (1 + 2 * 2) * 3
    drafts = 1 if shape == "chain" else 3
    for row in rows:
        if row["provider"] == "triton" and row["status"] == "refused":
            assert "TRITON_INTERPRET" in row["reason"]
            continue
        assert row["status"] == "timed", row["reason"]
        assert row["times_read"] == pytest.approx(row["us"] / row["read_us"])
        logits = 2 * (drafts + 1) * 50 * 4
        assert row["bytes"] == logits + (2 * drafts * 50 * 4 if row["q"] == "dense" else 0)
        assert row["read_us"] == pytest.approx(1e6 * row["bytes"] / found["copy_bytes_per_s"])
    assert {r["aim"] for r in rows} == ({2.0, 5.0} if shape == "chain" else {None})
    assert found["env"]["mode"]
    assert found["forms_left"] == 0


CHEAP = [f for f in ALL if f.sampling in ("greedy", "plain")]
"""Filters take long under the interpreter: one of them, the kernels' own tests have the others."""


@pytest.mark.parametrize("form", [*CHEAP, Form("chain", "token_level", "top-k", True)], ids=str)
def test_kernels_decide_a_form_as_the_rule_does(form: Form) -> None:
    pytest.importorskip("triton")
    from specmla.kernels.prims import INTERPRETED

    if not INTERPRETED:
        pytest.skip("kernels are not interpreted; the command itself compares them on a GPU")
    small = options(requests=2 if form in CHEAP else 1)
    rows = list(accept.measure(form, small, 1e9))
    assert [row["status"] for row in rows] == ["timed"] * 3, rows


def test_forms_that_are_others_are_left_out() -> None:
    assert len(ALL) == len(set(ALL)) == (11 + 10 + 5) + (11 + 5)
    assert {f.rule for f in ALL if f.sampling == "greedy"} == {"token_level"}
    assert not any(f.dense for f in ALL if f.rule == "sample_match" or f.sampling == "greedy")
    assert len({f.compiled for f in ALL}) == (4 + 4 + 2) + (4 + 2)


def test_trees_are_binary_and_their_one_hot_siblings_differ() -> None:
    data = make_data(Form("tree", "token_level", "plain", False), options(), 3)
    assert data.tree is not None
    assert data.tree.parents.tolist() == [[0, 0, 1, 1, 2, 2]] * 3
    assert (data.drafts[:, ::2] != data.drafts[:, 1::2]).all()
    assert data.q is None
    assert data.nbytes == 3 * 7 * 60 * 4


def test_wrong_decisions_are_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")

    def wrong(*args: object) -> torch.Tensor:
        return torch.full((2, 2), -7, dtype=torch.int64)

    monkeypatch.setattr(accept, "fused", wrong)
    words = ["--shape", "chain", "--rule", "block", "--sampling", "plain", "--q", "dense"]
    status, found = run(tmp_path, *words)
    row = found["rows"][0]
    if row["status"] == "refused":
        pytest.skip("kernels are neither interpreted nor is there a GPU")
    assert status == 1
    assert row["status"] == "wrong"
    assert row["us"] is None
    assert "2 of 2 requests differ" in row["reason"]


def test_what_breaks_leaves_the_others_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> torch.Tensor:
        raise RuntimeError("no memory for this")

    monkeypatch.setattr(accept, "_sorted", broken)
    words = ["--shape", "chain", "--rule", "sample_match", "--sampling", "plain"]
    _, found = run(tmp_path, *words)
    assert [row["status"] for row in found["rows"]][1:] == ["timed", "failed"]
    assert "no memory for this" in found["rows"][2]["reason"]


def test_a_budget_ends_with_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]

    def slow(*args: object) -> list[dict[str, Any]]:
        now[0] += 10.0
        return []

    monkeypatch.setattr(accept_command, "measure", slow)
    monkeypatch.setattr(accept_command.time, "monotonic", lambda: now[0])
    words = ["--shape", "chain", "--rule", "token_level", "--q", "one-hot", "--budget", "60"]
    status, found = run(tmp_path, *words)
    assert status == 0
    assert found["forms_left"] == 2  # 40 s and 1.5 times 20 more don't fit
    assert "2 of 6 forms did not fit into 60 s" in capsys.readouterr().out


def test_processes_that_compile_say_what_went_wrong() -> None:
    """Each form once in a process of its own; one that raises or hangs only costs its forms."""
    pytest.importorskip("triton")
    from specmla.kernels.prims import INTERPRETED

    if not INTERPRETED and not torch.cuda.is_available():
        pytest.skip("kernels are neither interpreted nor is there a GPU")
    chain, tree = (Form(shape, "token_level", "plain", False) for shape in ("chain", "tree"))
    assert warm_in_processes([chain, tree, chain], options(), 2, 120.0) == []
    (broken,) = warm_in_processes([chain._replace(rule="none")], options(), 1, 120.0)
    assert broken == "a process that compiled ended with 1: chain none plain one-hot"
    (late,) = warm_in_processes([tree, chain], options(), 1, 0.0)
    assert late == (
        "not compiled within 0 s: tree token_level plain one-hot, chain token_level plain one-hot"
    )


def test_lossy_rules_are_timed_in_torch_alone(tmp_path: Path) -> None:
    lossy = {"lossy_typical", "lossy_relaxed"}
    both = list(list_forms(["chain", "tree"], RULES, SAMPLINGS, ["one-hot", "dense"]))
    assert set(both) - set(ALL) == {Form("chain", name, "plain", False) for name in lossy}
    status, found = run(tmp_path, "--rule", *sorted(lossy))
    assert status == 0
    got = {(r["rule"], r["provider"], r["status"], r["aim"]) for r in found["rows"]}
    assert got == {(n, p, "timed", None) for n in lossy for p in ("torch", "sort")}


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["accept", "--rule", "typical"])
    assert left.value.code == 2
    assert "'typical'" in capsys.readouterr().err


def test_trees_that_no_mask_holds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["accept", "--nodes", "64", *SIZES]) == 2
    assert "nodes is 64, accepted are 1 to 63" in capsys.readouterr().err
