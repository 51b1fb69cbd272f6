from __future__ import annotations

import json
from pathlib import Path

import pytest

from specmla.bench.plot import plot_rows
from specmla.bench.report import REFUSED, VerifyRow, document, table, write_json

BASE = {"batch": "32q4s8k", "heads": 16, "mask": "causal", "page_size": 64, "dtype": "bfloat16"}
TIMED_ROW = VerifyRow(
    **BASE,
    provider="triton",
    us=123.45,
    us_p10=120.0,
    us_p90=130.0,
    ratio=1.0,
    gbps=2446.3,
    tflops=295.7,
    rel_err=1.8e-3,
    plan_us=210.0,
    scratch_bytes=3 * 2**20,
    method="graph",
)
REFUSED_ROW = VerifyRow(**BASE, provider="rows", status=REFUSED, reason="no such mask")


def test_table_aligns_and_ends_a_row_without_figures_with_its_reason() -> None:
    header, timed, refused, reason = table([TIMED_ROW, REFUSED_ROW]).splitlines()
    assert timed.split() == [
        "32q4s8k", "16", "triton", "123.5", "2446.3", "295.7", "1.00x", "1.80e-03", "210.0", "3.00",
    ]  # fmt: skip
    assert refused.split() == ["32q4s8k", "16", "rows", *["-"] * 7]
    assert reason.strip() == "rows: no such mask"
    assert header.index("µs") + len("µs") == timed.index("123.5") + len("123.5")


def test_document_gives_a_reason_only_where_there_is_no_figure() -> None:
    rows = document({"date": "now"}, [TIMED_ROW, REFUSED_ROW])["rows"]
    assert "reason" not in rows[0]
    assert rows[1]["reason"] == "no such mask"
    assert rows[1]["us"] is None


def test_json_is_strict(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"us": 1.5})
    assert json.loads((tmp_path / "a.json").read_text()) == {"us": 1.5}
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "b.json", {"us": float("nan")})


def test_plot_draws_one_bar_a_figure(tmp_path: Path) -> None:
    plot_rows([TIMED_ROW, REFUSED_ROW], "title", tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert text.startswith("<?xml")
    plot_rows([TIMED_ROW], "title", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
