# Two commands for a fresh machine: `make demo` and `make test`. Both make the virtual
# environment first; it is made anew when pyproject.toml changes.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test lint types check clean

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py

test: lint types check

lint: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.installed
	$(BIN)/mypy

check: $(VENV)/.installed
	$(BIN)/python -m pytest

$(VENV)/.installed: pyproject.toml $(wildcard native/*.txt native/src/* native/include/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
