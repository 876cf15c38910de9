# Every target installs first; the second time that costs a second.
PYTHON ?= python3
BIN := .venv/bin
ROOMS := api reducer hooks compress kernels bench
export PYTHONSAFEPATH := 1

.PHONY: install check format test test-slow demo wheel clean

install: .venv/.installed

# A strict editable install links files one by one, so a new file (which touches its folder) asks for a reinstall.
.venv/.installed: pyproject.toml constraints.txt $(ROOMS)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "setuptools>=77"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]" --config-settings editable_mode=strict
	touch $@

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: install
	$(BIN)/python -m pytest

test-slow: install
	$(BIN)/python -m pytest -m slow

demo: install
	$(BIN)/gradwire demo

# Builds the wheel and imports it from outside the checkout, with every warning an error.
wheel: install
	rm -rf build/wheel && $(BIN)/python -m build --wheel --outdir build/wheel .
	rm -rf build/outside && $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target build/outside build/wheel/*.whl
	cd / && PYTHONPATH=$(CURDIR)/build/outside $(CURDIR)/$(BIN)/python -W error -c "import gradwire, gradwire.hooks.default_hooks; assert 'outside' in gradwire.__file__, gradwire.__file__; print('wheel imports:', gradwire.__version__)"

clean:
	rm -rf .venv build *.egg-info
