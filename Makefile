# Each target works alone on a fresh machine: it makes the virtual environment first. Needs Python 3.11 or newer.
#
#   make demo    the whole story on a small trained model
#   make test    the test suite (TESTS="tests/test_ouro.py -k gate" runs part of it)
#   make lint    ruff check        make format   ruff format, in place
#   make models  write docs/models.md: what each front end makes of each kind of model
#   make type    mypy on an installed copy
#   make check   what CI runs: test, lint, format check, type check

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The first of these that is 3.11 or newer; PYTHON=/path/to/python overrides it.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& { echo $$p; break; }; done)
TESTS ?= tests

.PHONY: help venv demo test models lint format format-check type check clean

help:
	@sed -n 's/^#  *make/make/p' Makefile

venv: $(STAMP)

# torch first and alone: later steps then find the pinned version installed and leave it. On a machine where another
# index holds the right build of torch, pip's own settings (PIP_EXTRA_INDEX_URL, PIP_INDEX_URL) apply.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or newer found; set PYTHON=/path/to/python" >&2; exit 1; }
	@echo "making $(VENV) with torch, transformers and the tools: a few minutes, once" >&2
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt "$$(grep -E '^torch==' constraints.txt)"
	PYTHONWARNINGS="ignore:Editable installation" $(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,eval]'
	touch $@

demo: $(STAMP)
	$(BIN)/sparse-compile demo

test: $(STAMP)
	$(BIN)/python -m pytest -n auto --dist loadscope $(TESTS)

models: $(STAMP)
	$(BIN)/python -W ignore tests/model_matrix.py

lint: $(STAMP)
	$(BIN)/ruff check .

format: $(STAMP)
	$(BIN)/ruff format .

format-check: $(STAMP)
	$(BIN)/ruff format --check .

# Type checkers do not follow the package-dir mapping of pyproject.toml, so they see a copy installed the ordinary way.
# build/lib goes first: setuptools would put modules that no longer exist from there into the copy.
type: $(STAMP)
	rm -rf build/lib build/typecheck
	$(BIN)/python -m pip install --quiet --no-deps --target build/typecheck .
	MYPYPATH=build/typecheck $(BIN)/mypy -p sparse_compile

check: test lint format-check type

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
	rm -rf $(VENV)
