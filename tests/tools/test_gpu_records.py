"""The table of a GPU's times: `tools.gpu_records`."""

import json

import pytest

from gradwire.bench.record import load
from tools import gpu_records


def times(ms):
    return {"p20": ms, "p50": ms, "p80": ms}


def row(implementation, ms, **others):
    return {"implementation": implementation, "device_ms": times(ms), **others}


@pytest.fixture
def lane(tmp_path, facts):
    cases = {
        "copy": [{"implementation": "copy_", "numel": 8, "gb_per_s": 1000.0}],
        "flatten": [
            row("gradwire", 0.02, nbytes=1e7, launches=1, graph_ms=times(0.015)),
            row("eager", 0.05, launches=3, host_waits=0, includes_host=False),
            row("cat", 0.04, launches=2, host_waits=1, includes_host=True),
        ],
        "hook fp16, a model": [
            row("gradwire", 2.0, nbytes=1e9, launches=26, host_ms=times(4.0)),
            row("PyTorch", 3.0, launches=39, host_ms=times(1.0)),
        ],
        "hook fp16, link of 10gbit": [
            {"implementation": "PyTorch", "step_ms": times(20.0)},
            {"implementation": "gradwire", "step_ms": times(5.0)},
        ],
        "graph of hook fp16, a model": [row("eager", 2.5, nbytes=1e9), row("captured", 1.5, nbytes=1e9)],
        "graph of hook int4, a model": [row("eager", 4.0, nbytes=2e9), row("captured", 3.0, nbytes=2e9)],
    }
    shared = {**facts, "stage": "bench", "status": "passed", "ranks": 1, "gpu": "a GPU"}
    lines = [{"case": name, "measured": rows, **shared} for name, rows in cases.items()]
    lines.append({"case": "broken", "measured": [], **shared, "status": "failed"})
    lines.append({"case": "hook fp16", "measured": [], **shared, "stage": "smoke"})
    path = tmp_path / "lane.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_table_shows_the_fastest_other_implementation(lane, tmp_path):
    gpu_records.main(lane, tmp_path / "gpu.jsonl")
    records = load(tmp_path / "gpu.jsonl")
    kernels, hooks, links = gpu_records.tables(records)
    assert kernels.rows == [["flatten", "20", "15", "2.00x", "40*", "cat", "", "1, 2"]]
    assert hooks.rows == [
        ["fp16, a model", "2,000", "1,500", "2.00x", "3,000", "PyTorch", "1.5x", "26, 39", "4,000", "1,000"],
        ["int4, a model", "4,000", "3,000", "2.00x", "", "", "", "", "", ""],
    ]
    assert links.rows == [["fp16, link of 10gbit", "5.0", "20.0", "4.00x"]]
    assert [r.p50 for r in records if r.metric == "host waits"] == [0, 1]
    assert kernels.title == "Kernels on a bucket, a GPU"
    assert all(len(each) == len(table.headers) for table in (kernels, hooks, links) for each in table.rows)
