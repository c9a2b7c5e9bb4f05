# Every target makes .venv when it is missing or older than the requirements.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# The packages of an extra of pyproject.toml, without the library itself, which the clone has.
extra = $$($(BIN)/python -c 'import sys, tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"][sys.argv[1]])' $(1))
# Each of two workers begins with one half of the tests; one that has none left takes over a half of what the other has.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal
QUICK := not full and not gpu and not cluster
STAMP := $(VENV)/.installed
export PYTHONUNBUFFERED := 1
unexport PYTHONDONTWRITEBYTECODE  # else every process compiles all modules anew: 17 s in place of 9 before the first test

.PHONY: quickstart test test-all test-cluster rehearsal gpu coverage docs release examples lint format clean venv

$(STAMP): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.11 ..." >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing requirements.txt and the extra dev into $(VENV): about 3 minutes." >&2
	@$(INSTALL) -r requirements.txt $(call extra,dev) >&2
	@touch $@

venv: $(STAMP)

quickstart: $(STAMP)
	@$(BIN)/python launch_scripts/quickstart.py

# Lint and types run in the background meanwhile; what they say is printed at the end.
test: $(STAMP)
	-@tests/install_packages.sh hosts
	@$(MAKE) --no-print-directory lint >$(VENV)/lint.log 2>&1 & lint=$$!; \
	$(PYTEST) -m "$(QUICK)"; tests=$$?; \
	wait $$lint; lint=$$?; echo "lint and types:"; cat $(VENV)/lint.log; exit $$((tests ? tests : lint))

# The full counts, in eight parts: make test-all [PART=3]; their record is tests/records/test-all.md. PART=commit takes the part of
# the hour in which the commit was made: the workflow runs it, so that each part runs within days.
ifeq ($(PART),commit)
override PART := $(shell echo $$(($$(git log -1 --format=%ct) / 3600 % 8 + 1)))
endif
test-all: $(STAMP) lint
	-@tests/install_packages.sh
	@for optional in evaluation captions examples docs; do \
		$(INSTALL) $(call extra,$$optional) >&2 || echo "the extra $$optional could not be installed: tests that need it will be skipped" >&2; \
	done
	@failed=0; for part in $(or $(PART),1 2 3 4 5 6 7 8); do \
		echo "part $$part of 8:"; $(PYTEST) --hypothesis-profile=full -m "not gpu and not cluster" --part $$part || failed=1; \
	done; exit $$failed

# Launchers between hosts that share this machine, and Slurm.
test-cluster: $(STAMP)
	@tests/install_packages.sh cluster
	$(PYTEST) -m cluster

# Each dimension of the mission at its true size, everything else tiny: make rehearsal [PART=data]
rehearsal: $(STAMP)
	@$(BIN)/python -m tests.rehearsal $(if $(PART),--part $(PART))

# Acceptance on one GPU, with a Python that is there already: make gpu [PART=sums] [DEVICE=cpu REDUCED=1] [OUTPUT=folder]
gpu: PYTHON := $(if $(filter file,$(origin PYTHON)),$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)),$(PYTHON))
gpu:
	@$(PYTHON) -m tests.gpu $(if $(PART),--part $(PART)) $(if $(DEVICE),--device $(DEVICE)) $(if $(REDUCED),--reduced) $(if $(OUTPUT),--output $(OUTPUT))

# Statements that `make test` runs, in every rank and command; TESTS="tests/data ..." takes a part. Tracing makes tests slower.
coverage: $(STAMP)
	-@tests/install_packages.sh hosts
	$(PYTEST) -m "$(QUICK)" -o timeout=900 --cov --cov-report=term --cov-report=html $(TESTS)

# The site of these pages with an API reference, in site/; a warning is an error.
docs: $(STAMP)
	@$(INSTALL) $(call extra,docs) >&2
	$(BIN)/python -m tools.site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --config-file docs/mkdocs.yml

# Wheel, sdist and site of this version, in runs/release; each is tried in an empty environment.
release: docs
	@$(BIN)/python -m pytest -k "agree" tests/tools/test_delivery.py
	rm -rf runs/release
	$(BIN)/python -m hatchling build --directory $(CURDIR)/runs/release
	tar -czf runs/release/site.tar.gz site
	@for built in $(CURDIR)/runs/release/auditable_dp-*; do \
		set -e; empty=$$(mktemp -d -p $(CURDIR)/runs/release); $(PYTHON) -m venv $$empty/venv; cd $$empty; \
		venv/bin/python -m pip install --quiet --no-compile --disable-pip-version-check "$$built[card]"; \
		sed -n '/^```python$$/,/^```$$/{//!p}' $(CURDIR)/README.md | venv/bin/python -I -; \
		venv/bin/python -I runs/loop/verify.py runs/loop; \
		cd $(CURDIR); rm -rf $$empty; echo "$$built: installed alone, it trains, and its run is verified"; \
	done

# Every example and the notebook, executed.
examples: $(STAMP)
	@$(INSTALL) $(call extra,examples) >&2
	$(BIN)/python -m pytest tests/examples

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache .hypothesis
