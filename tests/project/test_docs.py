"""README and docs against the repository: links, headings, commands, named tests."""

import ast
import csv
import importlib
import inspect
import itertools
import re
import textwrap
import tomllib
from pathlib import Path

import pytest
import torch
import typer

import gradwire
import gradwire.collectives
import gradwire.testing
from gradwire.bench.gpu import lane
from gradwire.cli import run
from gradwire.cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").rglob("*.md")
)
PACKAGES = ("api", "reducer", "hooks", "exchange", "compress", "comm", "kernels")
CODE = re.compile(r"```.*?```", re.DOTALL)


def hook_modules():
    return [each for name in gradwire.hooks.__all__ if inspect.ismodule(each := getattr(gradwire.hooks, name))]


def page_id(path):
    return str(path.relative_to(ROOT))


def is_log(page):
    """The development log uses the names of its day."""
    return page.parent.name == "log"


def anchor_of(heading):
    """The fragment that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchors_of(path):
    return {anchor_of(heading) for heading in re.findall(r"^#+ (.+)$", CODE.sub("", path.read_text()), re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_to_files_and_headings(page):
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", CODE.sub("", page.read_text())):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            broken.append(link)
    assert broken == []


def test_log_index_lists_every_finding_with_its_date():
    folder = ROOT / "docs" / "log"
    findings = [
        f"- [{title}]({path.name}#{anchor_of(title)}), {date}"
        for path in sorted(folder.glob("*.md"))
        if path.name != "index.md"
        for title, date in re.findall(r"^## (.+)\n\n\*(.+)\*$", path.read_text(), re.MULTILINE)
    ]
    listed = re.findall(r"^- .*$", (folder / "index.md").read_text(), re.MULTILINE)
    assert len(findings) > 70
    assert sorted(listed) == sorted(findings)


def test_make_targets_in_the_docs_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        name for page in PAGES if not is_log(page) for name in re.findall(r"\bmake ([a-z][\w-]+)`", page.read_text())
    }
    assert {"check", "test", "wheel"} <= named
    assert named - targets == set()


def commands_shown_on(page):
    """The words of every command of gradwire, its tools and the GPU lane; those of results belong to their commit."""
    spans = re.findall(r"`([^`\n]+)`(?!, commit )", CODE.sub("", page.read_text()))
    lines = "\n".join(re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)).replace("\\\n", " ").splitlines()
    for text in (*spans, *lines):
        shown = re.search(r"(?:^|--no-python |/)(gradwire|python -m (?:tools|gradwire\.bench)\.\w+)( .*|$)", text)
        if shown and not text.startswith(("pip ", "#")):
            yield shown[1], shown[2].partition(" #")[0].split()


def unknown_in(program, words):
    """The first word of a command line that is no command or option of the program; None if all are known."""
    if program == "python -m gradwire.bench.gpu":
        options = re.findall(r'"(--\w+)"', inspect.getsource(lane.main))
        return next((word for word in words if word.startswith("--") and word not in options), None)
    if program == "gradwire" and words[:1] == ["run"]:  # up to the script, whose options are its own
        own = itertools.takewhile(lambda word: not word.endswith(".py"), words)
        known = {name for action in run.options()._actions for name in action.option_strings}
        return next((word for word in own if word.startswith("--") and word not in known), None)
    tool = app if program == "gradwire" else importlib.import_module(program.removeprefix("python -m ")).app
    command = typer.main.get_command(tool)
    for word in words:
        commands = getattr(command, "commands", None)
        known = {"--help", *(name for parameter in command.params for name in parameter.opts)}
        if word.startswith("--") and word.partition("=")[0] not in known:
            return word
        if commands is not None and not word.startswith("-"):
            if word not in commands:
                return word
            command = commands[word]
    return None


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_and_options_on_a_page_exist(page):
    if is_log(page):
        return
    shown = list(commands_shown_on(page))
    assert shown or page.name not in ("advise.md", "CONTRIBUTING.md", "getting-started.md")
    assert [(program, *words) for program, words in shown if unknown_in(program, words)] == []


def test_options_on_the_page_of_advise_exist():
    named = re.findall(r"`(--[a-z-]+)", (ROOT / "docs" / "advise.md").read_text())
    assert "--latency" in named
    assert [option for option in named if unknown_in("gradwire", ["advise", option])] == []


def test_ci_runs_the_commands_of_readme_and_contributing():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    run = re.findall(r"^make (.+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    readme = re.findall(r"^make ([\w-]+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    listed = re.search(r"`\.ci/run` runs (.*?) from a clean", (ROOT / "CONTRIBUTING.md").read_text())[1]
    assert readme == ["demo", "test"]
    assert set(readme) <= set(run) <= targets
    assert re.findall(r"`make ([\w-]+)`", listed) == run


def test_paths_named_in_the_docs_exist():
    named = {
        path
        for page in PAGES
        if not is_log(page)
        for path in re.findall(r"`((?:\w+/)+(?:\w[\w.-]*)?)`", CODE.sub("", page.read_text()))
    }
    assert "tests/support/training.py" in named
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_tests_named_in_the_docs_exist():
    """Names that end in ``*`` are prefixes. Tests of PyTorch's own are introduced by "PyTorch's"."""
    paths = sorted((ROOT / "tests").rglob("*.py"))
    files = {path.name for path in paths}
    functions = {name for path in paths for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)}
    missing = []
    for page in PAGES:
        text = page.read_text()
        if is_log(page):
            continue
        ours = re.sub(r"PyTorch's (five )?`test_\w+\*?`(, `test_\w+`)*", "", text)
        for name in re.findall(r"`(test_\w+(?:\*|\.py)?)`", ours):
            known = (
                any(function.startswith(name[:-1]) for function in functions)
                if name.endswith("*")
                else name in files | functions
            )
            if not known:
                missing.append(f"{page_id(page)}: {name}")
    assert missing == []


