# The two commands: make demo, make test. Everything they need is installed into .venv by the rule below.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test browser coverage lint bench guard grid experiment scarce reproduction clean

demo: .venv/ready
	$(BIN)/keel demo

# Four at a time on two cores: many tests wait for other processes.
test: lint browser
	$(BIN)/pytest -n 4 --dist loadfile --no-loadscope-reorder

# The report is tested in Debian's Chromium, which is installed where root can; elsewhere those tests are skipped.
browser:
	@command -v chromium >/dev/null || { \
	    [ "$$(id -u)" = 0 ] && apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends chromium >/dev/null; \
	} || echo "There is no Chromium (on Debian: apt install chromium); the tests of the report in it are skipped."

coverage: .venv/dev
	$(BIN)/pytest -n 2 --cov --cov-report=term

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv-bench/ready
	.venv-bench/bin/python benchmarks/rounds.py

guard: .venv/ready
	$(BIN)/python benchmarks/rounds.py --guard

grid: .venv/ready
	$(BIN)/python tools/search_digits.py results/digits_grid.toml

experiment: .venv/ready
	$(BIN)/python tools/experiment_digits.py results/digits_grid.toml

scarce: .venv/ready
	$(BIN)/python tools/search_digits.py results/digits_scarce_grid.toml
	$(BIN)/python tools/experiment_digits.py results/digits_scarce_grid.toml

reproduction: .venv/ready
	$(BIN)/python tools/reproduction.py keep runs/paper
	$(BIN)/python tools/reproduction.py write

clean:
	rm -rf .venv .venv-bench runs

# PyTorch first and by its pin: any other version may bring gigabytes of CUDA along.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

# What tests need besides: every extra, and the tools.
.venv/dev: .venv/ready
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# The frameworks that Keel is measured against, apart: they ask for older versions of what it uses.
.venv-bench/ready: pyproject.toml constraints.txt benchmarks/requirements.txt
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	.venv-bench/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	.venv-bench/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -r benchmarks/requirements.txt
	touch $@
