"""What README.md and the examples show is run as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from specmla.bench.figures import figures
from specmla.cli.support import support_table

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run(*command: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_is_a_snippet():
    assert SNIPPETS


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippet(snippet):
    assert "length" in run("-c", snippet)


def test_support_table_is_what_the_backends_declare():
    shown = README.split("<!-- support-table -->")[1].split("<!-- /support-table -->")[0]
    assert shown.strip() == support_table()


def test_figures_are_those_of_the_raw_results():
    shown = README.split("<!-- figures -->")[1].split("<!-- /figures -->")[0]
    assert shown.strip() == figures()


def test_local_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert links
    assert not missing


def between(name: str) -> str:
    return README.split(f"<!-- {name} -->")[1].split(f"<!-- /{name} -->")[0]


def files_named(cell: str) -> list[list[Path]]:
    """Find the files of each name; one without a folder lies where the one before it does."""
    folder, found = ROOT / "tests", []
    for name in re.findall(r"`([^`]+)`", cell):
        rooted = ROOT if name.startswith("tests/") else ROOT / "tests"
        folder = (rooted / name).parent if "/" in name.rstrip("/") else folder
        pattern = (folder / name.rstrip("/").rsplit("/", 1)[-1]).relative_to(ROOT)
        files = sorted(ROOT.glob(str(pattern)))
        found.append(
            [f for p in files for f in (sorted(p.glob("test_*.py")) if p.is_dir() else [p])]
        )
    return found


@pytest.mark.parametrize("table", ["capabilities", "drafters"])
def test_every_row_names_tests_that_exist(table):
    rows = [line.split("|")[1:-1] for line in between(table).strip().splitlines()[2:]]
    assert len(rows) > 6
    for cells in rows:
        assert len(cells) == 3, cells
        found = files_named(cells[2])
        assert found, cells
        assert all(found), (cells[2], found)
        for file in (f for files in found for f in files):
            assert re.search(r"^ *def test_", file.read_text(encoding="utf-8"), re.MULTILINE), file


def test_a_row_with_a_test_that_is_gone_is_noticed():
    assert files_named(
        "`tests/drafters/test_law.py`, `test_histories.py`, `models/test_mtp.py`"
    ) == [
        [ROOT / "tests/drafters/test_law.py"],
        [ROOT / "tests/drafters/test_histories.py"],
        [ROOT / "tests/models/test_mtp.py"],
    ]
    assert not all(files_named("`tests/drafters/test_law.py`, `test_nothing.py`"))
    assert len(files_named("`tests/budget/`")[0]) > 1


def test_names_of_the_tables_are_those_of_the_code():
    """What a row calls by a name that could be imported can be."""
    import drafters
    import specmla

    shown = between("capabilities") + between("drafters")
    names = set(re.findall(r"`([A-Z][A-Za-z0-9]+)[`(]", shown))
    unknown = [n for n in names if not hasattr(specmla, n) and not hasattr(drafters, n)]
    assert unknown == []
    assert len(names) > 20


def test_engine_example():
    assert "pages free again: 64 of 64" in run("examples/01_engine.py")


def test_graphs_run():
    out = run("examples/02_graphs.py")
    assert out.count("finished by length") == 4
    assert "pages free again: 64 of 64" in out


@pytest.mark.slow
def test_own_drafter_is_checked_and_compared():
    out = run("examples/03_own_drafter.py")
    assert out.count("holds") == 3
    assert out.count("tokens a step") == 2


def test_own_drafter_is_short():
    assert len((ROOT / "examples/03_own_drafter.py").read_text().splitlines()) <= 40


def test_engine_example_fits_a_screen():
    assert len((ROOT / "examples/01_engine.py").read_text().splitlines()) <= 60


@pytest.mark.slow
def test_pair_example(tmp_path):
    out = run("examples/pair.py", "--max-tokens", "16", "--json", str(tmp_path / "pair.json"))
    assert "draft_model" in out
    assert (tmp_path / "pair.json").stat().st_size > 1000


def test_the_loop_fits_a_screen():
    import inspect

    from specmla.generate import generate

    assert len(inspect.getsource(generate).splitlines()) <= 60
