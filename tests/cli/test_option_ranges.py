"""Numeric options of every command: a value out of range is a usage error that names the option, never a traceback."""

import math
from functools import partial
from typing import Annotated, get_args, get_origin, get_type_hints

import pytest
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from gradwire.cli import advise, app, bench_runs
from gradwire.cli.options import finite

# Options whose text holds numbers, with the unit of a value.
WITH_UNITS = {"bandwidth": "mbit", "rate": "mbit", "rates": "mbit", "ranks": "", "sizes": ""}
ZERO_IS_VALID = {("demo", "seed"), ("advise", "latency"), ("advise", "price")} | {
    (command, "delay") for command in ("demo", "network", "converge")
}
VALUES = ("nan", "inf", "-1", "0", str(10**21))
# What a command needs to come to its numbers.
NEEDED = {"advise": ["tiny-layers", "--bandwidth", "100mbit", "--world-size", "4"]}


def commands_of(of, *names):
    """The words of each command, and its function."""
    for command in of.registered_commands:
        yield (*names, command.name or command.callback.__name__), command.callback
    for group in of.registered_groups:
        yield from commands_of(group.typer_instance, *names, group.name)


OPTIONS = [
    (path, name, get_args(annotation)[0])
    for path, function in commands_of(app.app)
    for name, annotation in get_type_hints(function, include_extras=True).items()
    if get_origin(annotation) is Annotated
]
NUMBERS = (int, float, int | None, float | None)
NUMERIC = [(path, name) for path, name, kind in OPTIONS if kind in NUMBERS or name in WITH_UNITS]


def option(name):
    return f"--{name.replace('_', '-')}"


CASES = [
    pytest.param((path, name, value + WITH_UNITS.get(name, "")), id=f"{' '.join(path)} {option(name)} {value}")
    for path, name in NUMERIC
    for value in VALUES
    if (path[-1], name) not in ZERO_IS_VALID or value != "0"
]


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # the demo makes the folder of its results first

    def fail(what, *_, **__):
        raise AssertionError(f"{what} began")

    for module in (app, bench_runs):
        monkeypatch.setattr(module, "measured", partial(fail, "the measurement"))
    monkeypatch.setattr(bench_runs.namespaces, "obstacle", lambda: None)
    monkeypatch.setattr(advise, "_measured", partial(fail, "the measurement"))
    monkeypatch.setattr(advise.torch, "set_num_threads", lambda _: None)


@pytest.mark.parametrize("case", CASES)
def test_number_out_of_range_is_a_usage_error(case):
    path, name, value = case
    arguments = [*path, *NEEDED.get(path[0], []), option(name), value]
    done = CliRunner(env={"NO_COLOR": "1", "COLUMNS": "200"}).invoke(app.app, arguments)
    assert done.exit_code == 2, done.output
    assert option(name) in done.output
    assert isinstance(done.exception, SystemExit)


def test_number_that_is_not_finite_is_refused_by_every_version_of_typer():
    for number in (math.nan, math.inf, -math.inf):
        with pytest.raises(typer.BadParameter, match=f"{number} is not a finite number"):
            finite(number)


def test_ranks_per_node_that_do_not_divide_the_world_size_are_refused():
    arguments = ["advise", *NEEDED["advise"], "--ranks-per-node", "3"]
    done = CliRunner(env={"NO_COLOR": "1", "COLUMNS": "200"}).invoke(app.app, arguments)
    assert done.exit_code == 2
    assert "3 is not a divisor of the world size, 4" in done.output


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_text_of_any_option_is_accepted_or_a_usage_error(data):
    path, name, _ = data.draw(st.sampled_from([each for each in OPTIONS if each[2] is not bool]))
    pieces = [*VALUES, "none", "int4", "powersgd-r4", "100mbit", "1gbit", ",", "-", ".", "/", "x" * 400, "é"]
    piece = st.sampled_from(pieces) | st.text(st.characters(exclude_characters="\0"), max_size=5)
    value = data.draw(st.lists(piece, max_size=4).map("".join))
    words = [value] if name == "results" else [f"{option(name)}={value}"]
    done = CliRunner(env={"NO_COLOR": "1", "COLUMNS": "200"}).invoke(app.app, [*path, *NEEDED.get(path[0], []), *words])
    is_accepted = str(done.exception) == "the measurement began"
    assert is_accepted or done.exception is None or isinstance(done.exception, SystemExit), done.output
