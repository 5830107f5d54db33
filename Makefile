# Every target works on a fresh clone: the first one that runs makes the environment in .venv.
#
#   PYTHON       interpreter the environment is made with (3.11 or newer)
#   TORCH        what pip is given for torch. Unpinned, pip takes the newest, on Linux a CUDA build
#                of several GB; the pin is a release that the tests ran on. For another build:
#                make TORCH="torch==2.13.0 --index-url URL" (pytorch.org/get-started has the URLs)
#   PYTEST_ARGS  more arguments for pytest: make test PYTEST_ARGS="-m 'not slow' tests/passes"
#   JOBS         tests at a time, one thread each; default: as many as there are cores
#   BENCH        the benchmarks to run: make bench BENCH=bench/bench_attention.py
#
# A change of PYTHON or TORCH takes effect after `make distclean`.

PYTHON ?= python3
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
BENCH ?= $(wildcard bench/bench_*.py)

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEV_INSTALLED := $(VENV)/.installed-dev
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: help demo test lint lint-format lint-ruff lint-types fmt bench hooks clean distclean

help:
	@echo "make demo       compile a small model on this machine and show what was rewritten"
	@echo "make test       run the tests"
	@echo "make lint       formatting, lint rules and types (make fmt mends the first two)"
	@echo "make bench      run the benchmarks in bench/ and append to bench/results/"
	@echo "make clean      remove build outputs and caches (make distclean: .venv too)"

# Passive: code from Inductor may bring a second OpenMP runtime, and threads that spin while they wait
# take the other's cores.
demo: $(INSTALLED)
	@OMP_WAIT_POLICY=$${OMP_WAIT_POLICY:-PASSIVE} $(BIN)/rtc demo

test: $(INSTALLED)
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -q -n $(JOBS) $(PYTEST_ARGS)

lint: lint-format lint-ruff lint-types

lint-format: $(DEV_INSTALLED)
	@$(BIN)/ruff format --check --quiet . || { echo "ruff format: run 'make fmt'" >&2; exit 1; }

lint-ruff: $(DEV_INSTALLED)
	@$(BIN)/ruff check --quiet .

lint-types: $(DEV_INSTALLED)
	@PATH="$(CURDIR)/$(BIN):$$PATH" .ci/types

fmt: $(DEV_INSTALLED)
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format --quiet .

bench: $(INSTALLED)
	@for file in $(BENCH); do echo "bench: $$file"; $(BIN)/python $$file; done

hooks: $(DEV_INSTALLED)
	@$(BIN)/pre-commit install

clean:
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	@find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	@rm -rf $(VENV)

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rtc needs Python 3.11 or newer: make PYTHON=python3.12")'
	@echo "venv: making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@echo "venv: installing $(TORCH): minutes, if it has to be downloaded"
	@$(PIP) install $(TORCH)
	@echo "venv: installing rtc with what its tests need"
	@$(PIP) install -e '.[report,test,third-party]'
	@touch $@

$(DEV_INSTALLED): $(INSTALLED)
	@echo "venv: installing ruff, mypy and pre-commit"
	@$(PIP) install -e '.[dev]'
	@touch $@
