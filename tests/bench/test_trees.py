"""The `trees` command: every part is timed, JSON holds what is printed, bad sizes are refused."""

from __future__ import annotations

import json

from specmla.bench import __main__ as command

SMALL = ["trees", "--requests", "2", "--vocab", "50", "--layers", "2", "--rank", "16"]
SMALL += ["--rope", "8", "--reps", "2", "--device", "cpu"]


def test_every_part_is_timed(capsys, tmp_path):
    file = tmp_path / "trees.json"
    assert command.main([*SMALL, "--nodes", "15", "--top-p", "0.9", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    found = json.loads(file.read_text())
    names = [row["part"] for row in found["rows"]]
    assert names[0] == "copy"
    assert {"multi_round, one-hot", "multi_round, dense q", "sample_match, all", "move"} < set(
        names
    )
    assert all(row["us"] > 0 for row in found["rows"])
    assert found["rows"][0]["times_read_once"] == 2
    assert all(name in out for name in names)


def test_trees_that_no_mask_holds_are_refused(capsys):
    assert command.main([*SMALL, "--nodes", "64"]) == 2
    assert "nodes is 64, accepted are 1 to 63" in capsys.readouterr().err
    assert command.main([*SMALL, "--nodes", "1"]) == 0
