# make demo   sets up .venv and shows when λ pays, in about a minute
# make test   sets up .venv and runs the tests that need pip packages alone, in minutes
# make test-all  adds the linters, and the tests with servers, browsers, other frameworks, real data
# make docs   the documentation, into site/
# make dist   the wheel and the source archive, into dist/
# make bench  the CPU benchmarks, on quiet cores
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PROJECT := pyproject.toml constraints.txt

# TORCH=lowest or TORCH=newest: another torch than the pinned one (CI's matrix)
CONSTRAINTS := constraints.txt
ifdef TORCH
CONSTRAINTS := $(VENV)/constraints-$(TORCH).txt
lowest := $(shell sed -n 's/^dependencies = .*"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml)
endif
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS)

.PHONY: demo test test-all test-extended lint docs bench dist clean

# One thread: the networks are small, and threads on busy cores wait for each other.
demo: $(VENV)/.tool
	OMP_NUM_THREADS=1 $(BIN)/torchace run demo

# Two files at a time, one thread each: two processes with two threads each would wait for each other. A test
# that hangs fails after twenty minutes.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --timeout 1200

test: $(VENV)/.test
	$(PYTEST) -m "not extended" --doctest-ignore-import-errors

test-all: test lint test-extended

test-extended: $(VENV)/.dev
	$(PYTEST) -m extended

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/bench_loss.py
	$(BIN)/python benchmarks/bench_members.py
	$(BIN)/python benchmarks/bench_run_group.py
	# without what they depend on, which is here: they would bring another torch and torchvision
	$(BIN)/pip install --quiet --no-deps -c constraints.txt torchensemble torch-uncertainty==0.13.0 einops==0.8.2 seaborn==0.13.2
	$(BIN)/python benchmarks/bench_training.py

# The wheel and the source archive, checked as PyPI would.
dist: $(VENV)/.tool
	$(INSTALL) build twine
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*

clean:
	rm -rf $(VENV)

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "Expected Python 3.11 or newer; set PYTHON=/path/to/python." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/constraints-%.txt: $(PROJECT) | $(BIN)/python
	grep -vE '^(torch|torchvision|triton)==' constraints.txt > $@
	$(if $(filter lowest,$*),echo 'torch==$(lowest).*' >> $@)

# What a user of the command line needs.
$(VENV)/.tool: $(PROJECT) $(CONSTRAINTS) | $(BIN)/python
	$(INSTALL) -e ".[tool]"
	@touch $@

# What `make test` needs beside it.
$(VENV)/.test: $(VENV)/.tool
	$(INSTALL) -e ".[tool,test]"
	@touch $@

# What linters and the other tests need. torchvision comes with timm; the shim lets it import beside a CPU torch.
$(VENV)/.dev: $(VENV)/.test tests/support/torchvision_shim.py
	$(INSTALL) -e ".[tool,ray,lightning,timm,transformers,peft,onnx,tensorboard,mlflow,wandb,docs,test,dev]"
	cp tests/support/torchvision_shim.py "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/"
	echo "import torchvision_shim" > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/torchvision_shim.pth"
	@touch $@
