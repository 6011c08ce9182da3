# make demo   creates the environment and shows the shipped examples
# make test   runs every check
# make docs   builds the site into site/
# make dist   builds wheel and sdist, and tries the wheel in an environment of its own
# make fuzz   damaged files and random command lines; FUZZ="--minutes 60 --seed 7" for longer

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: install demo test lint types unit docs dist fuzz bench clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "stepcast needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@$(BIN)/python -m compileall -q src  # an editable install leaves it to the first start of each part
	@touch $@

demo: install
	$(BIN)/stepcast demo

test: install lint types unit

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

unit: install
	$(BIN)/python -m pytest -n auto --dist worksteal --ignore=tests/browser

docs: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	$(BIN)/python tools/build_docs.py

dist:
	$(PYTHON) tools/try_dist.py

fuzz: install
	$(BIN)/python -m tests.fuzz $(FUZZ)

bench: install
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis demo-output fuzz-found site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
