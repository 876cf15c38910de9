# Every target installs first: `demo` what the demo needs, all others the development tools as well. An up-to-date
# install is skipped.
PYTHON ?= python3
BIN := .venv/bin
PACKAGES := api reducer sharded collectives hooks exchange compress comm kernels planner testing integrations bench bench/gpu cli
ON_ALL_CORES := -n auto --dist worksteal
export PYTHONSAFEPATH := 1
# Developers' tools are run in the checkout and are not installed. Commands begin with `env`, not with an assignment, for
# which make would start a shell, and a shell does not pass on SIGTERM.
TOOL := env PYTHONSAFEPATH= $(BIN)/python -m tools

.PHONY: install check format docs test test-slow random mutants faults soak test-integrations test-triton36 test-matrix conformance demo bench-kernels bench-rounding bench-telemetry bench-reducer bench-hooks bench-host bench-network bench-nodes bench-anywhere bench-advise bench-converge bench-losses bench pages gpu gpu-rehearsal wheel clean

install: .venv/.installed

# A strict editable install links files one by one, so a new file (which touches its folder) needs a reinstall.
# The folders are named `bench/.` and so on, because `bench` is a target too.
SOURCES := pyproject.toml constraints.txt $(PACKAGES:=/.)
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt --config-settings editable_mode=strict

.venv/.installed: $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) --quiet "setuptools>=77"
	$(INSTALL) --quiet -e ".[dev]"
	touch .venv/.demo $@

.venv/.demo: $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing PyTorch, Triton and what the demo needs into .venv. This takes a minute or two."
	$(INSTALL) -e ".[bench]"
	touch $@

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(TOOL).import_picture --check

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The documentation site, in build/site. A broken link, a page without a place in the navigation or any other warning is
# an error.
docs: install
	env NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The kernel tests run twice, because importing a kernel binds it to Triton's compiler or to its
# interpreter. One pytest worker per core takes consecutive tests, which share their processes of
# ranks, and computes with one thread.
test test-slow: export OMP_NUM_THREADS := 1

test: install
	$(BIN)/python -m pytest $(ON_ALL_CORES)
	env TRITON_INTERPRET=1 $(BIN)/python -m pytest $(ON_ALL_CORES) tests/kernels

test-slow: install
	$(BIN)/python -m pytest $(ON_ALL_CORES) -m "slow and not faults"
	env TRITON_INTERPRET=1 $(BIN)/python -m pytest $(ON_ALL_CORES) -m slow tests/kernels

# Random sequences of events from a new seed, which is printed; GRADWIRE_SEED repeats a run. Takes MINUTES for each of
# the three comparisons.
MINUTES ?= 20
random: install
	env OMP_NUM_THREADS=1 GRADWIRE_MINUTES=$(MINUTES) $(BIN)/python -m pytest -s -m slow tests/distributed/test_random_sequences.py

# Plants the defects of tests/mutants.toml one by one, and lists those that no test catches. Takes minutes.
mutants: install
	$(TOOL).mutants

# Ranks that are killed, interrupted or stopped, links that are cut, and elastic restarts: every pair of fault, place,
# hook and DDP. Links need root on Linux.
faults: export OMP_NUM_THREADS := 1
faults: install
	$(BIN)/python -m pytest -n 4 --dist worksteal -m "not slow" tests/faults

# Thousands of steps with errors, checkpoints, new wrappers and process groups, and what they leave behind.
soak: install
	$(TOOL).validate soak --output bench/results/soak.jsonl
	$(TOOL).pages

# Tests and examples of the trainers, with the real packages, which this installs into .venv; ten minutes. `make test`
# skips those of packages that are absent. torch and triton stay as constraints.txt pins them.
test-integrations: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,integrations]" "deepspeed>=0.19" --config-settings editable_mode=strict
	$(BIN)/python -c "import accelerate, deepspeed, lightning, ray.train, transformers"
	env OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/integrations tests/project/test_examples.py

# Kernel tests with the oldest supported Triton, a dependency of PyTorch 2.11's GPU builds.
test-triton36: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target build/triton36 triton==3.6.0
	env PYTHONPATH=$(CURDIR)/build/triton36 $(BIN)/python -m pytest tests/kernels
	env PYTHONPATH=$(CURDIR)/build/triton36 TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/kernels

# Focused tests with several versions of Python and PyTorch; writes the table of docs/compatibility.md. Each pair takes
# 5 GB and some minutes.
MATRIX ?= 3.11=2.11.0 3.12=2.13.0 3.13=2.15.0
test-matrix:
	$(PYTHON) tests/project/matrix.py $(MATRIX)

# PyTorch's own DDP tests against its class and gradwire's, on 2 and 4 ranks; prints a table of the outcomes.
conformance: install
	$(BIN)/python tests/conformance --all

# Tests, sanitizer and benchmarks on this machine's GPU. An interrupted run resumes where it stopped.
gpu: install
	$(BIN)/python -m gradwire.bench.gpu first smoke ranks sanitize bench --output build/gpu_lane.jsonl

