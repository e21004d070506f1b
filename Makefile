.DEFAULT_GOAL := help
.PHONY: help setup demo test test-full test-night torch verify types static size supply sbom lock docs proto bench clean
PYTHON ?= python3
unexport PYTHONDONTWRITEBYTECODE # many processes are started: each would compile all that it imports
BIN := .venv/bin
DEV := .venv/.installed-dev
SERVER := .venv/.installed-server

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "%-10s %s\n", $$1, $$2}'

setup: $(DEV) ## make .venv with everything, at the pinned versions

$(DEV): pyproject.toml proto/pyproject.toml requirements/server.lock requirements/dev.lock
	@$(PYTHON) scripts/setup.py dev .venv
	@touch $(DEV) $(SERVER)

$(SERVER): pyproject.toml proto/pyproject.toml requirements/server.lock
	@$(PYTHON) scripts/setup.py server .venv
	@touch $(SERVER)

demo: $(SERVER) ## the main job: a 1,280-GPU cluster scheduled for some rounds, ILP next to greedy
	$(BIN)/tessera demo

PYTEST := -q -n 3 --dist loadfile --no-loadscope-reorder # the long files of e2e first

test: $(DEV) ## the quick tests: units, laws, one story of each use, the README's commands (5 minutes)
	$(BIN)/python scripts/run_tests.py quick -q -n 2 --dist loadfile --durations=20 \
	    tests/e2e/test_pages.py tests/e2e/test_cli_jobs.py tests/simulation tests/property tests/contract tests/unit

test-full: torch test ## the quick tests, and then all others, with four times the examples of each law (20 minutes)
	$(BIN)/python scripts/run_tests.py full $(PYTEST) -m "full or law"

test-night: $(DEV) torch ## all tests with 60 times the examples of each law
	$(BIN)/python scripts/run_tests.py night $(PYTEST)

torch: $(DEV)
	@test -n "$$TESSERA_TORCH_PYTHON" || $(BIN)/python scripts/torch_env.py --with-transformers \
	    || echo "tests that train with PyTorch will be skipped"

verify: $(DEV) ## what else must hold: format, lint, style, size, results, types, layers, stubs, the wire, packages, secrets, documents, bench smoke
	$(MAKE) --jobs=2 --output-sync=line static types bench supply docs

types: $(DEV) ## types, by mypy --strict
	$(BIN)/mypy

static: $(DEV) size ## format, lint, style, size, results, layers, stubs, the wire
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python scripts/style.py
	$(BIN)/python -m tessera.benchmarks.harness.results --check
	$(BIN)/lint-imports
	$(BIN)/python scripts/protos.py --check
	$(BIN)/buf breaking proto --against proto/released.binpb

size: $(DEV) ## lines, words, modules and options, by their limits in scripts/size_limits.toml
	$(BIN)/python scripts/size.py

supply: $(DEV) ## no new secret; packages locked, of allowed licences, and listed in build/sbom.json
	$(BIN)/python scripts/leaks.py
	$(BIN)/python scripts/lock.py --check
	$(BIN)/python scripts/licences.py
	$(MAKE) sbom

sbom: $(DEV) ## the bill of materials, as CycloneDX JSON in build/sbom.json
	$(BIN)/python scripts/sbom.py build/sbom.json

lock: ## update the locks to pyproject.toml; UPGRADE=1 takes the newest versions
	$(BIN)/python scripts/lock.py $(if $(UPGRADE),--upgrade)

docs: $(DEV) ## the documentation as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(DEV) ## a smoke run of every benchmark
	$(BIN)/tessera bench --smoke

proto: $(DEV) ## generate Python from proto/
	$(BIN)/python scripts/protos.py

clean: ## remove .venv and caches
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
