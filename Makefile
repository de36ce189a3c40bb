# Two commands on a fresh machine: `make demo`, `make test`. Everything is installed into .venv from a full lock file.

VENV := .venv
INSTALLED := $(patsubst $(VENV)/.installed-%,%,$(wildcard $(VENV)/.installed-*))
ACCELERATOR ?= $(or $(firstword $(INSTALLED)),cpu)
PYTHON ?= python3.11
PIP_FLAGS ?=
METHOD ?= medusa-1
HEADS ?= medusa
WORKERS ?= auto
DEMO := $(if $(filter medusa,$(HEADS)),$(METHOD),$(HEADS)$(if $(filter medusa-1,$(METHOD)),, with $(METHOD)))
BIN := $(VENV)/bin
LOCK := requirements-$(ACCELERATOR).lock
STAMP := $(VENV)/.installed-$(ACCELERATOR)
DOCS := .venv-docs
MKDOCS := NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs
OTHER := $(filter-out $(ACCELERATOR),$(INSTALLED))

unexport PYTHONDONTWRITEBYTECODE  # hundreds of processes would compile the same files

# Compiled once, and not by every process for itself.
TESTS := $(BIN)/python -m compileall -q -j 0 pipeline benchmarks flows && $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

.PHONY: help install demo test lint check bench docs docs-serve format clean

help:               ## this list
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

install: $(STAMP)   ## install into .venv (ACCELERATOR=cpu or cuda; by default what is there, else cpu)

$(STAMP): $(LOCK) pyproject.toml
	@test -z "$(OTHER)" || { echo "$(VENV) holds the $(OTHER) build, and two of vLLM do not share one: rm -rf $(VENV) first"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python scripts/install.py $(LOCK) $(PIP_FLAGS)
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

demo: install       ## the main job, end to end, with a small target that it trains first (METHOD=medusa-1 or medusa-2, HEADS=medusa, recurrent or eagle3)
	$(BIN)/python flows/demo.py "$(DEMO)"

test: install       ## all tests (WORKERS=auto is one process more than cores, WORKERS=0 none but this one)
	$(TESTS)

lint: install       ## ruff and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2

check: lint         ## lint and the fast tests: before every commit
	$(TESTS) -m "not slow and not fault"

bench: install      ## the measured claims, into benchmarks/results
	$(BIN)/python -m benchmarks.run

$(DOCS)/.installed: requirements-docs.lock
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python scripts/install.py $< $(PIP_FLAGS)
	touch $@

docs: $(DOCS)/.installed  ## the docs site, into site/ (a dead link or anchor fails)
	$(MKDOCS) build --strict

docs-serve: $(DOCS)/.installed  ## the docs site on localhost, as it is edited
	$(MKDOCS) serve

format: install     ## let ruff tidy up
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:              ## remove the demo's runs and the docs site
	rm -rf runs site
