# Tasks of this project. The logic is in onnxtool and in scripts/; this file only names what to run.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test test_lowest fuzz lint bench review coverage consumers audit clean

help: ## Show these targets.
	@sed -n 's/^\([a-z_]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: $(READY) ## Make .venv and install onnxtool into it, with pinned versions.

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[demo,dev]'
	touch $@

demo: $(READY) ## Export, optimize, run, time and describe a real trained model, without the hub.
	$(BIN)/python scripts/demo.py

test: $(READY) ## Run the test suite.
	$(BIN)/python -m pytest

test_lowest: ## Run the fast tests with the lowest versions that pyproject.toml admits.
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet --constraint constraints-lowest.txt --editable '.[demo,dev]'
	.venv-lowest/bin/python -m pytest -m 'not slow'

fuzz: $(READY) ## Read four hundred times as many damaged models as the tests do; takes an hour.
	ONNXTOOL_FUZZ=400 $(BIN)/python -m pytest tests/model_file/test_wire_fuzz.py

lint: $(READY) ## Check style and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY) ## Measure the figures of the README on this machine.
	$(BIN)/python scripts/bench_pipeline.py

review: $(READY) ## Say what separates NEW from OLD, two ONNX files, in models/review.md and models/review.html.
	$(BIN)/onnxtool stats $(NEW) $(OLD) --format markdown --output models/review.md --force
	$(BIN)/onnxtool stats $(NEW) $(OLD) --format html --output models/review.html --force

coverage: $(READY) ## Export every model type of transformers from a tiny checkpoint, and write docs/coverage.md; takes hours.
	$(BIN)/python scripts/coverage.py --peers --resume

consumers: $(READY) ## Load exports for every target in their real consumers, and compare the answers with PyTorch's.
	$(BIN)/python scripts/check_consumers.py --work_dir models/consumers

audit: $(READY) ## Run PyTorch's own operator tests through the backend, and write docs/operators.md; takes half an hour.
	$(BIN)/python scripts/audit_operators.py

clean: ## Remove what the demo and the benchmarks made.
	rm -rf models/*.onnx models/*.onnx.data models/*/
