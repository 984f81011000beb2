# `make` alone lists the targets. Needs git, make and Python 3.11 or newer; everything else is set up on first use.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help quickstart test test-services soak check lint types fast services service-packages goldens bench lock clean

# Further arguments for the target's command, as in `make test ARGS='-k lease'`.
ARGS ?=
# Number of tests that run at a time. Many tests wait more than they compute, so two cores can run four.
WORKERS ?= 4
# Duration of each simulated scenario's search in `make soak`.
SOAK_S ?= 300
PY := .venv/bin/python
SOURCES := $(shell find runtime infra examples -name '*.py' -not -path '*/.*' 2>/dev/null)

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-20s %s\n", $$1, $$2}'

quickstart: .venv/.base-compiled ## install what a user needs, then run the main job end to end on this machine
	@.venv/bin/runtime quickstart $(ARGS)

test: .venv/.compiled ## set up, then run every test that needs no server; minutes on two cores
	$(PY) -m pytest -n $(WORKERS) --dist worksteal -m 'not service and not nightly' $(ARGS)

test-services: .venv/.compiled ## tests that start real servers; skipped with the reason if a component is missing
	$(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m 'service and not nightly' $(ARGS)

soak: .venv/.compiled ## storms, soaks, further variants of tests, and long searches of the simulation; hours
	@code=0; SOAK=1 $(PY) -m pytest -n $(WORKERS) --dist loadfile -m 'soak or nightly' $(ARGS) || code=1; \
	$(PY) -m tests.simulation scenarios | xargs -I{} $(PY) -m tests.simulation run {} --seconds $(SOAK_S) || code=1; exit $$code

check: lint types fast ## format, lint, types and the fast tests, offline

lint: .venv/.ready
	$(PY) -m ruff format --check --quiet .
	$(PY) -m ruff check --quiet .

types: .venv/.ready
	$(PY) -m mypy --no-error-summary

fast: .venv/.compiled
	$(PY) -m pytest -q -n 4 -m 'not service and not slow and not nightly' $(wildcard tests/unit tests/conformance tests/infra tests/services/test_failure*.py) $(ARGS)

services: service-packages ## install the real components the service tests need (Debian, Ubuntu)
	@scripts/kubernetes install
	@scripts/kubernetes build

# All of them but Kubernetes, whose build takes minutes.
service-packages: .venv-lock/.ready
	@scripts/services
	@scripts/image-tools
	@scripts/slurm install

goldens: .venv/.ready ## rewrite the golden files; review the diff
	$(PY) -m pytest -q -m golden --update-goldens $(ARGS)

bench: .venv-bench/.ready .venv/.compiled ## measure against the peers and print the table of ratios
	.venv-bench/bin/python -m benchmarks $(ARGS)

lock: .venv-lock/.ready ## rewrite locks/; ARGS=--upgrade takes newer versions
	@scripts/lock .venv-lock/bin/python $(ARGS)

clean: ## remove everything that make has made
	rm -rf .venv .venv-bench .venv-lock .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# The package and its required dependencies; `.venv/.ready` adds the extras and the test tools to the same environment.
.venv/.base: locks/build.txt pyproject.toml scripts/set-up
	@scripts/set-up .venv locks/build.txt --with-project
	@touch $@

.venv/.ready: locks/dev.txt pyproject.toml scripts/set-up
	@scripts/set-up .venv locks/dev.txt --with-project
	@touch .venv/.base $@

# With PYTHONDONTWRITEBYTECODE set, Python writes no byte code, so without this step each start would compile the sources again.
.venv/.base-compiled: .venv/.base $(SOURCES)
	@$(PY) -m compileall -q $(wildcard runtime examples)
	@touch $@

.venv/.compiled: .venv/.ready $(SOURCES)
	@$(PY) -m compileall -q $(wildcard runtime infra examples)
	@touch $@

.venv-bench/.ready: locks/bench.txt pyproject.toml scripts/set-up
	@scripts/set-up .venv-bench locks/bench.txt --with-project
	@touch $@

.venv-lock/.ready: locks/lock.txt scripts/set-up
	@scripts/set-up .venv-lock locks/lock.txt
	@touch $@
