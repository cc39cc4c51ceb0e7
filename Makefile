# `make demo` and `make test` set up everything they need in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A CUDA build of torch is several GB: take it only where there is a GPU to use it.
TORCH ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo "torch>=2.9,<2.14" || echo "torch==2.13.0")

.PHONY: install install-test demo test check lint types unit clean

install: $(VENV)/.installed
install-test: $(VENV)/.installed-test

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install -q "$(TORCH)"
	$(BIN)/python -m pip install -q -e .
	touch $@

$(VENV)/.installed-test: pyproject.toml $(VENV)/.installed
	$(BIN)/python -m pip install -q -e ".[dev]"
	sh deploy/test-tools.sh
	touch $@

demo: install
	$(BIN)/inferix serve --model tiny-world

test: install-test check

check: lint types unit

lint:
	$(BIN)/ruff format --check engine server tests
	$(BIN)/ruff check engine server tests

types:
	$(BIN)/mypy

unit:
	$(BIN)/pytest

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
