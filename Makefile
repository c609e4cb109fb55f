# p2ptrain: `make help` lists what there is. Works with GNU make 3.81 (macOS) and newer.

PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
VENV ?= .venv
PIP_FLAGS ?=
BIN := $(VENV)/bin

DEMO_STATE ?= .p2ptrain/demo
DEMO_ARGS ?=
PROMPT ?= def 
MINUTES ?= 10
SCHEDULES ?= 200

# The tests start hundreds of processes, and each would compile this program anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast fuzz sim lint format clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.installed ## train a small model on this machine with two workers, then let it write
	$(BIN)/p2ptrain up --profile tiny --state $(DEMO_STATE) --plain $(DEMO_ARGS)
	$(BIN)/p2ptrain generate "$(PROMPT)" --tokens 200 --temperature 0.6 --checkpoint $(DEMO_STATE)

# Three groups at a time, which take about as long. Real processes wait the most, so some that compute are with them.
PROCESSES := tests/fuzz tests/e2e tests/net tests/tui tests/roles/web $(wildcard tests/compute/test_c[ao]*.py) tests/compute/test_part_trainer.py
COMPUTING := $(filter-out $(PROCESSES),$(wildcard tests/compute/test_*.py)) \
	$(filter-out $(PROCESSES) %/__pycache__,$(patsubst %/,%,$(wildcard tests/roles/*/))) tests/sim
WAITING := $(wildcard tests/roles/test_*.py) \
	$(filter-out tests/compute tests/roles tests/sim $(PROCESSES) %/__pycache__,$(patsubst %/,%,$(wildcard tests/*/)))

test: $(VENV)/.installed-dev ## run all tests
	@logs=$$(mktemp -d); \
	$(BIN)/python -m pytest --durations=25 $(COMPUTING) > $$logs/computing 2>&1 & computing=$$!; \
	$(BIN)/python -m pytest --durations=25 $(PROCESSES) > $$logs/processes 2>&1 & processes=$$!; \
	trap 'kill $$computing $$processes 2>/dev/null; rm -rf $$logs' EXIT; trap 'exit 130' INT TERM; \
	$(BIN)/python -m pytest --durations=25 $(WAITING); waited=$$?; \
	wait $$computing; computed=$$?; wait $$processes; ran=$$?; cat $$logs/*; \
	test $$waited -eq 0 && test $$computed -eq 0 && test $$ran -eq 0

test-fast: $(VENV)/.installed-dev ## run the tests that take less than ten seconds each
	$(BIN)/python -m pytest -m "not slow"

fuzz: $(VENV)/.installed-dev ## give every parser of a peer's bytes whatever comes to mind, for MINUTES
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES)

sim: $(VENV)/.installed ## run SCHEDULES fresh schedules of the simulator, and a quarter as many of split models
	$(BIN)/p2ptrain sim --schedules $(SCHEDULES) --processes 2
	$(BIN)/p2ptrain sim --schedules $$(($(SCHEDULES) / 4 + 1)) --stages 2 --processes 2

lint: $(VENV)/.installed-dev ## check style, types and who imports whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev ## format the code, and write the example profile and the protocol reference anew
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python -m configs.schema > configs/profiles/example.toml.new
	mv configs/profiles/example.toml.new configs/profiles/example.toml
	$(BIN)/python -m wire.protocol > docs/protocol.md.new
	mv docs/protocol.md.new docs/protocol.md

clean: ## remove the environment, caches and the demo's state
	rm -rf $(VENV) build dist *.egg-info .p2ptrain .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is newer than what it was installed from, so an environment is made anew where the versions changed.
define install
	@test -n "$(PYTHON)" || { echo "error: p2ptrain needs Python 3.11 or newer, and there is none on the PATH"; \
		echo "  → install one, or name it: make PYTHON=/path/to/python3 $(MAKECMDGOALS)"; exit 2; } >&2
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "error: p2ptrain needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1)"; \
		echo "  → name a newer one: make PYTHON=/path/to/python3 $(MAKECMDGOALS)"; exit 2; } >&2
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --no-compile $(PIP_FLAGS) --constraint constraints.txt --editable "$(1)"
	$(BIN)/python -c "import p2ptrain.compute.trainer"  # compiles what is used: a fifth of what pip would
	@touch $(VENV)/.installed $@
endef

$(VENV)/.installed: pyproject.toml constraints.txt
	$(call install,.)

$(VENV)/.installed-dev: pyproject.toml constraints.txt
	$(call install,.[dev])
