# The targets of the repository; `make help` lists them.
SEED ?= 0
PYTHON := .venvs/cli/bin/python
FORAGE := .venvs/cli/bin/forage
UV_RUN := .venvs/uv/bin/uv run --quiet --no-project --python $(PYTHON)
MKDOCS := NO_MKDOCS_2_WARNING=1 $(UV_RUN) --with-requirements docs/requirements.lock mkdocs
.DEFAULT_GOAL := help
.PHONY: help setup wheel demo test test-all test-changed test-long test-seconds test-stress test-compose lint format \
  screenshots console docs docs-serve reference dashboards chart-schema proto lock audit audit-update pin-images \
  images up down logs documented bench gpu-check simulate chaos fuzz soak-reward version release clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-22s %s\n", $$1, $$2}'

setup: ## install one environment per service in .venvs/ and build the console's pages, when needed (DEVICE=gpu, and DEVICE=cpu to go back)
	@scripts/setup.sh $(if $(DEVICE),--device '$(DEVICE)')

wheel: setup ## build dist/forage_cli-*.whl: 'pip install' it anywhere, and 'forage demo' runs in an empty folder
	@$(PYTHON) scripts/wheel.py

demo: setup ## train the tiny policy to search, with a live view, in five to ten minutes (SEED=0)
	@$(FORAGE) demo --seed $(SEED)

test: setup ## run the tests of every service and a short demo whose trainer is killed, in about ten minutes
	@$(PYTHON) scripts/run_tests.py quick

test-changed: setup ## run those of `make test` that a change since BASE can affect, by imports (BASE=main)
	@$(PYTHON) scripts/run_tests.py quick --changed $(or $(BASE),main)

test-long: setup ## run the long tests: whole systems, recipes, chaos, browser, deployment (SHARD=2/4)
	@$(PYTHON) scripts/run_tests.py long $(and $(SHARD),--shard $(SHARD))

test-all: test ## run every test: `make test`, then the four shards of `make test-long`
	@for shard in 1 2 3 4; do $(MAKE) --no-print-directory test-long SHARD=$$shard/4 || failed=1; done; [ -z "$$failed" ]

test-stress: setup ## run `make test` three times beside busy processes, with other kernels, threads and order (ONLY=order SEED=7)
	@SEED=$(filter-out 0,$(SEED)) scripts/stress_tests.sh $(ONLY)

test-seconds: setup ## run every test and record the seconds of each file, by which shards are made
	@$(PYTHON) scripts/run_tests.py quick long --record

test-compose: setup ## run the Docker Compose stack in a real engine: build, train, kill, recover (5 minutes and the builds)
	@FORAGE_DOCKER_TESTS=1 $(PYTHON) -m pytest -rs tests/nightly/cli_deploy/test_compose_engine.py

lint: setup ## check style, types, layers of imports, shell scripts, protos, the front end, known vulnerabilities
	@scripts/lint.sh

format: setup ## format the Python code and the front end
	@.venvs/cli/bin/ruff check --fix-only --quiet . ; .venvs/cli/bin/ruff format --quiet .
	@scripts/console.sh format

screenshots: setup console ## write the pictures of the console, docs/images, of a run and of a short demo (RUN=runs/latest)
	@.venvs/console/bin/python scripts/screenshots.py $(RUN)
	@FORAGE_SCREENSHOTS=1 .venvs/console/bin/python -m pytest -q tests/nightly/console_browser -k followed

console: ## build the console's front end into services/console/forage_console/static/, with the types of its interface
	@scripts/setup.sh console
	@scripts/console.sh types
	@scripts/console.sh build

docs: ## build the documentation site into site/; a dead link or a page outside mkdocs.yml fails
	@scripts/setup.sh cli
	@$(MKDOCS) build --strict

docs-serve: ## serve the documentation site while you write (DOCS_ADDRESS=127.0.0.1:8000)
	@scripts/setup.sh cli
	@$(MKDOCS) serve --livereload --dev-addr $(or $(DOCS_ADDRESS),127.0.0.1:8000)

reference: setup ## generate the pages of docs/reference, and the files of Redis, that come from the code
	@$(PYTHON) scripts/settings_doc.py
	@$(PYTHON) scripts/cli_doc.py
	@$(PYTHON) scripts/api_doc.py
	@$(PYTHON) scripts/metrics_doc.py
	@$(PYTHON) scripts/redis_files.py

