# Two commands carry the project: `make up` and `make test`. The rest are their parts.
.DEFAULT_GOAL := help
.PHONY: help up test compiled env lint types clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-8s  %s\n", $$1, $$2}' $(MAKEFILE_LIST)

up: ## start three real engines and the gateway on 127.0.0.1:8080 (options: make up ARGS="--engines simulated")
	@scripts/up $(ARGS)

test: ## everything that CI checks: lint, types, layers, tests, a judged load test
	@scripts/test

compiled: ## machine code of the hot path into .compiled (needs a C compiler; HEADRACE_COMPILED=$PWD/.compiled runs it)
	@scripts/compile $(ARGS)

env: ## create .venv with all that development needs
	@scripts/env dev

lint: ## ruff and the import contracts
	@scripts/lint

types: ## mypy, strict
	@scripts/types

clean: ## remove .venv, the compiled form, caches and run files (models in ~/.cache/headrace stay)
	@scripts/clean
