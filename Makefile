# Every target makes .venv when it is missing or older than the requirements.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export PYTHONUNBUFFERED := 1

.PHONY: quickstart test test-all coverage lint format clean venv

$(STAMP): requirements.txt requirements-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.11 ..." >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt >&2
	@touch $@

venv: $(STAMP)

quickstart: $(STAMP)
	@$(BIN)/python launch_scripts/quickstart.py

test: $(STAMP) lint
	@tests/install_packages.sh cluster
	$(BIN)/python -m pytest -m "not full and not gpu" -n 2 --dist loadfile --no-loadscope-reorder

test-all: $(STAMP) lint
	@tests/install_packages.sh
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-triton.txt >&2 || echo "triton could not be installed: tests of its kernel will be skipped" >&2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-evaluation.txt >&2 || echo "datasets and pycocotools could not be installed: tests with them will be skipped" >&2
	$(BIN)/python -m pytest -m "not gpu" -n 2 --dist loadfile --no-loadscope-reorder

# Statements that `make test` runs, in every rank and command; TESTS="tests/data ..." takes a part. Tracing makes tests slower.
coverage: $(STAMP)
	@tests/install_packages.sh cluster
	$(BIN)/python -m pytest -m "not full and not gpu" -n 2 --dist loadfile --no-loadscope-reorder -o timeout=900 \
		--cov --cov-report=term --cov-report=html $(TESTS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
