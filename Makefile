# make demo   sets up, then runs the main job: a trainer improves a policy on a fleet of real engines
# make test   sets up and installs vLLM and SGLang for the CPU, then passes the tests
# make test-fast   the same in minutes: without the two engines and the slow tests

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Several torch processes share few cores: one thread each is faster than many that fight.
export OMP_NUM_THREADS ?= 1
# The tests start hundreds of processes: without stored bytecode each of them compiles every module again.
export PYTHONDONTWRITEBYTECODE :=

# One set of versions, whether vLLM and SGLang are installed or not.
ENGINES := deploy/engines-cpu
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: setup engines demo test test-fast lint sim mutants soak fuzz bench docs clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml $(ENGINES)/requirements.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rl_plane needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --constraint $(ENGINES)/requirements.txt --config-settings editable_mode=compat -e '.[demo,dev]'
	touch $@

engines: $(VENV)/.engines

$(VENV)/.engines: $(VENV)/.ready $(ENGINES)/requirements.txt $(ENGINES)/deepspeed.txt $(ENGINES)/clients.txt $(wildcard $(ENGINES)/torchvision-stub/*/*.py)
	$(PIP) --no-deps -r $(ENGINES)/requirements.txt $(ENGINES)/torchvision-stub
	$(PIP) --no-deps --no-build-isolation --upgrade --target $(VENV)/deepspeed -r $(ENGINES)/deepspeed.txt
	$(PIP) --no-deps --upgrade --target $(VENV)/clients -r $(ENGINES)/clients.txt
	rm -rf $(ENGINES)/torchvision-stub/build $(ENGINES)/torchvision-stub/*.egg-info
	touch $@

demo: setup
	$(BIN)/rl-plane demo

# Real processes on a machine that others use too: a test that fails is tried once more, and both outcomes are printed.
# Beyond so many it is no accident.
PYTEST := $(BIN)/python -m pytest --reruns 1 --max-suite-reruns 4 --rerun-show-tracebacks
# Most of what is no engine's waits for somebody: four processes keep two cores busy. An engine needs one core to start.
# The files run by name: in order of their counts, the files with few and long tests would come last, one beside idle cores.
BESIDE := $(PYTEST) --dist loadfile --no-loadscope-reorder

test: engines lint
	$(BESIDE) -n 4 -m 'not engines and (not slow or parallel)'
	$(BESIDE) -n 2 -m '(engines or (slow and not parallel)) and not alone'
	$(PYTEST) -m alone

test-fast: lint
	$(BESIDE) -n 4 -m 'not engines and not slow'
	@echo 'Left out: the tests of vLLM, SGLang and most of hf, and the slow ones (kill matrix, simulation, docs, …). make test has all.'

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tests.lint

sim: setup
	$(BIN)/python -m tests.sim --seeds $(or $(SEEDS),1000)

# Takes each guard of the protocol out of a copy, one at a time: a named test must fail.
mutants: setup
	$(BIN)/python -m tests.sim.mutants

# Also SEED=n, and WITH='--engine hf --engine vllm' for other engines than two of hf.
soak: setup
	$(BIN)/python -m tests.soak --seconds $(or $(SECONDS),600) --seed $(or $(SEED),1) $(WITH)

# An hour of mutated messages, entries, files and bodies. Also SECONDS=n SEED=n.
fuzz: setup
	$(BIN)/python -m tests.fuzz --seconds $(or $(SECONDS),3600) --seed $(or $(SEED),1)

bench: setup
	$(BIN)/python -m bench
	$(BIN)/python -m bench.memory
	$(BIN)/python -m bench.engine_paths

docs: setup
	$(BIN)/python docs/generate_reference.py

clean:
	rm -rf $(VENV) demo-out