dashboards: setup ## generate deploy/grafana/dashboards from the code beside it
	@$(UV_RUN) --with-requirements deploy/grafana/requirements.lock deploy/grafana/build.py

chart-schema: setup ## generate the chart's values.schema.json from the settings
	@$(PYTHON) scripts/chart_schema.py

proto: setup ## generate forage_proto/v1 from proto/
	@scripts/proto.sh

lock: setup ## pin requirements.in of every service into requirements.lock and requirements.gpu.lock, with hashes
	@scripts/lock.sh

audit: setup ## compare what is locked, packages and images, with known vulnerabilities; fails on High
	@$(PYTHON) scripts/audit.py

audit-update: setup ## refresh those, security/advisories.json, from osv.dev
	@$(PYTHON) scripts/audit.py update

pin-images: setup ## write the digests of other people's images, deploy/images.yaml, into the files that use them (needs their registry)
	@$(PYTHON) scripts/resolve_images.py

images: ## build the container images (GPU=1 or base, SERVICES="reward cli", REGISTRY=…)
	@scripts/images.sh

up: ## start the whole stack in Docker: services, Redis, Prometheus, Grafana (RECIPE=configs/demo.yaml TLS=1 HARDENED=1)
	@scripts/compose.sh up

down: ## stop that stack and keep its data (VOLUMES=1 deletes it)
	@scripts/compose.sh down

logs: ## show the logs of that stack (SERVICE=trainer)
	@scripts/compose.sh logs

documented: setup ## run every command line and code block of the pages as written (PAGES="README.md" LIGHT=1 WHEEL=1)
	@$(PYTHON) lab/documented.py $(PAGES) $(and $(LIGHT),--light) $(and $(WHEEL),--wheel)

bench: $(patsubst lab/benchmarks/%,bench-%,$(wildcard lab/benchmarks/[a-z]*)) ## run every benchmark

bench-%: setup ## run one benchmark: a table, then one line of JSON (ARGS="--quick" SIZES="1000" AGAINST=commit ROUNDS=2)
	@$(if $(AGAINST),$(PYTHON) scripts/bench_against.py --rounds $(or $(ROUNDS),2) $* '$(AGAINST)' --,lab/benchmarks/$*/run) \
	  $(and $(SIZES),--sizes $(SIZES)) $(ARGS)

gpu-check: setup ## show on a machine with GPUs what only they can show (STAGES="update engine" MODEL=folder)
	@scripts/gpu_check/run $(STAGES) $(and $(MODEL),--model $(MODEL))

simulate: setup ## try seeded schedules of a simulated run: crashes, pauses, lost replies, … (SEEDS=1000)
	@.venvs/trainer/bin/python scripts/simulate.py $(or $(SEEDS),1000)

chaos: setup ## strike a real run with faults of every kind at random instants (KILLS=200 SEED=0 KINDS=… TRANSPORT=files,delta,direct,s3)
	@$(PYTHON) scripts/chaos.py $(or $(KILLS),200) --seed $(SEED) $(and $(KINDS),--kinds $(KINDS)) \
	  $(and $(TRANSPORT),--transports $(TRANSPORT))

fuzz: setup ## send hostile inputs to every wire and reader of files (N=100000 SEED=0 WIRES="reward console" MINUTES=10 REPLAY=file)
	@.venvs/console/bin/python scripts/fuzz.py $(if $(REPLAY),--replay '$(REPLAY)',--inputs $(or $(N),100000) --seed $(SEED) \
	  $(and $(WIRES),--wires '$(WIRES)') $(and $(MINUTES),--minutes $(MINUTES)))

soak-reward: setup ## run the reward service under full load with faults (MINUTES=5)
	@.venvs/reward/bin/python lab/benchmarks/reward/soak.py $(or $(MINUTES),5)

version: setup ## set the version of every package, image and the chart (VERSION=0.2.0)
	@$(PYTHON) scripts/release.py set $(VERSION)

release: setup ## check, build wheels, chart, list of images and bills of materials into dist/, and tag the commit
	@$(PYTHON) scripts/release.py build

clean: ## remove environments, caches, built data and runs
	rm -rf .venvs .cache data runs dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis \
	  services/console/web/node_modules services/console/forage_console/static
