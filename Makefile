# make demo   set-up in .venv, then the audit of the embedded model: the healthy one, then the unscaled one
# make test   the same set-up with the test extras, then the tests that prove each thing once, in ten minutes
# make full   these and the rest, an hour and a half    make rest   what make test leaves out; SEED=N draws as that run did,
#             SHARE=8 one in eight, as CI does
# make test-library   those of make test for the library alone; make test-lab   those for the lab (lab/)
# make slow   hours: exhaustive, mutants, kills       make coverage   what test and full cover of each room
# make planted  errors planted in the package, one at a time: which of them the tests of make test find (hours)
# make strangers  public bug reports rebuilt small, in the folder CASES: check and diff against the right answers
# make lint   ruff, mypy, import-linter, names         make bench   the benchmarks
# make names  the names of the package that mean several things, and where they stand
# make real   the pairs of released packages, each in the environment that it needs (scripts/real.py), which go into
#             out/real (SQRTDK_REAL names another folder); needs the network the first time
# make portable   the tests whose numbers depend on the CPU, as other CPUs would run them (scripts/portable.py), an hour
# make gpu    the tests that need an NVIDIA GPU, and its benchmark, ten minutes; records go into out/gpu (OUT names another
#             folder). Torch is that of the Python that SQRTDK_TORCH names, or of .venv, or of $(PYTHON): scripts/gpu.py
# make versions  the core of the tests with the oldest, middle and newest torch, transformers, numpy and Python, in
#             environments of their own in out/versions (SQRTDK_VERSIONS names another folder); gigabytes, an hour (scripts/versions.py)
# make release-check  wheel and sdist, built and tried out in clean environments (scripts/release_check.py)
# make docs   the documentation in English and Chinese, strictly, into out/docs
# make pages  what is made from the records in benchmarks/results: README's picture, pages, tables, figures, notebooks
# make wheel  a wheel in out/ that holds the compiled attention kernel
#
# demo, bench and all tests compile that kernel first, where there is a C++ compiler:
# it goes to the user's cache directory (SQRTDK_CACHE names another), and stays there after make clean. wheel compiles
# it anew.
# All else goes into .venv and out/; nothing needs root. pip's own settings (PIP_INDEX_URL and the like) hold.

PYTHON ?= python3
JOBS ?= 2
REAL := $(abspath $(or $(SQRTDK_REAL),out/real))
# auto: without Chromium the browser tests are left out, and make says so. required: they run, or fail.
BROWSER ?= auto
CHROMIUM := /usr/bin/chromium
# Its metadata asks for torchvision, which no constraint here can hold to a CPU build: installed without dependencies.
VIT_PYTORCH := vit-pytorch==1.26.11
# Its metadata asks for what writes checkpoints, a hundred megabytes that no test needs: installed without dependencies.
FLAX := flax==0.12.8 optax==0.2.8 treescope==0.1.10
# Built from source, once, in about five minutes of CPU: for any x86-64 or Arm, with threads of its own.
LLAMA_CPP := llama-cpp-python==0.3.36
LLAMA_CPP_FLAGS := -DGGML_NATIVE=OFF -DLLAVA_BUILD=OFF -DGGML_OPENMP=OFF -DLLAMA_BUILD_TOOLS=OFF

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
INSTALL := $(PIP) install --constraint constraints.txt
export HF_HUB_OFFLINE ?= 1
export OMP_NUM_THREADS ?= 1
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Hundreds of tests start Python: each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: kernel demo test test-library test-lab rest full coverage planted strangers portable slow real lint names bench docs pages gpu wheel versions release-check clean
.DELETE_ON_ERROR:

demo: kernel
	@mkdir -p out
	@printf '\n== demo: trained with the right scale ==\n\n'
	@$(BIN)/sqrtdk check demo
	@printf '\n== demo:unscaled: the same training without the scale (findings are expected) ==\n\n'
	@$(BIN)/sqrtdk check demo:unscaled --html out/demo-unscaled.html --force || test $$? -eq 1
	@printf '\nOpen in a browser: %s\n' "$(CURDIR)/out/demo-unscaled.html"

# Tests by markers, on JOBS workers.
define tests
@if [ $(BROWSER) = required ] || [ -x $(CHROMIUM) ]; then marks='$(1)'; else marks='($(1)) and not browser'; \
    echo 'The browser tests are skipped: $(CHROMIUM) is missing (Debian: apt-get install chromium).'; fi; \
$(BIN)/python -m pytest -q --numprocesses $(JOBS) --dist worksteal $(if $(SEED),--sample-seed $(SEED)) $(if $(SHARE),--share $(SHARE)) -m "$$marks" $(2)
endef

test: .venv/.dev kernel
	$(call tests,not full and not slow and not gpu)

