# Everything a contributor types. The two that set a fresh machine up: `make demo`, `make test`.
#   PYTHON=python3.12   the Python that .venv is built on (3.11 or newer)
#   TORCH=own           install a torch even if PYTHON can import one
#   P="cost planner"    `make test` of these packages only: the folders below tests/
#   PYTEST_ARGS=...     passed on to pytest; -n0 runs all tests in one process
VENV := .venv
BIN := $(VENV)/bin
SOURCES := src tests scripts $(wildcard examples benchmarks)
# A process per core; more than four wait for the longest file of tests. tests/conftest.py says who gets which.
PARALLEL := -n logical --maxprocesses 4

export PYTHON TORCH
# Where it is set, every process that a test starts compiles torch and all else that it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-ci test-all lint format docs clean distclean
.DELETE_ON_ERROR:

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# A stamp says that an install is done; it is redone when what is to be installed has changed.
$(VENV)/.stamp-%: pyproject.toml constraints.txt scripts/setup.sh
	@bash scripts/setup.sh $*

demo: $(VENV)/.stamp-run ## capture, measure, plan, simulate, run and compare a small GPT; see demo-out/
	$(BIN)/python examples/demo.py --out demo-out

test: $(VENV)/.stamp-dev ## two cases of each test that is not long; P=planner: those of a package
	$(BIN)/python -m pytest -m "not slow and not long and not lint" --hypothesis-profile=quick $(PARALLEL) $(PYTEST_ARGS) $(P:%=tests/%)

test-ci: $(VENV)/.stamp-dev ## what CI runs: all cases, the long tests too, as every command of the pages
	$(BIN)/python -m pytest -m "not slow and not lint" --timeout=300 $(PARALLEL) $(PYTEST_ARGS)

test-all: $(VENV)/.stamp-dev ## the slow ones too, with more examples for each property
	$(BIN)/python -m pytest --hypothesis-profile=thorough --timeout=900 $(PYTEST_ARGS)

lint: $(VENV)/.stamp-dev ## format, lint, types, layers, layout, portability, spelling
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m pytest -q tests/test_layout.py tests/test_portability.py tests/test_reach.py tests/test_language.py
	$(BIN)/codespell $(wildcard *.md) docs .ci $(SOURCES)

format: $(VENV)/.stamp-dev ## rewrite the sources in the house format
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

docs: $(VENV)/.stamp-docs ## build the site into site/, warnings are errors
	NO_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict

clean: ## remove what was built, keep .venv
	rm -rf site demo-out build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests scripts $(wildcard examples benchmarks) -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## remove .venv too
	rm -rf $(VENV)
