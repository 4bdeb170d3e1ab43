# Every target but `setup` runs after it; with nothing to install it takes well under two seconds.
BIN := .venv/bin
FILE ?= examples/smollm2.yaml
ASK ?= What is the capital of France?
MODELS ?= $(if $(XDG_CACHE_HOME),$(XDG_CACHE_HOME),$(HOME)/.cache)/tandem/models

.PHONY: setup demo ask up test e2e lint type fmt bench crds check-generated help cluster cluster-down
help:            ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 18

setup:           ## install what is missing: Debian packages, uv, the locked environment
	@scripts/setup

demo: setup      ## a two-node cluster, the chart, one manifest, one question to it (ASK="...")
	@$(BIN)/python -m e2e.demo --ask "$(ASK)" $(FILE)

ask: setup       ## the same question without a cluster: the manifest as local processes
	@$(BIN)/python -m tandem_runtime.up.demo_model >/dev/null
	@$(BIN)/tandem up $(FILE) --volume models=$(MODELS) --ask "$(ASK)"

up: setup        ## serve FILE=examples/smollm2.yaml on this machine until Ctrl-C
	@$(BIN)/python -m tandem_runtime.up.demo_model >/dev/null
	@$(BIN)/tandem up $(FILE) --volume models=$(MODELS)

test: setup      ## the whole test suite
	@$(BIN)/pytest

e2e: setup       ## the product on a real two-node cluster (root; once about 6 minutes more)
	@$(BIN)/pytest e2e/tests

lint: setup      ## ruff, import rules, generated files
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports
	@$(MAKE) --no-print-directory check-generated

type: setup      ## mypy --strict
	@$(BIN)/mypy

fmt: setup       ## format and fix what can be fixed
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: setup     ## every benchmark, each beside a peer or a limit
	@for file in benchmarks/[a-z]*.py; do echo "== $$file"; $(BIN)/python $$file; done

crds: setup      ## write the CRD's YAML from the models
	@$(BIN)/python -m tandem_crds.generate

check-generated: setup
	@$(BIN)/python -m tandem_crds.generate --check

cluster: setup   ## a real Kubernetes cluster of two nodes on this machine (root; once about 6 minutes)
	@$(BIN)/python -m e2e.cluster up
	@echo 'eval "$$($(BIN)/python -m e2e.cluster env)"   # kubectl and helm of this cluster'

cluster-down: setup ## end it; nothing of it is left
	@$(BIN)/python -m e2e.cluster down
