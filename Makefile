# Each target makes its own environment: `make test` on a fresh machine needs only Python 3.9 to 3.12 and make.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
# Where the benchmarks find DyNet and PyTorch; nothing else needs it
PEERS := .venv-peers
# What the environment gets besides the project, e.g. EXTRA=numpy==1.22.4
EXTRA ?=
ARGS ?=

# What setup.py compiles, if it can, for the Python of the environment
COMPILED = gluon_dynbatch/_fastpath$$($(PY) -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')

SUPPORTED := import sys; sys.exit(not (3, 9) <= sys.version_info[:2] < (3, 13))

.PHONY: demo test test-matrix fuzz bench bench-quick bench-policies bench-mixtures bench-repeats bench-schedule bench-overhead bench-scaling peers setup clean

demo: $(READY)
	$(PY) examples/demo.py $(ARGS)

test: $(READY)
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -m pytest -n 2 --dist loadfile $(ARGS)

test-matrix:
	@MAKE="$(MAKE)" bash tests/matrix.sh $(ARGS)

# Random programs against the plain loop. A run goes on where another ended: SEED is the number of the first case.
N ?= 1000
SEED ?= 0
JOBS ?= 2
BACKEND ?= mxnet
FACE ?= gluon
fuzz: $(READY)
	@PYTHONPATH=tests $(PY) -m fuzz --count $(N) --seed $(SEED) --jobs $(JOBS) --backend $(BACKEND) --face $(FACE) $(ARGS)

# Without the peers' environment their systems are absent from the tables, and the rest runs.
bench: $(READY)
	-@$(MAKE) --no-print-directory peers
	$(PY) -m benchmarks.run $(ARGS)
	$(PY) benchmarks/bench_scaling.py

bench-quick: $(READY)
	-@$(MAKE) --no-print-directory peers
	$(PY) -m benchmarks.run --quick $(ARGS)

bench-scaling: $(READY)
	$(PY) benchmarks/bench_scaling.py $(ARGS)

bench-policies: $(READY)
	$(PY) benchmarks/bench_policies.py $(ARGS)

bench-mixtures: $(READY)
	$(PY) benchmarks/bench_mixtures.py $(ARGS)

bench-repeats: $(READY)
	$(PY) benchmarks/bench_repeats.py $(ARGS)

bench-schedule: $(READY)
	$(PY) benchmarks/bench_schedule.py $(ARGS)

bench-overhead: $(READY)
	$(PY) benchmarks/bench_overhead.py $(ARGS)

setup: $(READY)

# An environment without the stamp may be half made: kept if its Python and pip run, made anew if not.
$(READY): setup.py pyproject.toml gluon_dynbatch/_fastpath.c $(wildcard gluon_dynbatch/compiled/*.h)
	@if ! { $(PY) -c '$(SUPPORTED)' && $(PY) -m pip --version; } >/dev/null 2>&1; then \
	  if ! command -v $(PYTHON) >/dev/null; then \
	    echo "$(PYTHON) was not found. Install Python 3.9 to 3.12, or name one: make PYTHON=/path/to/python3.11" >&2; exit 1; fi; \
	  if ! $(PYTHON) -c '$(SUPPORTED)'; then \
	    echo "$(PYTHON) is $$($(PYTHON) --version 2>&1), but this project (MXNet 1.9.1) needs Python 3.9 to 3.12." >&2; \
	    echo "Name another one: make PYTHON=python3.11" >&2; exit 1; fi; \
	  echo "making $(VENV) with $$($(PYTHON) --version)"; \
	  if ! $(PYTHON) -m venv --clear $(VENV); then \
	    echo "$(PYTHON) cannot make environments. On Debian or Ubuntu: apt-get install python3-venv" >&2; exit 1; fi; \
	fi
	@echo "installing into $(VENV) (the first time takes a few minutes)"
	@$(PY) -m pip install -q --disable-pip-version-check "pip>=21.3"  # older ones cannot install pyproject.toml with -e
	@rm -f $(COMPILED)
	@$(PY) -m pip install -q --disable-pip-version-check -e '.[test]' $(EXTRA)
	@[ -e $(COMPILED) ] || echo "gluon_dynbatch/_fastpath.c was not compiled: calls are recorded by Python code, which is slower" >&2
	@touch $@

# One package after the other: if one cannot be installed, the systems of the others still run.
peers: $(PEERS)/.ready

$(PEERS)/.ready: benchmarks/peers.txt | $(READY)
	@echo "making $(PEERS) with the systems that we are compared with (the first time takes a few minutes)"
	@$(PY) -m venv $(PEERS)
	@failed=0; for package in $$(grep -v '^#' benchmarks/peers.txt); do \
	  $(PEERS)/bin/python -m pip install -q --disable-pip-version-check "$$package" || \
	    { echo "$$package could not be installed: its systems will be absent" >&2; failed=1; }; done; exit $$failed
	@touch $@

clean:
	rm -rf .venv .venv-peers .venv-3.* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f gluon_dynbatch/_fastpath*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
