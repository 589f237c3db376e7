# Everything runs in the environment .venv, which `make env` builds. `make` alone lists the targets.

SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
EXTRAS := data,tensorboard,planner,deepspeed,triton,dev
PYTHON ?=
SOURCES = $(wildcard hetero_megatron tools kernels/hetero_kernels plugins/hetero_plugins benchmarks pretrain_gpt.py)

# Ranks share the cores of one machine: one thread each. No test may reach for a network.
export OMP_NUM_THREADS := 1
export HF_HUB_OFFLINE := 1
export HF_HUB_DISABLE_TELEMETRY := 1
export TOKENIZERS_PARALLELISM := false
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Hundreds of processes import the package: it is compiled once.
unexport PYTHONDONTWRITEBYTECODE

# For test-parity: number of random plans; without SEED a new one is drawn, and printed.
N ?= 500
SEED ?=
# Further arguments, for pytest or the training program: make test ARGS="-k layout -x", make demo ARGS="--train-iters 20"
ARGS ?=
# Processes that tests run in. Ranks wait for each other most of the time, so two are no more than two cores' work.
WORKERS ?= 2
# One more for slow tests, which wait for emulated clocks, links and time-outs too. Those of the last folder are short.
SLOW_WORKERS ?= 3
SLOW := tests/slow tests/testbed tests/unit tests/distributed

# Where it is set, as in many containers, every process compiles all that it imports: half a minute of `make test`.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help env demo test test-torch211 test-slow test-exhaustive test-parity test-faults test-fuzz test-scale bench bench-readme lint types check clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: $(STAMP)  ## build .venv with the pinned versions (again only when they change)

$(STAMP): setup.py constraints.txt
	@tools/make_venv.sh "$(VENV)" "$(EXTRAS)" "$(PYTHON)"
	@touch $@

demo: env  ## pretrain a small model on 4 unequal ranks of this machine (about 2 minutes)
	examples/demo.sh $(ARGS)

# Lint and types beside the tests, shown at the end. Not by $(MAKE), for which make -n would run the whole line.
test: env  ## lint, types, import contract, and all tests but the slow ones
	@log=$$(mktemp); make --no-print-directory -j2 -O check > $$log 2>&1 & checks=$$!; code=0; \
	trap 'kill $$checks 2> /dev/null; rm -f $$log' EXIT; \
	echo "$(PY) -m pytest -n $(WORKERS) --dist worksteal $(ARGS)"; \
	$(PY) -m pytest -n $(WORKERS) --dist worksteal $(ARGS) || code=1; \
	wait $$checks || code=1; cat $$log; exit $$code

test-torch211: $(VENV)-2.11/.installed  ## tests under torch 2.11 in a second environment (5 GB)
	$(VENV)-2.11/bin/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

$(VENV)-2.11/.installed: setup.py constraints.txt
	@tools/make_venv.sh "$(VENV)-2.11" "$(EXTRAS)" "$(PYTHON)" "torch==2.11.0 triton==3.6.0 setuptools==81.0.0 numpy==2.3.5"
	@touch $@

test-slow: env  ## fresh install, the commands of README and docs, testbeds, more cases of laws
	@code=0; $(PY) -m pytest -o timeout=1800 -m "slow and quiet" tests/slow tests/testbed $(ARGS) || [ $$? = 5 ] || code=1; \
	$(PY) -m pytest -o timeout=1800 -n $(SLOW_WORKERS) --dist loadscope -m "slow and not scale and not quiet and not exhaustive" $(SLOW) $(ARGS) && exit $$code

test-exhaustive: env  ## all other cases of laws, which CI leaves out
	$(PY) -m pytest -o timeout=1800 -n $(SLOW_WORKERS) --dist loadscope -m "exhaustive and not scale" tests $(ARGS)

test-parity: env  ## N random plans against one process: make test-parity N=500 SEED=1
	@seed="$(SEED)"; seed="$${seed:-$$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')}"; \
	echo "test-parity: N=$(N) SEED=$$seed"; \
	N="$(N)" SEED="$$seed" $(PY) -m pytest tests/distributed/training/test_parity.py -q -o timeout=0 $(ARGS) \
	|| { echo "test-parity: again with: make test-parity N=$(N) SEED=$$seed"; exit 1; }

test-faults: env  ## N runs with a rank killed at a random moment: make test-faults N=50 SEED=1
	@N="$(if $(filter file,$(origin N)),50,$(N))" SEED="$(or $(SEED),1)" $(PY) -m pytest tests/slow/test_faults.py -q -m slow -o timeout=0 $(ARGS)

test-fuzz: env  ## N damaged and hostile inputs: make test-fuzz N=4000 SEED=1
	@$(PY) -m tests.fuzz -n "$(if $(filter file,$(origin N)),4000,$(N))" --seed "$(or $(SEED),1)" $(ARGS)

test-scale: env  ## one step on 32 ranks of this machine
	$(PY) -m pytest -m scale $(ARGS)

bench: env  ## benchmarks against peers; each prints ratios measured in one run
	@shopt -s nullglob; files=(benchmarks/bench_*.py); \
	[ $${#files[@]} -gt 0 ] || { echo "bench: no benchmarks/bench_*.py yet" >&2; exit 1; }; \
	for file in "$${files[@]}"; do echo "== $$file"; $(PY) "$$file" || exit 1; done

bench-readme: env  ## the cheap rows of README's measurements again, beside what is claimed (HETERO_PUBLIC_DATA: Sailor's files)
	@$(PY) benchmarks/bench_readme.py $(ARGS)

check: lint types

lint: env  ## ruff, layers and circles of imports, vendor-neutral core, file and function lengths
	$(VENV)/bin/ruff check .
	$(VENV)/bin/lint-imports --no-logo
	$(PY) tools/lint_vendor_neutral.py
	$(PY) tools/lint_import_circles.py

types: env  ## mypy
	$(PY) -m mypy $(SOURCES)

clean:  ## remove caches and runs (rm -rf .venv for the environment)
	rm -rf build runs .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
