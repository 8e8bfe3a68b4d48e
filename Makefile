# make demo    installs into .venv and runs the main job on real input
# make test    installs what tests need and runs all of them
# Others: setup, demo-ep (an expert-parallel decode group of two ranks), up, check, bench, protos, wheel. PYTHON=python3.12 picks another interpreter.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONFIG ?= deploy/examples/local.toml
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt

.PHONY: setup demo demo-ep up check test bench protos wheel
.DEFAULT_GOAL := demo

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else f"Hocket needs Python 3.11 or newer; $(PYTHON) is {v.major}.{v.minor}. Try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing Hocket into $(VENV): some minutes the first time."
	$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing Hocket and its development tools into $(VENV): some minutes the first time."
	$(PIP_INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.installed

setup: $(VENV)/.installed-dev

demo: $(VENV)/.installed
	$(BIN)/hocket demo

demo-ep: $(VENV)/.installed
	$(BIN)/hocket demo --set decode.group_size=2

up: $(VENV)/.installed
	$(BIN)/hocket up --config $(CONFIG)

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(PYTEST_ARGS)

bench: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/decode.py --short

protos: $(VENV)/.installed-dev
	$(BIN)/python tools/generate_stubs.py

wheel: $(VENV)/.installed-dev
	$(BIN)/python -m build --wheel
