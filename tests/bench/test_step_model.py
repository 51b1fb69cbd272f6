"""`specmla.bench step --config` at sizes that a CPU runs in moments."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from specmla.bench.__main__ import main
from specmla.bench.step_config import read_config
from specmla.bench.step_model import (
    ModelStepOptions,
    _run,
    break_even,
    expected_tokens,
    make_model,
    measure_batch,
)
from specmla.config import MLAConfig
from specmla.models.config import DeepseekConfig
from specmla.models.moe import MoEConfig

ATTENTION = MLAConfig(
    hidden_size=48,
    num_heads=4,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=24,
)
EXPERTS = MoEConfig(
    n_routed_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=20,
    n_shared_experts=1,
    first_k_dense_replace=1,
    topk_method="noaux_tc",
    scoring_func="sigmoid",
    n_group=2,
    topk_group=1,
)
CONFIG = DeepseekConfig(ATTENTION, 6, 61, 64, 256, moe=EXPERTS)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG.to_hf()))
    return path


def options(*acceptance: float, reps: int = 40) -> ModelStepOptions:
    return ModelStepOptions(
        config=dataclasses.replace(CONFIG, moe=None, num_layers=1),
        acceptance=acceptance,
        context=9,
        page_size=4,
        backend="reference",
        device=torch.device("cpu"),
        dtype=torch.float32,
        reps=reps,
    )


def test_a_config_is_cut_to_a_rank_of_some_layers(config_file: Path) -> None:
    found = read_config(config_file, 2, 4)
    assert (found.num_layers, found.attention.num_heads) == (2, 1)
    assert found.moe is None
    assert found.intermediate_size == (3 + 1) * 20 // 4
    assert found.attention == dataclasses.replace(ATTENTION, num_heads=1)
    assert read_config(config_file.parent, 3, 1).num_layers == 3
    routed = read_config(config_file, 2, 4, "routed")
    assert routed.moe == dataclasses.replace(
        EXPERTS, moe_intermediate_size=5, first_k_dense_replace=0
    )
    assert [routed.is_moe_layer(i) for i in range(2)] == [True, True]
    dense = dataclasses.replace(CONFIG, moe=None)
    config_file.write_text(json.dumps(dense.to_hf()))
    assert read_config(config_file, 3, 2).intermediate_size == 32


@pytest.mark.parametrize("acceptance", [(1.0, 1.0), (0.0, 1.0), (1.0, 0.0)])
def test_certain_acceptance_is_met_exactly(acceptance: tuple[float, ...]) -> None:
    made = options(*acceptance, reps=4)
    rows = measure_batch(make_model(made), 3, made)
    assert [r["drafts"] for r in rows] == [0, 1, 2]
    for row in rows:
        assert row["measured_tokens"] == row["tokens_per_step"]
        assert row["captured_us"] is None, "there is no graph on a CPU"
        assert row["tokens_per_s"] == pytest.approx(
            3 * row["tokens_per_step"] / row["eager_us"] * 1e6
        )


def test_a_captured_step_emits_what_an_eager_one_does() -> None:
    made = options(1.0, 0.0, reps=4)
    model = make_model(made)
    with torch.no_grad():
        found = [_run(model, 3, 2, kind, made)[1] for kind in ("eager", "captured")]
    assert found == [2.0, 2.0]


def test_chances_are_met_on_average() -> None:
    """5 requests, 40 steps: 200 draws of each first draft, a standard deviation of 0.05 at most."""
    made = options(0.7, 0.5)
    row = measure_batch(make_model(made), 5, made)[2]
    assert row["tokens_per_step"] == pytest.approx(1 + 0.7 + 0.35)
    assert abs(row["measured_tokens"] - row["tokens_per_step"]) < 0.25


def test_break_even_counts_what_drafts_cost() -> None:
    assert expected_tokens(()) == 1.0
    assert expected_tokens((0.5, 0.5, 0.5)) == 1.875
    rates = [100.0, 130.0, 140.0, 101.0, 99.0, 102.0]
    rows = [{"drafts": k, "tokens_per_s": rate} for k, rate in enumerate(rates)]
    assert break_even(rows) == {"best_drafts": 2, "break_even_drafts": 5}
    assert break_even(rows[:1]) == {"best_drafts": 0, "break_even_drafts": 0}
    free, dear = options(1.0, reps=3), dataclasses.replace(options(1.0, reps=3), draft_us=1e9)
    model = make_model(free)
    assert break_even(measure_batch(model, 2, dear))["break_even_drafts"] == 0


def test_the_command_writes_rows_and_summaries(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "step.json"
    words = ["step", "--config", str(config_file), "--layers", "2", "--tp", "2", "--device", "cpu"]
    words += ["--acceptance", "0.9,0.5", "--batches", "1", "3", "--context", "20", "--reps", "2"]
    words += ["--page-size", "4", "--json", str(file), "--experts", "routed"]
    assert main(words) == 0
    content = json.loads(file.read_text())
    assert [(r["requests"], r["drafts"]) for r in content["rows"]] == [
        (b, k) for b in (1, 3) for k in (0, 1, 2)
    ]
    assert [s["requests"] for s in content["summaries"]] == [1, 3]
    assert content["env"]["config"]["num_attention_heads"] == 2
    assert content["env"]["config"]["n_routed_experts"] == 8
    assert "break-even K" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--acceptance", "0.8,1.2"], "accepts numbers from 0 to 1"),
        (["--acceptance", "high"], "is no list of numbers"),
        (["--draft-us", "-1"], "accepts numbers from 0 on"),
        (["--tp", "3"], "num_attention_heads is 4, accepted are multiples of --tp (3)"),
        (["--config", "nowhere.json"], "accepted is a config.json"),
    ],
)
def test_bad_arguments_cost_one_line(
    words: list[str], part: str, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: object = main(["step", "--config", str(config_file), "--device", "cpu", *words])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    err = capsys.readouterr().err
    assert part in err
    assert err.count("\n") == 1
