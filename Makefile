.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
# Exactly one FAISS: the GPU build where an NVIDIA driver answers, else the CPU build.
DEVICE := $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
STAMP := .venv/.installed-$(DEVICE)

.PHONY: help install run test test-all check loadtest clients fuzz-api clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

.venv/bin/python:
	$(PYTHON) -m venv .venv

$(STAMP): pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --disable-pip-version-check -q -e '.[$(DEVICE)]'
	@touch $@

$(STAMP)-test: $(STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check -q -e '.[$(DEVICE),test,loadtest]'
	@touch $@

install: $(STAMP) ## make .venv and install the project
	@$(BIN)/foreword --version

run: $(STAMP) ## set everything up, ingest the project's docs, serve, ask one question
	@$(BIN)/foreword demo $(ARGS)

test: $(STAMP)-test ## run the tests (about five minutes)
	$(BIN)/foreword models fetch
	$(BIN)/python -m pytest

test-all: $(STAMP)-test ## run the long tests too
	$(BIN)/foreword models fetch
	$(BIN)/python -m pytest --slow

check: $(STAMP)-test ## lint, types, import rules, tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) test

loadtest: $(STAMP)-test ## run locust headless against a server of its own
	$(BIN)/python -m loadtest.run --serve --users 4 --run-time 30

.venv-clients/.installed: tests/clients/requirements.txt
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install --disable-pip-version-check -q -r $<
	@touch $@

clients: $(STAMP)-test .venv-clients/.installed ## run LangChain and llm, unchanged, against a server
	$(BIN)/python tests/clients/run.py clients .venv-clients/bin/python

fuzz-api: $(STAMP)-test .venv-clients/.installed ## run schemathesis over our OpenAPI document
	$(BIN)/python tests/clients/run.py fuzz .venv-clients/bin/python

clean: ## delete .venv and caches
	rm -rf .venv .venv-clients .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
