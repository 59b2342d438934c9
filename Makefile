# make help tells what there is. Every target is safe to repeat.

PYTHON ?= python3
VENV   ?= .venv
# What is installed as PyTorch; pip options are allowed: make quickstart TORCH="torch==2.13.0 --index-url ADDRESS".
# The plain name gives the build that your package index has for this machine (on Linux often CUDA, which is larger).
TORCH  ?= torch==2.13.0
# auto, cpu, gpu or none: which build of vLLM is installed. none leaves the embedded engine.
VLLM   ?= auto
# Set to 1, the newest packages that pyproject.toml allows are installed, not those of constraints.txt.
NEWEST ?=
# More arguments for afterplay run: make quickstart RUN="--fresh --set run.total_steps=4"
RUN    ?=

SETUP = $(PYTHON) scripts/setup.py --venv "$(VENV)" --torch "$(TORCH)" --vllm "$(VLLM)" $(if $(NEWEST),--newest)

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev quickstart tiny test test-all test-added lint docs clean

help:  ## Show this list
	@echo "Afterplay. Targets:"
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## (.*)/  \1\t\2/' | expand -t 16
	@echo "Variables: PYTHON=$(PYTHON) VENV=$(VENV) TORCH='$(TORCH)' VLLM=$(VLLM) NEWEST=$(NEWEST)"

setup:  ## Create the virtual environment and install Afterplay, PyTorch and vLLM in it
	@$(SETUP)

setup-dev:  ## The same with what the tests need
	@$(SETUP) --dev

quickstart: setup  ## Train a real 135M model with a real vLLM server on this machine (some minutes)
	@$(VENV)/bin/python -m pipeline.cli.app run configs/quickstart.yaml $$($(SETUP) --engine-options) $(RUN)

tiny: setup  ## Train a random tiny model through all the same processes (a minute)
	@$(VENV)/bin/python -m pipeline.cli.app run configs/tiny.yaml $(RUN)

test: setup-dev  ## Lint, type-check, unit tests, one tiny run and one vLLM server (10 minutes on two cores)
	@$(VENV)/bin/python scripts/check.py quick

test-all: setup-dev  ## Everything (30 to 60 minutes on two cores)
	@$(VENV)/bin/python scripts/check.py

test-added: setup-dev  ## What test-all adds to test
	@$(VENV)/bin/python scripts/check.py added

lint: setup-dev  ## Lint and type-check only
	@$(VENV)/bin/python scripts/check.py lint types

docs: setup-dev  ## Build the documentation site in build/site
	@$(VENV)/bin/python scripts/docs_site.py

clean:  ## Remove the virtual environment and caches (runs are kept)
	rm -rf "$(VENV)" .pytest_cache .mypy_cache .ruff_cache .hypothesis
