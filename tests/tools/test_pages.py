"""Tables in README and docs are those that `tools.pages` generates from the kept results."""

import itertools
import re
import shutil
from pathlib import Path
from unittest import mock

import pytest
from matplotlib.image import imread
from matplotlib.text import Text
from typer.testing import CliRunner

from gradwire.bench import plots
from gradwire.bench.plots import DRAWINGS
from gradwire.cli.app import app
from gradwire.cli.bench import TABLES as BENCH_TABLES
from tools import pages
from tools.pages import PAGES, TABLES, PageError, fill, load_all

ROOT = Path(__file__).parents[2]
RESULTS = load_all(ROOT / "bench" / "results")


@pytest.mark.parametrize("page", PAGES)
def test_page_matches_kept_results(page):
    text = (ROOT / page).read_text()
    assert fill(text, RESULTS) == text, "run `make pages`"


def test_every_table_is_on_a_page():
    texts = "".join((ROOT / page).read_text() for page in PAGES)
    assert set(re.findall(r"<!-- begin (\S+) -->", texts)) == set(TABLES)


@pytest.mark.parametrize(
    "page", ["<!-- begin speed -->\n<!-- end speed -->", "<!-- begin hooks -->\n<!-- end hooks -->"]
)
def test_unknown_table_or_missing_results_are_refused(page):
    with pytest.raises(PageError, match="Run that bench"):
        fill(page, {"kernels": []})


def test_pages_and_plots_are_written(tmp_path):
    shutil.copytree(ROOT / "bench" / "results", tmp_path / "bench" / "results")
    (tmp_path / "docs").mkdir()
    shown = [name for name in RESULTS if any(f"plots/{name}.png" in (ROOT / page).read_text() for page in PAGES)]
    plots = "".join(f"plots/{name}.png\n" for name in shown)
    for page in PAGES:
        (tmp_path / page).write_text(f"before\n<!-- begin hooks -->\nold\n<!-- end hooks -->\n{plots}after\n")
    done = CliRunner().invoke(pages.app, [str(tmp_path)])
    assert done.exit_code == 0, done.output
    for page in PAGES:
        text = (tmp_path / page).read_text()
        assert "old" not in text and "| powersgd-r4 |" in text
        assert text.startswith("before\n") and text.endswith("after\n")
    assert len(shown) == len(DRAWINGS) + 1, "converge has two tasks"
    for name in shown:
        height, width, _ = imread(tmp_path / "docs" / "plots" / f"{name}.png").shape
        assert height > 500 and width > 1000
    (tmp_path / "bench" / "results" / "hooks.jsonl").unlink()
    done = CliRunner().invoke(pages.app, [str(tmp_path)])
    assert done.exit_code == 1 and "no bench/results/hooks.jsonl" in done.output
    (tmp_path / "bench" / "results" / "hooks.jsonl").write_text("no records")
    done = CliRunner().invoke(pages.app, [str(tmp_path)])
    assert done.exit_code == 1 and "Run that bench again, or delete the file" in done.output


@pytest.fixture
def figure_of(tmp_path, monkeypatch):
    """The figure that a bench's results are drawn as."""

    def draw(name):
        figures, new = [], plots._figure
        with monkeypatch.context() as patch:
            patch.setattr(plots, "_figure", lambda *size: figures.append(new(*size)) or figures[-1])
            DRAWINGS[RESULTS[name][0].bench](RESULTS[name], tmp_path / f"{name}.png")
        (figure,) = figures
        return figure

    return draw


@pytest.mark.parametrize("name", ["converge_text", "converge_digits", "demo", "kernels"])
def test_no_two_curves_of_a_plot_share_color_and_style(name, figure_of):
    for axes in figure_of(name).axes:
        curves = [line for line in axes.lines if not line.get_label().startswith("_")]
        styles = {(line.get_color(), line.get_linestyle(), line.get_marker()) for line in curves}
        assert len(styles) == len(curves) or not curves


@pytest.mark.parametrize("name", ["converge_text", "converge_digits"])
def test_every_curve_is_labeled_in_its_color_and_no_label_is_covered(name, figure_of):
    figure = figure_of(name)
    figure.draw_without_rendering()
    dots, axes = figure.axes
    curves = [line for line in axes.lines if not line.get_label().startswith("_")]
    labels = {text.get_text().strip(): text for text in axes.texts if text.get_text() != "target"}
    assert {text: label.get_color() for text, label in labels.items()} == {
        line.get_label(): line.get_color() for line in curves
    }
    assert len(labels) == len({record["hook"] for record in RESULTS[name]})
    for panel in (dots, axes):
        boxes = [Text.get_window_extent(text) for text in panel.texts]
        for first, second in itertools.combinations(boxes, 2):
            assert not first.overlaps(second)
        assert all(panel.bbox.fully_contains(*corner) for box in boxes for corner in box.corners())
    for line in axes.lines:
        covered = line.get_transform().transform_path(line.get_path())
        assert not any(
            covered.intersects_bbox(Text.get_window_extent(label), filled=False) for label in labels.values()
        )
    assert not any(
        legend.get_window_extent().overlaps(panel.bbox) for legend in figure.legends for panel in figure.axes
    )
    assert dots.get_legend() is None and axes.get_legend() is None


@pytest.mark.parametrize("name", [name for name, records in RESULTS.items() if records[0].bench in BENCH_TABLES])
def test_report_prints_tables_and_draws_plots_of_every_benchmark(name, tmp_path):
    path = ROOT / "bench" / "results" / f"{name}.jsonl"
    done = CliRunner().invoke(app, ["bench", "report", str(path), "--plots", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert RESULTS[name][0].provenance["command"] in done.output
    assert (tmp_path / f"{name}.png").exists() == (RESULTS[name][0].bench in DRAWINGS)


@pytest.mark.parametrize(("name", "rate", "ranks"), [("network", "1gbit", 2), ("hooks", None, 1)])
def test_plot_of_one_rate_or_world_size_has_one_panel(name, rate, ranks, figure_of):
    one = [record for record in RESULTS[name] if (record.case.get("rate"), record.ranks) == (rate, ranks)]
    with mock.patch.dict(RESULTS, {name: one}):
        assert len(figure_of(name).axes) == 1


def test_report_refuses_files_without_results_of_a_benchmark(tmp_path):
    done = CliRunner().invoke(app, ["bench", "report", str(ROOT / "bench" / "results" / "soak.jsonl")])
    assert done.exit_code == 1 and "has results of 'soak', not of a benchmark" in " ".join(done.output.split())
    (tmp_path / "other.jsonl").write_text("no records")
    done = CliRunner().invoke(app, ["bench", "report", str(tmp_path / "other.jsonl")])
    assert done.exit_code == 1 and "is not a file that" in done.output