def test_files_that_a_law_names_have_its_tests():
    """A cell reads "`test_lawN_*` in" and links to files, up to a semicolon."""
    laws = re.findall(r"`(test_law\d_)\*` in ([^;|]+)", (ROOT / "docs" / "guarantees.md").read_text())
    assert len(laws) == 6
    for prefix, links in laws:
        for path in re.findall(r"\]\(\.\./([^)]+)\)", links):
            assert f"def {prefix}" in (ROOT / path).read_text(), f"{path} has no {prefix}*"


def test_conformance_counts_equal_the_newest_record():
    newest = max((ROOT / "tests" / "conformance").glob("torch-*.csv"))
    with newest.open() as record:
        rows = list(csv.DictReader(record))
    passed = [row for row in rows if "passed" == row["stock 2"] == row["stock 4"]]
    both = [row for row in passed if "passed" == row["gradwire 2"] == row["gradwire 4"]]
    assert f"passes {len(both)} of the {len(passed)} tests" in " ".join((ROOT / "docs" / "ddp.md").read_text().split())


def templates_in(path):
    """Every string of a module, with an ellipsis in place of formatted values; strings side by side are one."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
            yield re.sub(r"\{[^{}]*\}", "…", node.value)  # a template for `str.format`


def test_messages_quoted_in_troubleshooting_exist_in_the_source():
    sources = [path for package in (*PACKAGES, "sharded") for path in (ROOT / package).glob("*.py")]
    sources.append(Path(torch.nn.parallel.distributed.__file__))
    templates = "\n\n".join(" ".join(template.split()) for path in sources for template in templates_in(path))
    with pytest.raises(AttributeError) as no_ddp:
        torch.nn.Linear(1, 1).register_comm_hook(None, None)
    templates += f"\n\n{no_ddp.value}"
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^#### (`+)(.*)\1$", page, re.MULTILINE)
    assert len(quoted) > 30
    assert [message for _, message in quoted if message.removeprefix("… ") not in templates] == []


def table_rows(page, name):
    """The cells of each row of a generated table, by its first cells."""
    table = re.search(rf"<!-- begin {name} -->\n(.*?)<!-- end", (ROOT / page).read_text(), re.DOTALL)[1]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]


def test_readme_numbers_in_prose_equal_the_tables():
    readme = " ".join((ROOT / "README.md").read_text().split())
    rows = {row[0]: row for row in table_rows("README.md", "leading")}
    speed_up = {hook: float(row[2].rstrip("x")) for hook, row in rows.items() if row[2].endswith("x")}
    assert f"is {speed_up['int4']:.1f} times as fast as without a hook" in readme
    assert abs(float(rows["int4"][3].split()[0])) <= 0.002, "the loss after 2,000 steps is the same"
    fastest = max(times for hook, times in speed_up.items() if hook.startswith("powersgd"))
    few_bits = f"int2 ({speed_up['int2']:.1f}x), sign ({speed_up['sign']:.1f}x)"
    assert f"{few_bits} and PowerSGD (up to {fastest:.1f}x) are faster" in readme
    to_target = {row[0]: row[-1] for row in table_rows("docs/benchmarks.md", "converge_text") if row[1] == "gradwire"}
    assert (
        "with int4 they take a quarter of the time without a hook, with `powersgd-r16-int8` less than a sixth" in readme
    )
    assert float(to_target["int4"].rstrip("x")) == pytest.approx(4, abs=0.4)
    assert 6 < float(to_target["powersgd-r16-int8"].rstrip("x")) < 7
    fp16 = next(row for row in table_rows("docs/benchmarks.md", "gpu") if row[0] == "fp16, gpt2-124m")
    assert f"the fp16 hook takes {fp16[1]} us of device time" in readme and f"PyTorch's takes {fp16[4]} us" in readme
    ours, theirs = (float(fp16[i].replace(",", "")) / 1000 for i in (8, 9))
    assert f"the host took {ours:.1f} ms a step with the fp16 hook, with PyTorch's {theirs:.1f} ms" in readme


def test_readme_diffs_are_the_examples():
    diffs = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    for diff, example in zip(diffs, ("train_int4.py", "train_hsdp.py"), strict=True):
        after = [line[1:].strip() for line in diff.splitlines() if line[:1] in ("+", " ") and line.strip()]
        program = [line.strip() for line in (ROOT / "examples" / example).read_text().splitlines()]
        assert [line for line in program if line in after] == after


def test_bytes_out_of_a_node_on_the_quantization_page_follow_the_formula():
    """2 b, or (G + 1) b with ``local_size=1``, relative to 2 w, with b and w = 2 bytes per element."""
    page = (ROOT / "docs" / "quantization.md").read_text()
    header, _, *rows = re.search(r"(\| GPUs per node \|.*?)\n\n", page, re.DOTALL)[1].splitlines()
    formats = [name.strip().removesuffix(", sums in fp32") for name in header.strip("|").split("|")[1:]]
    assert formats == ["bf16", "int8", "int6", "int4", "int2", "sign"] and len(rows) == 4
    for row in rows:
        gpus, *shown = (cell.strip() for cell in row.strip("|").split("|"))
        wire_bytes = [gradwire.kernels.WIRE_FORMATS[name].block_bytes(64) / 64 for name in formats]
        factor = 2 if gpus == "any number" else int(gpus.removesuffix(", `local_size=1`")) + 1
        assert shown == [f"{factor * each / 4:.2f}x" for each in wire_bytes], gpus


def test_quantization_page_lists_every_wire_format_with_its_bits():
    page = (ROOT / "docs" / "quantization.md").read_text()
    rows = re.findall(r"^\| (`.*?) \| ([0-9.]+) \|", page, re.MULTILINE)
    shown = {name.strip("`"): float(bits) for names, bits in rows for name in names.split(", ")}
    assert shown == {name: wire.block_bytes(64) / 8 for name, wire in gradwire.kernels.WIRE_FORMATS.items()}


def test_overview_lists_every_public_hook():
    modules = hook_modules()
    public = {name for module in modules for name in module.__all__ if name.endswith(("_hook", "_wrapper"))}
    table = (ROOT / "docs" / "hooks.md").read_text().partition("## ")[0]
    assert {name for name in public if f"{name}`" not in table} == set()


def test_compressor_of_the_guide_is_the_example():
    page, program = (ROOT / "docs" / "writing-a-hook.md").read_text(), (ROOT / "examples" / "topk_hook.py").read_text()
    (code,) = re.findall(r"^```python\n(import math\n.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert code.partition("@dataclass")[2].strip() in program


def test_functions_of_the_checkpointing_page_are_those_of_the_example():
    page = (ROOT / "docs" / "checkpointing.md").read_text()
    program = (ROOT / "examples" / "checkpointing.py").read_text()
    (code,) = re.findall(r"^```python\n(from pathlib.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert code == program.partition("\n\n")[2]


def test_api_reference_has_every_public_name():
    reference = "".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    modules = hook_modules()
    public = {f"{module.__name__}.{name}" for module in modules for name in module.__all__}
    for package in (gradwire.hooks, gradwire.collectives, gradwire.testing):
        public |= {f"{package.__name__}.{name}" for name in package.__all__}
    public -= {module.__name__ for module in modules}
    public |= public_names_of_integrations() | names_imported_by_examples()
    public |= {"gradwire.DistributedDataParallel", "gradwire.attach", "gradwire.sharded.Attachment"}
    assert public == set(re.findall(r"^::: (\S+)", reference, re.MULTILINE))


def names_imported_by_examples():
    """Classes and functions of gradwire that examples/ and the code on the pages import."""
    pages = [page.read_text() for page in PAGES if not is_log(page)]
    programs = [path.read_text() for path in (ROOT / "examples").glob("*.py")]
    programs += [
        block for text in pages for block in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    ]
    names = set()
    for program in programs:
        for module, imported in re.findall(r"^from (gradwire[\w.]*) import ([\w, ]+)$", program, re.MULTILINE):
            names |= {f"{module}.{name}" for name in imported.split(", ")}
    assert "gradwire.comm.LocalTransport" in names
    return names - {module.__name__ for module in hook_modules()}


def public_names_of_integrations():
    """Classes and functions in ``__all__``, from the sources: the modules import packages that may be absent."""
    names = set()
    for path in (ROOT / "integrations").glob("*.py"):
        exported = re.search(r"^__all__ = (\[.*\])", path.read_text(), re.MULTILINE)
        module = "gradwire.integrations" + (f".{path.stem}" if path.stem != "__init__" else "")
        if exported is not None:
            names |= {f"{module}.{name}" for name in ast.literal_eval(exported[1]) if not name.isupper()}
    return names


def test_readme_states_links_a_gpu_time_and_the_gpu_status_on_its_first_screen():
    first_screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:30])
    assert all(each in first_screen for each in ("10 Gb/s", "H200", "device time", "pip install"))
    assert "several GPUs has not been tested" in first_screen


def test_required_versions_are_named_in_readme_and_contributing():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    python = project["requires-python"].removeprefix(">=")
    pytorch = next(each for each in project["dependencies"] if each.startswith("torch")).removeprefix("torch>=")
    assert f"Python {python} and PyTorch {pytorch} or later" in (ROOT / "README.md").read_text()
    assert tuple(map(int, torch.__version__.split(".")[:2])) >= tuple(map(int, pytorch.split(".")))


def test_names_in_the_glossary_exist_in_the_source():
    _, _, glossary = (ROOT / "docs" / "architecture.md").read_text().partition("\n## Glossary\n")
    names = set(re.findall(r"`(\w+)`", glossary))
    source = "".join(path.read_text() for package in PACKAGES for path in (ROOT / package).glob("*.py"))
    assert len(names) > 8
    assert {name for name in names if not re.search(rf"\b{name}\b", source)} == set()


def test_names_in_the_file_tables_of_the_architecture_exist_in_their_files():
    """Rows of tables with the columns "code" and "file"."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\|[^|]+\| ([^|]+) \| (`[a-z]+/[^|]+) \|$", page, re.MULTILINE)
    assert len(rows) > 25
    for code, files in rows:
        paths = [path for path in re.findall(r"`([\w/]+\.py)`", files) if (ROOT / path).is_file()]
        source = "".join((ROOT / path).read_text() for path in paths)
        for name in re.findall(r"`([\w.]+)`", code):
            assert re.search(rf"(def|class) {name.split('.')[-1]}\b|^{name}\b.* = ", source, re.MULTILINE), name


