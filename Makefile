# Two commands on a fresh machine: `make train` and `make test`. Both do all the set-up they need.
# `make train` installs no development tools.
PYTHON ?= python3
# Containers often set it. The tests start hundreds of processes, and each would compile torch's sources again.
unexport PYTHONDONTWRITEBYTECODE
BIN := .venv/bin
# What an installation is made of: the C source is built when Canter is installed.
SOURCES := pyproject.toml constraints.txt $(wildcard src/canter/engines/native/*.[ch])
# Every install goes through this: the constraint keeps torch at the version that the project is checked with.
# Only the modules that are used are byte-compiled, at their first import.
PIP_INSTALL := $(BIN)/pip install --no-compile --disable-pip-version-check --constraint constraints.txt
# On Linux the usual torch comes with gigabytes of CUDA libraries. Without an NVIDIA GPU its CPU build is taken, if the
# index of these builds can be reached; TORCH_BUILD= takes the usual one.
CPU_BUILDS := https://download.pytorch.org/whl/cpu
TORCH_BUILD = $(shell test "$$(uname)" = Linux && ! command -v nvidia-smi > /dev/null && \
	curl --silent --fail --head --max-time 5 --output /dev/null $(CPU_BUILDS)/torch/ && echo --extra-index-url $(CPU_BUILDS))

.PHONY: train dist test test-mjlab test-jax lint types layers docs pytest test-all test-faults format bench-learning bench-cpu bench-gpu clean

train: .venv/installed
	$(BIN)/canter train CartPole-v1

# What is released: a source distribution, and a wheel for this machine.
dist: .venv/installed-dev
	$(BIN)/python -m build

# What is worth running before every commit. The type checker takes as long as the other three together.
test: .venv/installed-dev
	$(MAKE) --jobs 2 types lint layers docs
	$(MAKE) pytest

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed-dev
	$(BIN)/pyright

layers: .venv/installed-dev
	$(BIN)/lint-imports

docs: .venv/installed-dev
	$(BIN)/sphinx-build -W --keep-going -q -b html docs build/docs

# The tests of a file share one process, and so what its fixtures prepare.
pytest: .venv/installed-dev
	$(BIN)/pytest -n auto --dist loadfile

# Everything: the long tests, one at a time for what they measure, and hours of kills and damaged files.
test-all: test
	$(BIN)/pytest -n 1 -m long
	$(BIN)/python benchmarks/faults/run.py
	$(BIN)/python benchmarks/ranks/kills.py
	$(BIN)/python benchmarks/ranks/elastic.py

test-faults: test-all

# mjlab asks for much, so it has an environment of its own; on a CPU its kernels compile for minutes at first.
test-mjlab: .venv-mjlab/installed
	.venv-mjlab/bin/pytest tests/envs/test_mjlab.py

# So have the simulators in JAX, since gymnax asks for an older Gymnasium; XLA compiles for minutes too.
test-jax: .venv-jax/installed
	.venv-jax/bin/pytest tests/envs/test_jax.py tests/engines/test_xla.py -m 'long or not long'

format: .venv/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-learning: .venv/installed-dev
	$(BIN)/python benchmarks/learning/run.py

bench-cpu: .venv-peers/installed
	.venv-peers/bin/python benchmarks/speed/cpu.py

bench-gpu: .venv-peers/installed
	.venv-peers/bin/python benchmarks/speed/gpu.py
	.venv-peers/bin/python benchmarks/speed/plot.py

clean:
	rm -rf .venv .venv-peers .venv-mjlab .venv-jax .pytest_cache .ruff_cache .hypothesis build dist

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/installed: .venv/bin/python $(SOURCES)
	@echo 'Installing what training needs into .venv: torch (190 MB; several GB where it comes with CUDA) and 30 MB of others'
	$(PIP_INSTALL) $(TORCH_BUILD) --editable .
	touch $@

.venv/installed-dev: .venv/bin/python $(SOURCES)
	@echo 'Installing what the tests need into .venv: besides torch the simulators and the development tools'
	$(PIP_INSTALL) $(TORCH_BUILD) --editable '.[dev]'
	touch .venv/installed $@

# Releases of other libraries, to compare with; in an environment of their own, for they ask for much.
.venv-peers/installed: $(SOURCES) benchmarks/speed/peers/requirements.txt
	$(PYTHON) -m venv .venv-peers
	$(subst $(BIN),.venv-peers/bin,$(PIP_INSTALL)) --editable '.[mujoco]' --requirement benchmarks/speed/peers/requirements.txt
	touch $@

.venv-jax/installed: $(SOURCES)
	$(PYTHON) -m venv .venv-jax
	$(subst $(BIN),.venv-jax/bin,$(PIP_INSTALL)) $(TORCH_BUILD) --editable '.[playground]' pytest
	touch $@

.venv-mjlab/installed: $(SOURCES)
	$(PYTHON) -m venv .venv-mjlab
	$(subst $(BIN),.venv-mjlab/bin,$(PIP_INSTALL)) --editable '.[mjlab,onnx]' pytest
	touch $@