# The cases of `make gpu`, run on the CPU.
gpu-rehearsal: install
	env PYTHONSAFEPATH= $(BIN)/python -m tests.support.rehearse first smoke ranks sanitize bench --output build/gpu_rehearsal.jsonl

# Trains over a link of 100 Mb/s as root on Linux, else over loopback.
demo: .venv/.demo
	@$(BIN)/gradwire demo

bench-kernels: install
	$(BIN)/gradwire bench kernels

bench-rounding: install
	$(TOOL).validate rounding

# Losses after 2,000 steps, and with a quantized reduce-scatter: takes hours. Kept trainings are not repeated.
LONG_HOOKS := none,int8,int6,int4,int2,sign,powersgd-r4,powersgd-r16,powersgd-r16-int8,powersgd-r32-int8
bench-losses: install
	$(BIN)/gradwire bench converge --task small-text --steps 2000 --optimizers adamw,muon,sgd --hooks $(LONG_HOOKS) --output bench/results/converge_long_text.jsonl
	$(BIN)/gradwire bench converge --task text --steps 2000 --seeds 1 --hooks none,int4,powersgd-r16-int8,powersgd-r32-int8 --output bench/results/converge_long_gpt.jsonl
	$(BIN)/gradwire bench converge --task digits --steps 2000 --optimizers adamw,sgd --hooks $(LONG_HOOKS) --output bench/results/converge_long_digits.jsonl
	$(TOOL).validate sharded --output bench/results/sharded_losses.jsonl

bench-telemetry: install
	$(BIN)/gradwire bench telemetry

bench-reducer: install
	$(BIN)/gradwire bench reducer

bench-hooks: install
	$(BIN)/gradwire bench hooks

# The host's part of a step on a GPU, measured without a GPU: needs a C compiler.
bench-host: install
	$(BIN)/gradwire bench host

# Step times between two network namespaces: needs root.
bench-network: install
	$(BIN)/gradwire bench network

# Training on two nodes of two ranks, in network namespaces: needs root.
bench-nodes: install
	$(BIN)/gradwire bench nodes

# Loops without DDP, plain and compressed, on two hosts: needs root.
bench-anywhere: install
	$(BIN)/gradwire bench anywhere

# Predictions of `gradwire advise` against measured steps: needs root.
bench-advise: install
	$(TOOL).validate advise

# Time to a target loss between two network namespaces: needs root.
bench-converge: install
	$(BIN)/gradwire bench converge

# Runs the demo and all benchmarks, keeps their results, and regenerates the tables and plots.
# Takes two hours on a quiet machine.
bench: install
	$(BIN)/gradwire demo && cp demo/results.jsonl bench/results/demo.jsonl
	$(BIN)/gradwire bench kernels --output bench/results/kernels.jsonl
	$(TOOL).validate rounding --output bench/results/rounding.jsonl
	$(BIN)/gradwire bench telemetry --output bench/results/telemetry.jsonl
	$(BIN)/gradwire bench reducer --output bench/results/reducer.jsonl
	$(BIN)/gradwire bench hooks --output bench/results/hooks.jsonl
	$(BIN)/gradwire bench host --output bench/results/host.jsonl
	$(BIN)/gradwire bench network --output bench/results/network.jsonl
	$(BIN)/gradwire bench nodes --output bench/results/nodes.jsonl
	$(BIN)/gradwire bench anywhere --output bench/results/anywhere.jsonl
	$(TOOL).validate advise --output bench/results/advise.jsonl
	$(BIN)/gradwire bench converge --task digits --output bench/results/converge_digits.jsonl
	$(BIN)/gradwire bench converge --task text --output bench/results/converge_text.jsonl
	$(TOOL).pages

# Tables and plots of README and docs, from bench/results.
pages: install
	$(TOOL).pages

# Builds the source distribution and from it the wheel, into build/dist; requires the same files of a wheel built from
# the checkout, and imports the wheel from outside the checkout, with every warning an error. The build tools are pinned
# and the files get the time of the commit, so that two builds give the same wheel.
wheel: export SOURCE_DATE_EPOCH = $(shell git log -1 --format=%ct)
wheel: install
	rm -rf build/dist build/lib build/outside build/wheel
	$(BIN)/python -m build --no-isolation --outdir build/dist .
	$(BIN)/twine check --strict build/dist/*
	$(BIN)/python -m build --no-isolation --wheel --outdir build/wheel .
	$(BIN)/python -m zipfile -e build/dist/*.whl build/wheel/from_sdist
	$(BIN)/python -m zipfile -e build/wheel/*.whl build/wheel/from_checkout
	diff -r build/wheel/from_sdist build/wheel/from_checkout
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target build/outside build/dist/*.whl
	cd / && PYTHONPATH=$(CURDIR)/build/outside $(CURDIR)/$(BIN)/python -W error -c "import gradwire, gradwire.hooks.default_hooks; assert 'outside' in gradwire.__file__, gradwire.__file__; print('wheel imports:', gradwire.__version__)"

clean:
	rm -rf .venv build *.egg-info
