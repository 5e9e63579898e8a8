# make demo   sets up, then runs the main job: a trainer improves a policy on a fleet of real engines
# make test   sets up, then passes the tests

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Several torch processes share few cores: one thread each is faster than many that fight.
export OMP_NUM_THREADS ?= 1

.PHONY: setup demo test lint sim bench docs clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rl_plane needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	    --config-settings editable_mode=compat -e '.[demo,dev]'
	touch $@

demo: setup
	$(BIN)/rl-plane demo

test: lint
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

sim: setup
	$(BIN)/python -m tests.sim --seeds $(or $(SEEDS),1000)

bench: setup
	$(BIN)/python -m bench

docs: setup
	$(BIN)/python docs/generate_reference.py

clean:
	rm -rf $(VENV) demo-out
