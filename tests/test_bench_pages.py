"""Tables in README and docs are those that `gradwire bench report` generates from the kept results."""

import re
import shutil
from pathlib import Path

import pytest
from matplotlib.image import imread
from typer.testing import CliRunner

from gradwire.bench.pages import PAGES, TABLES, PageError, fill, load_all
from gradwire.bench.plots import DRAWINGS
from gradwire.cli.app import app

ROOT = Path(__file__).parents[1]
RESULTS = load_all(ROOT / "bench" / "results")


@pytest.mark.parametrize("page", PAGES)
def test_page_matches_kept_results(page):
    text = (ROOT / page).read_text()
    assert fill(text, RESULTS) == text, "run `gradwire bench report`"


def test_every_table_is_on_a_page():
    texts = "".join((ROOT / page).read_text() for page in PAGES)
    assert set(re.findall(r"<!-- begin (\S+) -->", texts)) == set(TABLES)


@pytest.mark.parametrize("name", TABLES)
def test_table_has_equal_rows_and_its_source(name):
    lines = fill(f"<!-- begin {name} -->\n<!-- end {name} -->", RESULTS).splitlines()
    for first, *rest in _tables(lines):
        assert {row.count("|") for row in rest} == {first.count("|")}
    commands = [file if file == "demo" else f"bench {file.partition('_')[0]}" for file in TABLES[name][0]]
    sources = [line for line in lines if line.startswith("`gradwire ")]
    assert len(sources) == len(commands)
    assert all(line.startswith(f"`gradwire {command}") for line, command in zip(sources, commands, strict=True))


def _tables(lines):
    tables = [[]]
    for line in lines:
        if line.startswith("|"):
            tables[-1].append(line)
        elif tables[-1]:
            tables.append([])
    return [table for table in tables if table]


@pytest.mark.parametrize(
    "page", ["<!-- begin speed -->\n<!-- end speed -->", "<!-- begin hooks -->\n<!-- end hooks -->"]
)
def test_unknown_table_or_missing_results_are_refused(page):
    with pytest.raises(PageError, match="Run that bench"):
        fill(page, {"kernels": []})


def test_report_writes_pages_and_plots(tmp_path):
    shutil.copytree(ROOT / "bench" / "results", tmp_path / "bench" / "results")
    (tmp_path / "docs").mkdir()
    for page in PAGES:
        (tmp_path / page).write_text("before\n<!-- begin hooks -->\nold\n<!-- end hooks -->\nafter\n")
    done = CliRunner().invoke(app, ["bench", "report", str(tmp_path)])
    assert done.exit_code == 0, done.output
    for page in PAGES:
        text = (tmp_path / page).read_text()
        assert "old" not in text and "| powersgd-r4 |" in text
        assert text.startswith("before\n") and text.endswith("after\n")
    for name in DRAWINGS:
        height, width, _ = imread(tmp_path / "docs" / "plots" / f"{name}.png").shape
        assert height > 500 and width > 1000
    (tmp_path / "bench" / "results" / "hooks.jsonl").unlink()
    done = CliRunner().invoke(app, ["bench", "report", str(tmp_path)])
    assert done.exit_code == 1 and "no bench/results/hooks.jsonl" in done.output
    (tmp_path / "bench" / "results" / "hooks.jsonl").write_text("no records")
    done = CliRunner().invoke(app, ["bench", "report", str(tmp_path)])
    assert done.exit_code == 1 and "Run that bench again, or delete the file" in done.output
