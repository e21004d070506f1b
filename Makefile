.DEFAULT_GOAL := help
.PHONY: help setup demo test verify proto bench clean
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

help: ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "%-8s %s\n", $$1, $$2}'

setup: $(STAMP) ## make .venv with everything, at the pinned versions

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Tessera needs Python 3.11 or later")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m solvers.kernels.warm
	touch $(STAMP)

demo: $(STAMP) ## the main job: a 1,280-GPU cluster scheduled for some rounds, ILP beside greedy
	$(BIN)/tessera demo

test: $(STAMP) ## all tests
	$(BIN)/python -m pytest -q

verify: $(STAMP) ## what must hold beside the tests: format, lint, types, layers, fresh stubs, bench smoke
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/protos.py --check
	$(MAKE) bench

bench: $(STAMP) ## a smoke run of every benchmark
	$(BIN)/tessera bench --smoke

proto: $(STAMP) ## generate Python from proto/
	$(BIN)/python scripts/protos.py

clean: ## remove .venv and caches
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
