"""`specmla.bench prefill` at sizes that a CPU runs in moments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specmla.bench import prefill
from specmla.bench.__main__ import main
from specmla.bench.prompt_kernels import KernelOptions, measure_kernels, with_ratios
from specmla.bench.prompt_providers import Prompts, get_prompt_provider

SIZES = ["--heads", "2", "--rank", "32", "--nope", "16", "--rope", "16", "--value", "24"]
SIZES += ["--page-size", "16", "--device", "cpu"]
OPTIONS = KernelOptions(2, 32, 24, torch.float32, torch.device("cpu"), 2)


def run(tmp_path: Path, *words: str, reps: int = 2) -> list[dict[str, Any]]:
    file = tmp_path / "prefill.json"
    assert main(["prefill", *words, *SIZES, "--reps", str(reps), "--json", str(file)]) == 0
    rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    return rows


def test_chunks_stand_beside_one_pass(tmp_path: Path) -> None:
    words = ["--contexts", "20", "64", "200", "--workspace", "96", "32", "--rows", "16"]
    rows = run(tmp_path, *words, "--kernel")
    forms = [(r["context"], r["form"], r["workspace_rows"], r["chunks"]) for r in rows]
    assert forms == [
        (20, "one pass", None, 0),
        (20, "chunks", 32, 1),
        (64, "one pass", None, 0),
        (64, "chunks", 32, 2),
        (200, "one pass", None, 0),
        (200, "chunks", 96, 2),  # and 8 rows beside the new ones
        (200, "chunks", 32, 6),
    ]
    assert all(r["us"] > 0 and r["peak_bytes"] is None for r in rows)
    whole = {r["context"]: r["us"] for r in rows if r["form"] == "one pass"}
    for row in rows:
        if row["form"] == "chunks":
            assert row["ratio"] == row["us"] / whole[row["context"]]
            assert row["rel_diff"] < 1e-6


def test_forms_are_timed_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass and chunks by turns, the median of each: 1, 2, 3 against 10, 20, 30."""
    seen: list[int] = []
    given = iter([1.0, 10.0, 3.0, 30.0, 2.0, 20.0])

    def host_us(call: Any, device: torch.device, *, reps: int) -> float:
        part = call.args[-1]
        seen.append(len(part.context))
        return next(given)

    monkeypatch.setattr(prefill, "host_us", host_us)
    words = ["--contexts", "64", "--workspace", "32", "--rows", "16", "--kernel"]
    rows = run(tmp_path, *words, reps=3)
    assert seen == [0, 2] * 3
    assert [(r["us"], r.get("ratio")) for r in rows] == [(2.0, None), (20.0, 10.0)]


def test_kernels_are_checked_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["reference", "sdpa", "flash", "fa3"]
    rows = run(
        tmp_path, "--contexts", "--kernel", "2q40s40", "1q40s40,1q7s7", "--providers", *names
    )
    found = {(r["batch"], r["provider"]): r for r in rows}
    for name in names[:3]:
        row = found["2q40s40", name]
        assert row["status"] == "timed"
        assert row["rel_err"] < 1e-6
        pairs = 2 * (40 * 41 // 2)
        flops = 2 * pairs * 2 * (32 + 24)
        assert row["tflops"] == pytest.approx(flops / row["us"] / 1e6)
    assert max(found["2q40s40", n]["of_best"] for n in names[:3]) == 1.0
    assert found["1q40s40,1q7s7", "reference"]["status"] == "timed"
    assert "accepted is one length" in found["1q40s40,1q7s7", "sdpa"]["reason"]
    assert "--fa3 FILE" in found["2q40s40", "fa3"]["reason"]
    assert "of best" in capsys.readouterr().out


def test_the_kernel_of_batch_invariant_prompts() -> None:
    pytest.importorskip("triton")
    given = {name: get_prompt_provider(name) for name in ("triton-folded", "triton")}
    rows = list(measure_kernels("1q40s40,1q7s7", given, OPTIONS))
    assert [r["status"] for r in rows] == ["timed", "timed"]
    assert all(r["rel_err"] < 1e-6 for r in rows)


def test_a_wrong_kernel_is_not_timed() -> None:
    class Wrong:
        def problems(self, prompts: Prompts) -> list[str]:
            return []

        def run(self, prompts: Prompts) -> Tensor:
            return get_prompt_provider("reference").run(prompts) * 1.001

    (row,) = with_ratios(list(measure_kernels("2q40s40", {"wrong": Wrong()}, OPTIONS)))
    assert (row["status"], row["us"], row["of_best"]) == ("wrong", None, None)


def test_fa3_is_called_as_its_schema_says(peer_operators: None) -> None:
    """Every argument of the operator is given, and by its name."""
    from tests.bench.conftest import FA3_SPACE

    seen: dict[str, Any] = {}
    provider = get_prompt_provider("fa3")
    operator = getattr(torch.ops, FA3_SPACE).fwd.default
    names = [a.name for a in operator._schema.arguments]

    class Library:
        def missing(self) -> list[str]:
            return []

        def operator(self, name: str) -> Any:
            assert name == "fwd"

            def attend(**given: Any) -> list[Tensor]:
                seen.update(given)
                out = get_prompt_provider("reference").run(prompts)
                return [out, out.new_zeros(out.shape[1], out.shape[0])]

            return attend

    provider.kernel.library = Library()  # type: ignore[attr-defined]
    prompts = make_prompts()
    provider.run(prompts)
    assert sorted(seen) == sorted(names)
    assert seen["v"] is prompts.value
    assert seen["cu_seqlens_k"].tolist() == [0, 40, 47]
    assert (seen["max_seqlen_q"], seen["max_seqlen_k"], seen["is_causal"]) == (40, 40, True)


def make_prompts() -> Prompts:
    from specmla.bench.prompt_kernels import _make_prompts

    return _make_prompts("1q40s40,1q7s7", OPTIONS)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--kernel", "2q4s8"], "it has 4 rows of 8 tokens"),
        (["--kernel", "2q4s4", "--providers", "nope"], "provider is 'nope', accepted are"),
        (["--contexts", "0"], "'0' is not an integer >= 1"),
        (["--contexts", "1q"], "'1q' is not an integer >= 1"),
    ],
)
def test_bad_arguments_cost_one_line(
    words: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: object = main(["prefill", *words, *SIZES])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    err = capsys.readouterr().err
    assert part in err
    assert err.count("\n") == 1