test-library: .venv/.dev kernel
	$(call tests,not full and not slow and not gpu,tests src)

test-lab: .venv/.dev kernel
	$(call tests,not full and not slow and not gpu,lab)

rest: .venv/.dev .venv/.ggml kernel
	$(call tests,full and not slow and not gpu)

full: .venv/.dev .venv/.ggml kernel
	$(call tests,not slow and not gpu)

planted: .venv/.dev kernel
	@$(BIN)/python scripts/planted.py

coverage: .venv/.dev .venv/.ggml kernel
	$(BIN)/python scripts/coverage_rooms.py --jobs $(JOBS) $(if $(SEED),--sample-seed $(SEED))

strangers: .venv/.dev kernel
	@$(BIN)/python scripts/strangers.py $(CASES)

portable: .venv/.dev kernel
	@JOBS=$(JOBS) $(BIN)/python scripts/portable.py

slow: .venv/.dev kernel
	$(BIN)/python -m pytest -q -m slow

# The Python of the ports' environment runs the tests: the packages are there alone.
real: | .venv/bin/python
	@$(BIN)/python scripts/real.py $(REAL)
	SQRTDK_REAL=$(REAL) PYTHONPATH=$(CURDIR)/src $(REAL)/ports/bin/python -m pytest -q -m slow tests/compare/real

lint: .venv/.dev
	$(BIN)/ruff check
	$(BIN)/ruff check --preview --select PLW1514  # a text file's encoding; a preview in pyproject.toml changes other rules
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/mypy --platform win32 --no-warn-unreachable --cache-dir .mypy_cache/win32  # nothing that Windows lacks
	$(BIN)/lint-imports
	$(BIN)/python scripts/house.py --check
	$(BIN)/clang-format --dry-run -Werror src/sqrtdk/impl/kernel/*.h src/sqrtdk/impl/kernel/*.cpp

names: .venv/.dev
	@$(BIN)/python scripts/house.py --names

docs: .venv/.dev
	@$(BIN)/python docs/site/build.py out/docs
	@printf 'Open in a browser: %s\n' "$(CURDIR)/out/docs/index.html"

# In this order: the notebooks hold the page, which holds the claims' verdicts.
pages: .venv/.dev
	@for script in readme_picture install_lines cost_page cliffs_figure versions_page rates_table port_table public_kernels_page lesson_figures claims_page errata_page sources_page lesson_notebook; do \
	    $(BIN)/python scripts/$$script.py || exit 1; done

bench: .venv/.dev kernel
	$(BIN)/python benchmarks/static_check.py
	$(BIN)/python benchmarks/trace.py
	$(BIN)/python benchmarks/attention.py
	$(BIN)/python benchmarks/kernels.py --threads $$(nproc)

# No set-up before: where there is no GPU nothing is installed.
gpu:
	@$(PYTHON) scripts/gpu.py $(abspath $(or $(OUT),out/gpu))

wheel: .venv/.dev
	@mkdir -p out
	SQRTDK_PREBUILD=1 $(PIP) wheel --no-deps --no-build-isolation --wheel-dir out . ./lab
	@ls out/*.whl

versions: .venv/.dev kernel
	@JOBS=$(JOBS) $(BIN)/python scripts/versions.py

release-check: .venv/.dev
	$(BIN)/python scripts/release_check.py

clean:
	rm -rf .venv .venv-gpu out

# No stamp: sqrtdk itself knows whether a library that loads is there, and then compiles nothing.
kernel: .venv/.base
	@$(BIN)/sqrtdk build --if-possible > /dev/null

# Stamps: each is newer than what it was made from, so that a second run installs nothing.
.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo 'The pinned versions need Python 3.11 or newer: make PYTHON=python3.12'; exit 1; }
	@echo 'Making .venv ...'
	@$(PYTHON) -m venv .venv || { echo 'No venv module? Debian: apt-get install python3-venv'; rm -rf .venv; exit 1; }

.venv/.base: pyproject.toml lab/pyproject.toml constraints.txt Makefile | .venv/bin/python
	@echo 'Installing torch and sqrtdk ...'
	@$(INSTALL) torch
	@$(INSTALL) --editable . --editable ./lab
	@touch $@

.venv/.dev: .venv/.base
	@echo 'Installing what the tests and linters need ...'
	@$(INSTALL) --editable '.[dev]' --editable './lab[ray,app]'
	@$(INSTALL) --no-deps $(VIT_PYTORCH) $(FLAX)
	@touch $@

.venv/.ggml: .venv/.dev
	@echo 'Building llama.cpp, once ...'
	@CMAKE_ARGS='$(LLAMA_CPP_FLAGS)' $(INSTALL) $(LLAMA_CPP)
	@touch $@
