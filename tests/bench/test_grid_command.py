"""The commands `grid` and `plot`: resuming, budgets, files, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specmla.backends.base import AttentionOutput
from specmla.backends.reference import ReferenceBackend
from specmla.bench import __main__ as command
from specmla.bench import grid_command
from specmla.bench.ledger import Ledger
from specmla.bench.points import Point
from specmla.bench.provider import BackendProvider, Provider, get_provider
from specmla.bench.within_budget import within_budget
from specmla.errors import ArgumentError

SHAPE = ["--heads", "2", "--rank", "32", "--rope", "16", "--page-size", "16", "--device", "cpu"]
TWO = ["--batch", "2q2s20", "1q1-1s33"]


class Counting(BackendProvider):
    """The reference backend; counts runs, may be missing or wrong."""

    def __init__(self) -> None:
        super().__init__(ReferenceBackend())
        self.name, self.runs, self.is_there, self.factor = "counting", 0, True, 1.0

    def missing(self) -> list[str]:
        return [] if self.is_there else ["not installed"]

    def run(self, *args: Any) -> AttentionOutput:
        self.runs += 1
        got = super().run(*args)
        return AttentionOutput(got.out * self.factor, got.lse)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    made = Counting()

    def find(name: str, files: Any) -> Provider:
        return made if name == "counting" else get_provider(name, files)

    monkeypatch.setattr(grid_command, "get_provider", find)
    return made


def grid(*words: str) -> int:
    return command.main(["grid", *SHAPE, *words])


def rows_of(file: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    return found


def test_file_has_environment_ceilings_runs_and_rows(tmp_path: Path, counting: Counting) -> None:
    file = tmp_path / "g.json"
    assert grid(*TWO, "--providers", "counting", "fa3", "--json", str(file)) == 0
    content = json.loads(file.read_text())
    assert content["env"]["ceilings"]["gemm_tflops"] > 0
    assert len(content["env"]["runs"]) == 1
    names = [(row["batch"], row["provider"], row["status"]) for row in content["rows"]]
    assert names == [
        ("2q2s20", "counting", "timed"),
        ("2q2s20", "fa3", "absent"),
        ("1q1-1s33", "counting", "timed"),
        ("1q1-1s33", "fa3", "absent"),
    ]
    timed = content["rows"][0]
    assert timed["us"] > 0
    assert timed["run"] == 0
    assert "reason" not in timed
    assert "--fa3 FILE" in content["rows"][1]["reason"]
    assert [path.name for path in tmp_path.iterdir()] == ["g.json"]


def test_measured_points_are_skipped_and_new_ones_join(
    tmp_path: Path, counting: Counting, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--providers", "counting", "--json", str(tmp_path / "g.json")]
    grid(*TWO, *words)
    before = rows_of(tmp_path / "g.json")
    counting.runs = 0
    assert grid(*TWO, *words) == 0
    assert counting.runs == 0
    assert rows_of(tmp_path / "g.json") == before
    assert "2 points, 2 of them measured before" in capsys.readouterr().out
    grid(*TWO, "3q1s9", *words)
    after = rows_of(tmp_path / "g.json")
    assert after[:2] == before
    assert [row["run"] for row in after] == [0, 0, 1]


def test_again_replaces_rows(tmp_path: Path, counting: Counting) -> None:
    words = [*TWO, "--providers", "counting", "--json", str(tmp_path / "g.json")]
    grid(*words)
    grid(*words, "--again")
    assert [row["run"] for row in rows_of(tmp_path / "g.json")] == [1, 1]


def test_absent_provider_is_measured_once_it_is_there(tmp_path: Path, counting: Counting) -> None:
    words = [*TWO, "--providers", "counting", "reference", "--json", str(tmp_path / "g.json")]
    counting.is_there = False
    grid(*words)
    grid(*words)
    assert {row["run"] for row in rows_of(tmp_path / "g.json")} == {0}
    counting.is_there = True
    grid(*words)
    rows = rows_of(tmp_path / "g.json")
    # The others at these points are measured again too: a point's rows are from one call.
    assert {row["run"] for row in rows} == {1}
    assert {row["status"] for row in rows} == {"timed"}


def test_wrong_result_ends_with_one(
    tmp_path: Path, counting: Counting, capsys: pytest.CaptureFixture[str]
) -> None:
    counting.factor = 2.0
    file = tmp_path / "g.json"
    assert grid(*TWO, "--providers", "counting", "--json", str(file)) == 1
    assert {row["status"] for row in rows_of(file)} == {"wrong"}
    assert "counting wrong" in capsys.readouterr().out


def test_file_is_written_after_each_point(
    tmp_path: Path, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, seen = tmp_path / "g.json", []
    real = grid_command.measure_point

    def watching(*args: Any) -> Any:
        seen.append(len(rows_of(file)) if file.exists() else 0)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(grid_command, "measure_point", watching)
    with pytest.raises(KeyboardInterrupt):
        grid(*TWO, "--providers", "counting", "--json", str(file))
    assert seen == [0, 1]
    assert len(rows_of(file)) == 1


def test_point_that_fails_as_a_whole_is_noted_and_passed_by(
    tmp_path: Path, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "g.json"
    real = grid_command.measure_point

    def failing(point: Point, *rest: Any) -> Any:
        if point.batch == TWO[1]:
            raise RuntimeError("out of memory\ntrace")
        return real(point, *rest)

    monkeypatch.setattr(grid_command, "measure_point", failing)
    grid(*TWO, "--providers", "counting", "--json", str(file))
    first, second = rows_of(file)
    assert first["reason"] == "the point failed: RuntimeError: out of memory"
    assert (first["status"], second["status"]) == ("failed", "timed")


def test_lost_device_ends_the_run_and_keeps_the_rows(
    tmp_path: Path, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid_command, "device_is_lost", lambda device: True)
    assert grid(*TWO, "--providers", "counting", "--json", str(tmp_path / "g.json")) == 1
    assert len(rows_of(tmp_path / "g.json")) == 1


def run_within(budget: float, *seconds: float) -> float:
    """Walk over points that take `seconds` (the last one over and over); gives the end time."""
    now, times = [0.0], [*seconds, *[seconds[-1]] * 200]
    points = [Point(f"1q1s{i}", 1) for i in range(1, 150)]
    for took, _ in zip(times, within_budget(points, budget, lambda: now[0], 0.0), strict=False):
        now[0] += took
    return now[0]


def test_budget_stops_before_it_is_used_up() -> None:
    # After 25, tens while 1.5 x 25 more would still fit.
    assert run_within(100.0, 25.0, 10.0) == 65.0
    assert run_within(60.0, 10.0) == 40.0  # 1.5 x 20 s, what a first point may take


def test_a_long_point_is_forgotten_after_some_others() -> None:
    assert run_within(200.0, 90.0, 5.0) == 90.0
    assert run_within(300.0, 90.0, 5.0) == 295.0


def test_budget_too_small_for_anything() -> None:
    assert list(within_budget([Point("1q1s1", 1)], 10.0, lambda: 0.0, 0.0)) == []


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--only", "targets"], "--only is given with --batch"),
        (["--batch", "4x"], "'4x' is not [count]q<rows>"),
        (["--providers", "nope"], "provider is 'nope', accepted are ['fa3'"),
        (["--json", "/nowhere/at/all.json"], "existing folder"),
        (["--budget", "0"], "'0' is not an integer >= 1"),
    ],
)
def test_bad_arguments(words: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    status: object
    try:
        status = grid("--batch", "1q1s9", *words)
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    captured = capsys.readouterr()
    assert part in captured.err
    assert captured.err.count("\n") == 1


def test_plot_command_draws_and_judges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "g.json"
    ceilings = {"copy_gbps": 4000.0, "gemm_tflops": 700.0}
    file.write_text(json.dumps({"env": {"ceilings": ceilings}, "rows": []}))
    assert command.main(["plot", str(file), "--out", str(tmp_path)]) == 0
    assert (tmp_path / "ratio.png").exists()
    assert (tmp_path / "roofline.png").exists()
    assert "| latency, geometric mean of 0 points |" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["no.json", "--out", "."], [__file__, "--out", "/nowhere"]])
def test_plot_command_refuses(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["plot", *words]) == 2
    assert "accepted is" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["{", '{"rows": []}', '{"env": {}, "rows": [{"batch": "x"}]}', "[]"]
)
def test_ledger_refuses_other_files(text: str, tmp_path: Path) -> None:
    file = tmp_path / "g.json"
    file.write_text(text)
    with pytest.raises(ArgumentError, match="is no file of a grid"):
        Ledger(file)


def test_grid_of_the_default_points_starts_with_the_targets(
    counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def stop(points: Any, options: Any) -> None:
        seen.extend(points)
        raise ArgumentError("enough")

    monkeypatch.setattr(grid_command, "make_pool", stop)
    words = ["grid", "--device", "cpu", "--only", "targets", "--providers", "counting"]
    assert command.main(words) == 2
    assert seen[0] == Point("32q4s8k", 16)
    assert len(seen) == 9
