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

# Each lock names the exact versions of an install path, and the hashes of their files.
LOCKS := deploy/locks
STUB := deploy/torchvision-stub
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps
LOCKED := $(PIP) --no-build-isolation --require-hashes

.PHONY: setup engines demo test test-fast test-docs test-bench test-kills lint bytecode lock audit fuzz fuzz-http fuzz-nats sim mutants soak bench docs clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml $(LOCKS)/build.txt $(LOCKS)/demo.txt $(LOCKS)/dev.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rl_plane needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	sh $(LOCKS)/install.sh $(BIN)/python demo dev
	$(PIP) --no-build-isolation --config-settings editable_mode=compat -e .
	touch $@

engines: $(VENV)/.engines

$(VENV)/.engines: $(VENV)/.ready $(addprefix $(LOCKS)/,engines.txt deepspeed.txt clients.txt) $(wildcard $(STUB)/*/*.py)
	$(LOCKED) -r $(LOCKS)/engines.txt
	$(PIP) --no-build-isolation ./$(STUB)
	$(LOCKED) --upgrade --target $(VENV)/deepspeed -r $(LOCKS)/deepspeed.txt
	$(LOCKED) --upgrade --target $(VENV)/clients -r $(LOCKS)/clients.txt
	rm -rf $(STUB)/build $(STUB)/*.egg-info
	touch $@

demo: setup
	$(BIN)/rl-plane demo

# Real processes on a machine that others use too: a test that fails is tried once more, and both outcomes are printed.
# Beyond so many it is no accident.
PYTEST := $(BIN)/python -m pytest --durations 40 --reruns 1 --max-suite-reruns 4 --rerun-show-tracebacks
# Most tests without an engine wait for another process: six of them at once keep two cores busy. Three tests of engines
# do so too, because an engine needs a core to start, and waits then.
# The files run in the order of tests/conftest.py. In order of their counts, those with few and long tests would come last.
BESIDE := $(PYTEST) --dist loadfile --no-loadscope-reorder

# A check that fails beside other work says so again at the end.
test: setup
	$(MAKE) --jobs 2 --output-sync=target engines lint bytecode || $(MAKE) engines lint
	$(BESIDE) -n 6 -m 'not engines and (not slow or parallel)'
	$(BESIDE) -n 3 -m '(engines or (slow and not parallel)) and not (alone or bench or docs or kills)'
	$(PYTEST) -m 'alone and not kills'

# The commands of each page of docs/. `make test` runs those of the README alone: the pages take a quarter of an hour.
test-docs: engines
	$(BESIDE) -n 2 -m docs

# Kills and stops processes and nodes of vLLM and SGLang at each phase of an update, and when a worker heals: half an
# hour.
test-kills: engines
	$(PYTEST) -m kills

# Whether the benchmarks still run, one at a time: beside others they take several times as long.
test-bench: engines
	$(PYTEST) -m bench

test-fast: setup
	$(MAKE) --jobs 2 --output-sync=target lint bytecode || $(MAKE) lint
	$(BESIDE) -n 6 -m 'not engines and not slow'
	@echo 'Left out: the tests of vLLM, SGLang and most of hf, and the slow ones (kill matrix, simulation, docs, …). make test has all.'

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tests.lint

# Stores the bytecode of the test modules. Without it, each of six test processes would compile all of them at once.
bytecode: setup
	-$(BIN)/python -m pytest --collect-only --quiet > /dev/null 2>&1

# Writes deploy/locks again after a change of pyproject.toml or of an .in file; UPGRADE=1 takes the newest versions.
lock: $(VENV)/.tools
	$(VENV)/tools/bin/python $(LOCKS)/generate.py $(if $(UPGRADE),--upgrade)

$(VENV)/.tools: $(LOCKS)/tools.txt
	$(PYTHON) -m venv $(VENV)/tools
	sh $(LOCKS)/install.sh $(VENV)/tools/bin/python tools
	touch $@

# Asks the advisory service about each locked version, where it can be reached.
audit: $(VENV)/.tools
	$(VENV)/tools/bin/python $(LOCKS)/audit.py

# Ever new requests, and then mutated messages, entries and files: each for an hour. Also SECONDS=n SEED=n.
fuzz: fuzz-http fuzz-nats

fuzz-nats: setup
	$(BIN)/python -m tests.fuzz --seconds $(or $(SECONDS),3600) --seed $(or $(SEED),1)

fuzz-http: setup
	FUZZ_SECONDS=$$(($(or $(SECONDS),3600) / 4)) FUZZ_SEED=$(or $(SEED),1) $(BIN)/python -m pytest tests/fleet/test_openapi_fuzz.py

sim: setup
	$(BIN)/python -m tests.sim --seeds $(or $(SEEDS),1000)

# Takes each guard of the protocol out of a copy, one at a time: a named test must fail.
mutants: setup
	$(BIN)/python -m tests.sim.mutants

# Also SEED=n, and WITH='--engine hf --engine vllm' for other engines than two of hf.
soak: setup
	$(BIN)/python -m tests.soak --seconds $(or $(SECONDS),600) --seed $(or $(SEED),1) $(WITH)

bench: setup
	$(BIN)/python -m bench
	$(BIN)/python -m bench.memory
	$(BIN)/python -m bench.host_memory
	$(BIN)/python -m bench.engine_paths

docs: setup
	$(BIN)/python docs/generate_reference.py

clean:
	rm -rf $(VENV) demo-out
