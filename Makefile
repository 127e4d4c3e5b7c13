# The targets of the repository; `make help` lists them.
SEED ?= 0
PYTHON := .venvs/cli/bin/python
FORAGE := .venvs/cli/bin/forage
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-long test-all images test-compose up down logs chart-schema metrics-doc docs docs-serve \
  dashboards lint format proto lock bench bench-faiss bench-retriever-start soak-reward clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-22s %s\n", $$1, $$2}'

setup: ## install one environment per service (.venvs/), when needed
	@scripts/setup.sh

demo: setup ## train the tiny policy to search, live, in five to ten minutes (SEED=0)
	@$(FORAGE) demo --seed $(SEED)

test: setup ## the tests of every service, in under ten minutes
	@$(PYTHON) scripts/run_tests.py quick

test-long: setup ## the long tests alone: chaos, seeds, browser, deployment, two nodes
	@$(PYTHON) scripts/run_tests.py long

test-all: ## every test: `make test`, then `make test-long`
	@$(MAKE) --no-print-directory test
	@$(MAKE) --no-print-directory test-long

test-compose: setup ## the stack in a real Docker engine: builds, trains, is injured, comes back (5 minutes, and the builds)
	@FORAGE_DOCKER_TESTS=1 .venvs/cli/bin/python -m pytest -rs tests/deploy/cli/test_compose_engine.py

images: ## build the services' images (GPU=1, SERVICES="reward cli", REGISTRY=…)
	@scripts/images.sh

up: ## the whole stack in Docker: services, Redis, Prometheus, Grafana (RECIPE=configs/demo.yaml)
	@scripts/compose.sh up

down: ## end it; what it wrote stays (VOLUMES=1 drops that, too)
	@scripts/compose.sh down

logs: ## what it says (SERVICE=trainer)
	@scripts/compose.sh logs

chart-schema: setup ## make the chart's values.schema.json from the settings
	@.venvs/cli/bin/python scripts/chart_schema.py

dashboards: setup ## make deploy/grafana/dashboards from the code beside it
	@.venvs/uv/bin/uv run --quiet --no-project --python .venvs/cli/bin/python --with-requirements deploy/grafana/requirements.txt deploy/grafana/build.py

metrics-doc: setup ## make docs/reference/metrics.md from the services' code
	@.venvs/cli/bin/python scripts/metrics_doc.py

DOCS_RUN = NO_MKDOCS_2_WARNING=1 .venvs/uv/bin/uv run --quiet --no-project --python .venvs/common/bin/python --with-requirements docs/requirements.txt mkdocs

docs: ## build the documentation site into site/; a dead link or a page without a place in mkdocs.yml fails
	@scripts/setup.sh common
	@$(DOCS_RUN) build --strict

docs-serve: ## show the documentation site on http://127.0.0.1:8000 while you write (DOCS_ADDRESS=…)
	@scripts/setup.sh common
	@$(DOCS_RUN) serve --livereload --dev-addr $(or $(DOCS_ADDRESS),127.0.0.1:8000)

lint: setup ## ruff, mypy, buf lint, generated stubs current
	@scripts/lint.sh

format: setup ## format the Python code
	@.venvs/cli/bin/ruff check --fix-only --quiet . ; .venvs/cli/bin/ruff format --quiet .

proto: setup ## generate forage_common/v1 from proto/
	@scripts/proto.sh

lock: setup ## pin requirements.in of every service into requirements.lock
	@scripts/lock.sh

bench: $(patsubst benchmarks/%,bench-%,$(wildcard benchmarks/[a-z]*)) ## every benchmark

bench-%: setup ## one benchmark: a table, then one line of JSON
	@benchmarks/$*/run

bench-faiss: setup ## FAISS index types over a million vectors (PASSAGES=1000000)
	@.venvs/retriever/bin/python benchmarks/retriever/faiss_types.py $(PASSAGES)

bench-retriever-start: setup ## the retriever's start over a million passages (PASSAGES=1000000)
	@.venvs/retriever/bin/python benchmarks/retriever/start_bench.py $(PASSAGES)

soak-reward: setup ## the reward service under full load and injury (MINUTES=5)
	@.venvs/reward/bin/python benchmarks/reward/soak.py $(or $(MINUTES),5)

clean: ## remove environments, caches, built data and runs
	rm -rf .venvs .cache data runs site .mypy_cache .ruff_cache .pytest_cache .hypothesis
