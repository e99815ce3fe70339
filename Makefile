# `make demo` and `make test` are all a new user needs; both make the environment first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 2
CONSTRAINTS ?= constraints.txt

.PHONY: demo test lint typecheck env clean

demo: $(VENV)/.installed
	$(BIN)/draftwood generate "def fibonacci(n):" --compare

test: $(VENV)/.tested
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

lint: $(VENV)/.linted
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: $(VENV)/.linted $(VENV)/.installed
	$(BIN)/mypy

env: $(VENV)/.tested $(VENV)/.linted

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis

# Versions come from constraints.txt, the set that CI runs.
$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(addprefix -c ,$(CONSTRAINTS)) -e .
	touch $@

$(VENV)/.tested: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(addprefix -c ,$(CONSTRAINTS)) -e '.[test]'
	touch $@

$(VENV)/.linted: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(addprefix -c ,$(CONSTRAINTS)) -e '.[lint]'
	touch $@
