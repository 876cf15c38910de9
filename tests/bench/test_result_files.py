"""Damaged files of results are refused with their name, and no file is written through somebody else's link."""

import json
import secrets
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from gradwire.bench.record import RecordError, load, replacing
from gradwire.cli.app import app

RESULTS = sorted((Path(__file__).parents[2] / "bench" / "results").glob("*.jsonl"))
SMALL = [path for path in RESULTS if path.stat().st_size < 60_000]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def places_in(value, place=()):
    """The places of all values in parsed JSON."""
    yield place
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        yield from places_in(inner, (*place, key))


def with_value(value, place, new):
    """Parsed JSON with another value at a place."""
    if not place:
        return new
    key, *rest = place
    changed = dict(value) if isinstance(value, dict) else list(value)
    changed[key] = with_value(value[key], rest, new)
    return changed


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_report_of_a_damaged_file_is_an_error_with_its_name(tmp_path, data):
    text = data.draw(st.sampled_from(SMALL)).read_text()
    how = data.draw(st.sampled_from(["truncated", "byte", "value", "line left out"]))
    lines = text.splitlines()
    number = data.draw(st.integers(0, min(len(lines), 12) - 1))
    if how == "truncated":
        text = text[: data.draw(st.integers(0, len(text)))]
    elif how == "byte":
        at = data.draw(st.integers(0, len(text) - 1))
        text = text[:at] + data.draw(st.characters(max_codepoint=255)) + text[at + 1 :]
    elif how == "line left out":
        text = "\n".join(lines[:number] + lines[number + 1 :])
    else:
        parsed = json.loads(lines[number])
        place = data.draw(st.sampled_from(list(places_in(parsed))))
        lines[number] = json.dumps(with_value(parsed, place, data.draw(JSON)))
        text = "\n".join(lines)
    path = tmp_path / "damaged.jsonl"
    path.write_text(text)
    done = CliRunner(env={"NO_COLOR": "1", "COLUMNS": "200"}).invoke(app, ["bench", "report", str(path)])
    assert done.exit_code in (0, 1)
    if done.exit_code == 1:
        assert isinstance(done.exception, SystemExit)
        assert "damaged.jsonl" in done.output


@pytest.mark.parametrize("text", ["", "[" * 100_000, '{"provenance": {}}', "\x00", '{"provenance": 1}\n{}'])
def test_file_that_holds_no_records_is_refused(tmp_path, text):
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(RecordError, match=r"file is not a file that"):
        load(path)


def test_result_is_not_written_through_a_link(tmp_path):
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    theirs.write_text("kept")
    mine.symlink_to(theirs)
    with replacing(mine) as partial:
        partial.write_text("new")
    assert (mine.read_text(), mine.is_symlink(), theirs.read_text()) == ("new", False, "kept")
    (tmp_path / ".mine.guessed").symlink_to(theirs)
    with (
        mock.patch.object(secrets, "token_hex", lambda _: "guessed"),
        pytest.raises(FileExistsError),
        replacing(mine) as partial,
    ):
        partial.write_text("never")
    assert theirs.read_text() == "kept"