def test_code_on_the_trainers_page_equals_the_examples():
    """Every line of a Python block stands in a program of examples/ that the tests run."""
    page = (ROOT / "docs" / "trainers.md").read_text()
    programs = [path.read_text() for path in (ROOT / "examples").glob("*.py")]
    known = {line.strip() for program in programs for line in program.splitlines()}
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    code = [line for block in blocks for line in block.splitlines() if line]
    assert len(code) > 20
    assert [line for line in code if line not in known] == []


@pytest.mark.parametrize(
    ("page", "example"),
    [("anywhere", "train_without_ddp"), ("weighted-means", "weighted_mean"), ("local-sgd", "local_sgd")],
)
def test_first_code_on_the_page_is_from_its_example(page, example):
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text(), re.DOTALL)[1]
    program = (ROOT / "examples" / f"{example}.py").read_text()
    assert code in program or textwrap.indent(code, "    ") in program


def test_every_command_with_an_example_stands_in_its_docstring():
    """So the tests run it as it stands. Several nodes are tested by tests/distributed/test_launch.py."""
    pattern = r"(?:\w+=\w+ )?(?:python|torchrun|accelerate launch) [^`#\n]*examples/(\w+)\.py[^`#\n]*"
    pages = [page.read_text() for page in PAGES if not is_log(page)]
    found = [(each[0].strip(), each[1]) for page in pages for each in re.finditer(pattern, page)]
    assert len(found) > 12 and any("train_int4" in command for command, _ in found)
    for command, name in found:
        docstring = ast.get_docstring(ast.parse((ROOT / "examples" / f"{name}.py").read_text()))
        known = [line.split("#")[0].strip() for line in docstring.splitlines()]
        assert command in known or "--nnodes 2" in command, command
