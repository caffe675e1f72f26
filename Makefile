# `make demo` and `make test` do everything on a fresh machine: they need Python >= 3.10 with venv,
# a C compiler and nothing else. All that they install goes to .venv/.

PYTHON ?= python3
WERROR ?= OFF
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
INSTALL_INPUTS := pyproject.toml requirements/ci.txt $(shell find native -type f)

.PHONY: setup demo test quick-test lint format clean gpu-check

setup: $(STAMP)

$(STAMP): $(INSTALL_INPUTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint requirements/ci.txt torch
	$(BIN)/pip install --quiet --constraint requirements/ci.txt \
		--config-settings=cmake.define.ZOFFLOAD_WERROR=$(WERROR) --editable ".[dev]"
	touch $@

demo: setup
	$(BIN)/python examples/train_lm.py

test: setup
	$(BIN)/python -m pytest

quick-test: setup
	$(BIN)/python -m pytest -m "not slow and not gpu"

lint: setup
	$(BIN)/pre-commit run --all-files --show-diff-on-failure

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(shell find native -name '*.[ch]')

gpu-check: setup
	$(BIN)/python -m pytest -m gpu tests/gpu

clean:
	rm -rf $(VENV) build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
