"""Names that users are told of: modules that are listed, and dotted names in docstrings and documentation."""

import ast
import importlib.util
import inspect
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as pytorch_hook

import gradwire
import gradwire.testing
from gradwire.exchange.hook_state import HookSettings, HookState
from gradwire.hooks.default_hooks import CastState
from gradwire.hooks.powerSGD_hook import PowerSGDState
from gradwire.hooks.quantization_hooks import QuantizationState
from gradwire.hooks.scaled_cast_hooks import ScaledCastState

ROOT = Path(__file__).parents[2]
DOTTED = re.compile(r"`(gradwire(?:\.\w+)+)")
ATTRIBUTE = re.compile(r"`([A-Z]\w+)\.(\w+)(?:\(\))?`")


def docstrings():
    """(place, text) of every docstring of the package and every page of documentation."""
    for module in pkgutil.walk_packages(gradwire.__path__, "gradwire."):
        path = Path(importlib.util.find_spec(module.name).origin)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{module.name}, line {getattr(node, 'lineno', 1)}", ast.get_docstring(node) or ""
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]:
        if path.parent.name != "log":  # its entries use the names of their day
            yield path.name, path.read_text()


def resolves(name):
    """Whether a dotted name is a module or an attribute of one."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def test_dotted_names_in_docstrings_and_documentation_resolve():
    named = [(place, name) for place, text in docstrings() for name in DOTTED.findall(text)]
    assert len(named) > 5
    assert [(place, name) for place, name in named if not resolves(name)] == []


def attributes_of_classes():
    """For each class of the library, by name, the attributes that it, or a base class, defines or assigns to self."""
    own, bases = {}, {}
    for module in pkgutil.walk_packages(gradwire.__path__, "gradwire."):
        for node in ast.walk(ast.parse(Path(importlib.util.find_spec(module.name).origin).read_text())):
            if isinstance(node, ast.ClassDef):
                inside = list(ast.walk(node))
                names = {each.name for each in inside if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
                names |= {each.attr for each in inside if isinstance(each, ast.Attribute)}
                names |= {each.id for each in inside if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
                own.setdefault(node.name, set()).update(names)
                bases.setdefault(node.name, set()).update(ast.unparse(base).rpartition(".")[2] for base in node.bases)

    def attributes(name):
        return own.get(name, set()).union(*(attributes(base) for base in bases.get(name, set()) - {name}))

    return {name: attributes(name) for name in own}


def test_attributes_of_classes_in_docstrings_and_documentation_exist():
    known = attributes_of_classes()
    named = [(place, *match) for place, text in docstrings() for match in ATTRIBUTE.findall(text) if match[0] in known]
    assert len(named) > 50
    theirs = {"DistributedDataParallel": dir(torch.nn.parallel.DistributedDataParallel)}
    wrong = [each for each in named if each[2] not in known[each[1]] and each[2] not in theirs.get(each[1], ())]
    assert wrong == []


def test_extras_that_pages_install_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {
        extra
        for _, text in docstrings()
        for extras in re.findall(r"(?:pip install[^\n]*?|gradwire)\[([\w,]+)\]", text)
        for extra in extras.split(",")
    }
    assert {"bench"} <= named <= project["optional-dependencies"].keys()


def test_hooks_list_the_public_modules():
    modules = {path.stem for path in (ROOT / "hooks").glob("*.py")}
    assert {module.__name__.rpartition(".")[2] for module in HOOK_MODULES} == public(modules)
    functions_and_classes = set(gradwire.hooks.__all__) - modules
    assert functions_and_classes == {*gradwire.exchange.hook_state.__all__, *gradwire.exchange.telemetry.__all__}
    assert gradwire.__all__ == ["DistributedDataParallel", "__version__", "attach", "collectives", "hooks", "sharded"]
    assert gradwire.testing.__all__ == ["LAWS", "LawViolation", "check_laws"]


def public(names):
    return {name for name in names if not name.startswith("_")}


def members(kind, module):
    """Members of a class that the API reference lists."""
    reference = "".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    block = re.search(rf"^::: {re.escape(module)}\.{kind.__name__}\n((?: .*\n)*)", reference, re.MULTILINE)[1]
    return set(re.findall(r"\w+", block.partition(" members:")[2]))


def described(kind):
    """Arguments and attributes in the docstring of a class."""
    return set(re.findall(r"^    (\w+):", inspect.getdoc(kind), re.MULTILINE))


HOOK_MODULES = [each for name in gradwire.hooks.__all__ if inspect.ismodule(each := getattr(gradwire.hooks, name))]
PACKAGES = [gradwire, gradwire.hooks, gradwire.sharded, gradwire.testing]


@pytest.mark.parametrize("module", [*PACKAGES, *HOOK_MODULES], ids=lambda module: module.__name__)
def test_dir_of_a_public_module_shows_its_public_names(module):
    assert public(dir(module)) == public(module.__all__)


def test_public_function_or_class_of_a_package_has_no_module_of_its_name():
    """The API reference would show the module."""
    for package in (
        gradwire,
        gradwire.sharded,
        gradwire.collectives,
        gradwire.testing,
        gradwire.comm,
        gradwire.compress,
    ):
        modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
        assert {name for name, value in vars(package).items() if not inspect.ismodule(value)} & modules == set()


@pytest.mark.parametrize(
    "state",
    [PowerSGDState(None), QuantizationState(), CastState(), ScaledCastState()],
    ids=lambda state: type(state).__name__,
)
def test_dir_of_a_state_shows_documented_names(state):
    shown, listed = public(dir(state)), members(type(state), type(state).__module__)
    assert listed <= shown
    expected = listed | described(type(state)) | described(HookSettings) | set(pytorch_hook.PowerSGDState.__slots__)
    if isinstance(state, HookState):
        expected |= members(HookState, "gradwire.hooks") | described(HookState)
    assert shown - expected == set()


def test_dir_of_model_and_attachment_shows_documented_names(world_of_one):
    model = gradwire.DistributedDataParallel(torch.nn.Linear(2, 2))
    theirs = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    own = public(dir(model)) - public(dir(theirs))
    assert own - members(type(model), "gradwire") - described(type(model)) == set()
    attachment = gradwire.attach(model, QuantizationState())
    expected = members(type(attachment), "gradwire.sharded") | described(type(attachment))
    assert public(dir(attachment)) == expected


def test_import_leaves_out_what_only_sharded_training_needs():
    code = "import sys, gradwire as g; print('torch.distributed.tensor' in sys.modules, callable(g.attach), *dir(g))"
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert printed[:2] == ["False", "True"]
    assert "attach" in printed[2:]
