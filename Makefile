# make demo    create the environment and show the shipped examples
# make quick   lint and the fast tests, below a minute: while you edit
# make test    every check that needs no extra: before you commit
# make docs    build the site into site/
# make dist    build wheel and sdist, and try the wheel in an environment of its own
# make fuzz    damaged files and random command lines; FUZZ="--minutes 60 --seed 7" runs longer
# make mutants plant small bugs and count those that tests notice; MUTANTS="--count 40 --seed 7" draws others
# make bench   the benchmarks
# make lint, make types, make unit   the parts of 'make test': ruff; mypy; pytest
# make clean   remove all environments, caches and output
#
# Extras, each tested in an environment of its own:
# make test-web      the app and the pages in a browser (extras web and browser)
# make test-torch    capture, check, record, run and profile (extra torch)
# make test-mcp      the tools for agents, by the reference client (extra mcp)
# make test-lowest   the package with the oldest versions that it allows
# make test-engines  sweeps on Dask, Ray and Slurm's stand-in, and Parquet files (extras dask, ray, slurm, parquet)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal --ignore=tests/browser

# Rewriting the asserts of all tests takes ten seconds for each process that runs tests, unless pytest may store them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo quick test lint types unit compiled docs dist fuzz mutants bench clean test-web test-torch test-mcp test-engines test-lowest

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "stepcast needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m compileall -q src  # an editable install leaves it to the first start of each part
	@touch $@

demo: install
	$(BIN)/stepcast demo

quick: install lint
	$(PYTEST) --ignore=tests/fuzz -m 'not exhaustion and not fuzz and not slow and not subprocess'

# mypy runs on one core, while the compiled engines are built and the tests start on the others.
test: install lint
	@$(MAKE) --no-print-directory -j2 types unit

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

unit: install compiled
	$(PYTEST)

# Compile the engines once, before several test processes would do so at the same time.
compiled: install
	@$(BIN)/python -m pytest -qq -k compiled tests/simulation/fluid/test_oracle.py tests/simulation/test_engines.py

# ---- extras, each in an environment of its own, so that .venv shows what works without them

TESTING := 'hypothesis>=6.100' 'pytest>=8' 'pytest-xdist>=3.5'
PACKAGES_web := -c constraints.txt -e '.[web,browser]' $(TESTING)
PACKAGES_torch := -c constraints.txt torch transformers -e . $(TESTING)
PACKAGES_engines := -c constraints.txt -e '.[dask,parquet,ray,slurm]' $(TESTING)
PACKAGES_mcp := -c constraints.txt -e '.[mcp]' $(TESTING)
PACKAGES_docs := -c constraints.txt -e '.[docs]'
PACKAGES_lowest := -c constraints-lowest.txt -e '.[compiled]' $(TESTING)

.venv-%/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python $(PIP_INSTALL) $(PACKAGES_$*)
	@touch $@

test-web: .venv-web/.installed
	.venv-web/bin/python -m pytest tests/serve tests/browser

test-torch: .venv-torch/.installed
	.venv-torch/bin/python -m pytest -n auto --dist worksteal tests/pytorch tests/checking

test-mcp: .venv-mcp/.installed
	.venv-mcp/bin/python -m pytest tests/agents

# The oldest packages that pyproject.toml allows; PYTHON=python3.11 takes the oldest Python as well.
test-lowest: .venv-lowest/.installed
	.venv-lowest/bin/python -m pytest -n auto tests/inputs tests/cost/test_rules.py tests/cli/test_predict.py tests/forecast

# The head of a Ray cluster listens on every interface: here in a network namespace that has the loopback alone.
test-engines: .venv-engines/.installed
	unshare -rn sh -c 'ip link set lo up && RAY_USAGE_STATS_ENABLED=0 exec .venv-engines/bin/python -m pytest \
	  tests/sweep/test_engines.py tests/outputs/test_rows.py'

docs: .venv-docs/.installed
	.venv-docs/bin/python tools/build_docs.py

dist:
	$(PYTHON) tools/try_dist.py

fuzz: install
	$(BIN)/python -m tests.fuzz $(FUZZ)
	STEPCAST_EVERY_BOMB=1 $(BIN)/python -m pytest -q -n auto tests/fuzz/test_bombs.py

mutants: .venv-web/.installed
	.venv-web/bin/python tools/mutants.py $(MUTANTS)

bench: install
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) $(VENV)-* build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis demo-output fuzz-found site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
