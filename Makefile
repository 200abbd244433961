# The two main commands are make demo and make test. Both install what they need into .venv (see the rules at the end).
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test pytest test-lowest docs browser nginx coverage lint canary flower audit bench bench-quick bench-gpu guard faults grid experiment scarce reproduction clean

demo: .venv/ready
	$(BIN)/keel demo

# The checks run next to the tests. Six processes on two cores, because many tests wait for other processes. They and those
# that they start share the compiled modules in __pycache__, also where the environment asks Python not to write any.
test: export PYTHONDONTWRITEBYTECODE =
test: browser nginx
	$(MAKE) --no-print-directory -j 2 lint pytest

pytest: .venv/dev
	$(BIN)/pytest -n 6 --dist loadfile --no-loadscope-reorder

# The report is tested in Chromium. As root on Debian it is installed; elsewhere, without it, those tests are skipped.
browser:
	@command -v chromium >/dev/null || { \
	    [ "$$(id -u)" = 0 ] && apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends chromium >/dev/null; \
	} || echo "Chromium is not installed (Debian: apt install chromium); the tests of the report page are skipped."

# The proxy of a federation is tested with nginx, which is installed in the same way.
nginx:
	@PATH="$$PATH:/usr/sbin" command -v nginx >/dev/null || { \
	    [ "$$(id -u)" = 0 ] && apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends nginx-light >/dev/null; \
	} || echo "nginx is not installed (Debian: apt install nginx-light); the tests of the proxy are skipped."

# The site, in build/docs: warnings are errors, internal links are checked, and no network is needed. It runs the examples
# and the notebooks, which takes about a minute. make test builds it too (tests/docs/test_site.py).
docs: .venv/dev
	$(BIN)/python -m sphinx -W --keep-going -q -E -b html docs build/docs
	@echo "build/docs/index.html"

coverage: .venv/dev
	$(BIN)/pytest -n 2 --cov --cov-report=term

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Tests against the newest Flower, PyTorch and Ray, in .venv-canary. To be run on a schedule: see CONTRIBUTING.md.
canary:
	$(PYTHON) -m venv .venv-canary
	.venv-canary/bin/pip install --quiet --disable-pip-version-check -e '.[dev]'
	.venv-canary/bin/pip install --quiet --disable-pip-version-check --upgrade flwr torch ray
	.venv-canary/bin/pytest -n 2 --dist loadfile tests/deploy tests/engines tests/core/test_torch_adapter.py

# The tests of a federation with another release of Flower, whose other dependencies stay those of .venv, so that it can be
# tested before its requirements can be met: make flower FLWR=1.42.0
FLWR ?= 1.42.0
flower: .venv/dev
	rm -rf .venv-flower
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target .venv-flower flwr==$(FLWR)
	PYTHONPATH=.venv-flower $(BIN)/pytest -n 2 --dist loadfile tests/deploy

# Tests with the lowest versions that pyproject.toml allows, in .venv-lowest. PyTorch stays at its pinned version.
test-lowest:
	$(PYTHON) -m venv .venv-lowest
	$(PYTHON) tools/lowest_versions.py > .venv-lowest/lowest.txt
	.venv-lowest/bin/pip install --quiet --disable-pip-version-check -c .venv-lowest/lowest.txt -c constraints.txt torch
	.venv-lowest/bin/pip install --quiet --disable-pip-version-check -c .venv-lowest/lowest.txt -c constraints.txt \
	    -e '.[text,table,sweep,frame]' pillow pytest pytest-xdist hypothesis
	.venv-lowest/bin/pytest -n 2 --dist loadfile $(LOWEST)

LOWEST := tests/cli/test_cli.py tests/cli/test_doctor.py tests/cli/test_typer_adapter.py tests/config tests/core/test_metrics.py \
    tests/data/test_images.py tests/data/test_stackoverflow.py tests/data/test_store.py tests/data/test_table.py \
    tests/report/test_comparison.py tests/report/test_page.py tests/runs/test_run.py tests/runs/test_sweep.py

# Known vulnerabilities of the installed versions: see CONTRIBUTING.md.
audit: .venv/dev
	$(PYTHON) -m venv .venv-audit && .venv-audit/bin/pip install --quiet --disable-pip-version-check pip-audit
	.venv-audit/bin/pip-audit --path $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

bench: .venv-bench/ready
	.venv-bench/bin/python benchmarks/rounds.py

bench-quick: .venv-bench/ready
	.venv-bench/bin/python benchmarks/rounds.py --quick digits many layernorm cnn transformer lenet

# On a machine with a GPU: fills the table "Accelerators" of docs/performance.md.
bench-gpu: .venv/ready
	$(BIN)/python benchmarks/rounds.py --device cuda

guard: .venv/ready
	$(BIN)/python benchmarks/rounds.py --guard

# N cases of every kind of fault (docs/reliability.md); KINDS="specs readers" chooses kinds.
N ?= 100
faults: .venv/dev
	$(BIN)/python -m faults --cases $(N) $(KINDS)

grid: .venv/ready
	$(BIN)/python tools/search_digits.py results/digits_grid.toml

experiment: .venv/ready
	$(BIN)/python tools/experiment_digits.py results/digits_grid.toml
	$(BIN)/python tools/algorithm_curves.py run

scarce: .venv/ready
	$(BIN)/python tools/search_digits.py results/digits_scarce_grid.toml
	$(BIN)/python tools/experiment_digits.py results/digits_scarce_grid.toml

reproduction: .venv/ready
	$(BIN)/python tools/reproduction.py keep runs/paper
	$(BIN)/python tools/reproduction.py write

clean:
	rm -rf .venv .venv-audit .venv-bench .venv-canary .venv-flower .venv-lowest build runs

# PyTorch is installed first, at its pinned version: other versions may install gigabytes of CUDA libraries.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

# For the tests: every extra, and the tools.
.venv/dev: .venv/ready
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# The frameworks of the benchmarks are in an environment of their own: they require older versions of some dependencies.
.venv-bench/ready: pyproject.toml constraints.txt benchmarks/requirements.txt
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	.venv-bench/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	.venv-bench/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -r benchmarks/requirements.txt
	touch $@
