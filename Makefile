# Two commands on a fresh machine: `make train` and `make test`. Both do all the set-up they need.
PYTHON ?= python3
BIN := .venv/bin
# Every install goes through this: the constraint keeps torch at the build that the project is checked with.
PIP_INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: train test lint types layers pytest format bench-learning clean

train: .venv/installed
	$(BIN)/canter train CartPole-v1

test: lint types layers pytest

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed-dev
	$(BIN)/pyright

layers: .venv/installed-dev
	$(BIN)/lint-imports

pytest: .venv/installed-dev
	$(BIN)/pytest

format: .venv/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-learning: .venv/installed-dev
	$(BIN)/python benchmarks/learning/run.py

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build dist

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/installed: .venv/bin/python pyproject.toml constraints.txt
	$(PIP_INSTALL) --editable .
	touch $@

.venv/installed-dev: .venv/bin/python pyproject.toml constraints.txt
	$(PIP_INSTALL) --editable '.[dev]'
	touch .venv/installed $@
