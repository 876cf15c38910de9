"""The commands in the docstrings of the trainers' examples: the second one resumes what the first one saved."""

import re

import pytest

from tests.support.example_programs import PACKAGES, commands_of, output_of


@pytest.mark.parametrize("name", PACKAGES)
def test_second_command_resumes_where_the_first_ended(name, tmp_path):
    pytest.importorskip(PACKAGES[name], reason="needs the extra 'integrations': make test-integrations")
    first, second = (output_of(command, tmp_path) for command in (commands_of(name) * 2)[:2])
    steps = [[int(step) for step in re.findall(r"\bstep (\d+)", output)] for output in (first, second)]
    assert max(steps[0]) <= min(steps[1])
    assert max(steps[1]) == 2 * max(steps[0])
    losses = [float(loss) for loss in re.findall(r"\bloss\W+([\d.]+)", first + second)]
    assert losses[-1] < losses[0]
