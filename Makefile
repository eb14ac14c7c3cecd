# Every target sets up what it needs: a virtual environment in .venv, rebuilt when pyproject.toml changes.
# Needs make and a Python of at least 3.11; `make PYTHON=/path/to/python ...` chooses one.

PYTHON ?= $(firstword $(foreach name,python3.11 python3 python3.12 python3.13 python3.14 python,\
	$(if $(shell $(name) -c 'import sys; print(sys.version_info >= (3, 11) or "")' 2>/dev/null | grep True),$(name))))
VENV ?= .venv
BIN := $(VENV)/bin
JOBS ?= 2
PYTEST_ARGS ?=
SELECT ?= not thorough and not wheel
QUICK ?= tests/unit tests/test_errors.py tests/test_couplings.py
PROGRAMS ?= 20000
DIVIDED ?= 2000
SEARCHED ?= 300

# Run again for lesser instruction sets than the processor has; for the least, jaxlib itself cannot compile float16 (nor float8, by way of it).
ISA_TESTS := tests/test_zoo.py tests/test_invariance.py
WITHOUT_FLOAT16 := (not float16 or bfloat16) and not float8 and not loss_scaling

# Tests and demo pretend to have several devices, which only the CPU backend can do.
export JAX_PLATFORMS ?= cpu

.PHONY: help demo quick test test-thorough test-wheel test-all lint docs bench clean

help:
	@echo "make demo      train a small network on 1, 2, 3, 4 and 8 devices, and while they change; compare"
	@echo "make quick     tests that compile nothing, and some others, in a minute"
	@echo "make test      a few cases of each mechanism"
	@echo "make test-thorough  these, and those that take long or need the TPU compiler; continuous integration runs an eighth of them, in turns"
	@echo "make test-all  every combination of step, nodes and devices, other instruction sets, $(PROGRAMS) random programs, $(DIVIDED) divided, $(SEARCHED) searched"
	@echo "make lint      ruff and pyright"
	@echo "make docs      the site, in out/docs/index.html"
	@echo "make bench     the benchmarks, as a table"

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "no Python of at least 3.11 found; try make PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

# `demo` and the usual tests need the first of these; the compiler for TPUs, the linters, and the tools of the pages
# and notebooks are many times as large, and come with the second.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -e '.[test]'
	@touch $@

$(VENV)/.installed-thorough: pyproject.toml | $(VENV)/.installed
	$(BIN)/python -m pip install -e '.[thorough]'
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/python examples/digits.py

quick: $(VENV)/.installed
	$(BIN)/python -m pytest -n $(JOBS) -m "$(SELECT)" $(PYTEST_ARGS) $(QUICK)

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n $(JOBS) -m "$(SELECT)" $(PYTEST_ARGS)

test-thorough: SELECT = not wheel
test-thorough: $(VENV)/.installed-thorough
	$(BIN)/python -m pytest -n $(JOBS) -m "$(SELECT)" $(PYTEST_ARGS)

test-wheel: $(VENV)/.installed-thorough
	$(BIN)/python -m pytest -m wheel $(PYTEST_ARGS) tests/test_packaging.py

test-all: $(VENV)/.installed-thorough
	VNODE_TEST_ALL=1 $(BIN)/python -m pytest -n $(JOBS) -m "not wheel" $(PYTEST_ARGS)
	XLA_FLAGS=--xla_cpu_max_isa=AVX2 $(BIN)/python -m pytest -n $(JOBS) $(PYTEST_ARGS) $(ISA_TESTS) tests/test_overflow.py
	XLA_FLAGS=--xla_cpu_max_isa=SSE4_2 $(BIN)/python -m pytest -n $(JOBS) $(PYTEST_ARGS) $(ISA_TESTS) -k "$(WITHOUT_FLOAT16)"
	$(BIN)/python -m tests.random_programs --count $(PROGRAMS) --seed 0 --jobs $(JOBS)
	$(BIN)/python -m tests.random_programs --count $(DIVIDED) --seed 0 --jobs $(JOBS) --way layouts
	$(BIN)/python -m tests.random_programs --count $(DIVIDED) --seed 0 --jobs $(JOBS) --way plans
	$(BIN)/python -m tests.random_programs --count $(DIVIDED) --seed 0 --jobs $(JOBS) --way training
	$(BIN)/python -m tests.random_programs --count $(SEARCHED) --seed 0 --jobs $(JOBS) --way searches

lint: $(VENV)/.installed-thorough
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(VENV)/.installed-thorough
	$(BIN)/python -m sphinx --builder html --fail-on-warning --keep-going --quiet docs out/docs

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) out .pytest_cache .hypothesis .ruff_cache
