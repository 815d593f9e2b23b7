# Two commands on a fresh machine: `make train` and `make test`. Both do all the set-up they need.
PYTHON ?= python3
BIN := .venv/bin
# What an installation is made of: the C source is built when Canter is installed.
SOURCES := pyproject.toml constraints.txt $(wildcard src/canter/engines/native/*.[ch])
# Every install goes through this: the constraint keeps torch at the build that the project is checked with.
PIP_INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: train test test-mjlab lint types layers docs pytest test-all test-faults format bench-learning bench-cpu bench-gpu clean

train: .venv/installed
	$(BIN)/canter train CartPole-v1

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

pytest: .venv/installed-dev
	$(BIN)/pytest -n auto

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
	rm -rf .venv .venv-peers .venv-mjlab .pytest_cache .ruff_cache .hypothesis build dist

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/installed: .venv/bin/python $(SOURCES)
	$(PIP_INSTALL) --editable .
	touch $@

.venv/installed-dev: .venv/bin/python $(SOURCES)
	$(PIP_INSTALL) --editable '.[dev]'
	touch .venv/installed $@

# Releases of other libraries, to compare with; in an environment of their own, for they ask for much.
.venv-peers/installed: $(SOURCES) benchmarks/speed/peers/requirements.txt
	$(PYTHON) -m venv .venv-peers
	$(subst $(BIN),.venv-peers/bin,$(PIP_INSTALL)) --editable '.[mujoco]' --requirement benchmarks/speed/peers/requirements.txt
	touch $@

.venv-mjlab/installed: $(SOURCES)
	$(PYTHON) -m venv .venv-mjlab
	$(subst $(BIN),.venv-mjlab/bin,$(PIP_INSTALL)) --editable '.[mjlab,onnx]' pytest
	touch $@
