# The commands to know: make demo, make test, make test-all, make smoke, make check, make bench, make docs,
# make release. All of them make .venv first if it is missing. Needs Python >= 3.10 and make; no compiler.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help demo test test-all test-defaults smoke check bench docs release install clean

help:  ## list the commands
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /make \1\t/' | expand -t 22

install: $(STAMP)  ## make .venv and install epee into it

$(STAMP): pyproject.toml Makefile
	@echo "==> making $(VENV) with $(PYTHON) and installing $(TORCH), then epee with its tools"
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "epee needs Python 3.10 or later, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	@touch $(STAMP)

demo: $(STAMP)  ## train a small MoE language model over two processes, about a minute
	@echo "==> training; plot and numbers go to demo-out/"
	$(BIN)/epee demo --out demo-out

test: $(STAMP)  ## run the tests, all but the slow ones
	@echo "==> running the tests"
	scripts/test -m "not slow"

test-all: $(STAMP)  ## run the whole test suite, as CI does
	@echo "==> running all tests"
	scripts/test

test-defaults: $(STAMP)  ## run calls under foreign default device and dtype (tests/defaults.py)
	@echo "==> running the tests with poisoned defaults"
	scripts/test --poisoned-defaults -m "not slow" tests/backend tests/ep tests/compat tests/nn

smoke: $(STAMP)  ## a few GPU tests that touch every part; without two GPUs they are skipped, with the reason
	@echo "==> running the smoke tests"
	scripts/test -n 0 -m smoke tests/gpu

check: $(STAMP)  ## format, lint and types
	@echo "==> checking format, lint and types"
	scripts/check

bench: $(STAMP)  ## measure epee against gloo on this machine
	@echo "==> measuring; numbers go to bench-out/"
	mkdir -p bench-out
	$(BIN)/epee bench ep --json bench-out/ep.json
	$(BIN)/epee bench collectives --json bench-out/collectives.json --plot bench-out/collectives.png

docs: $(STAMP)  ## build the site of the documentation, without a network
	@echo "==> building the site; it goes to site/, begin with site/index.html"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

release: $(STAMP)  ## build and check wheel and sdist, use the wheel in a fresh venv; both go to dist/
	@echo "==> building the release; it goes to dist/"
	scripts/release --torch "$(TORCH)"

clean:  ## remove .venv and everything that was generated
	rm -rf $(VENV) demo-out bench-out build dist site *.egg-info
