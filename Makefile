# Front door for people and CI. `make` alone lists the targets.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
LAWS := tests/layouts tests/benchmarks tests/test_command_line.py
TYPED := layouts transport attention connector kvweave.py examples benchmarks tools

.PHONY: help setup demo test lint types unit laws test-exhaustive nodes test-chaos clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## create .venv with everything needed (about 4 minutes the first time)
	@$(PYTHON) tools/setup_env.py

demo: setup  ## prefill and decode nodes with different layouts against one plain vLLM node
	@$(RUN) -m examples.demo

test: lint types unit laws nodes  ## the gate: all of the checks below, as CI runs them

lint: setup  ## ruff: format and rules
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .

types: setup  ## mypy, strict (settings in pyproject.toml)
	$(RUN) -m mypy $(TYPED)

unit: setup  ## tests that need no vLLM node
	$(RUN) -m pytest -q -m "not vllm" -n 2 --dist worksteal $(LAWS:%=--ignore=%)

laws: setup  ## the laws of layouts over their small domain, and what prints and draws them
	$(RUN) -m pytest -q -n 2 --dist worksteal $(LAWS)

test-exhaustive: setup  ## the laws of layouts over their whole domain (about 15 minutes)
	$(RUN) -m pytest -q -m exhaustive tests/layouts

nodes: setup  ## tests that start real vLLM nodes
	$(RUN) -m pytest -q -m vllm --ignore=tests/chaos

test-chaos: setup  ## life-cycle cases on real nodes, then a soak of 2,000 requests under 20 blows (about an hour)
	timeout 3600 $(RUN) -m pytest -q tests/chaos/test_cases.py
	timeout 5400 $(RUN) -m tests.chaos.soak --requests 2000 --events 20

clean:  ## remove caches, logs and builds (keeps .venv and .cache)
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist logs *.egg-info
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
