# Tasks of this project. The logic is in onnxtool and in scripts/; this file only names what to run.

PYTHON ?= python3
VENV := .venv
# Where an environment has its programs; make needs a POSIX shell on Windows, such as that of Git.
SCRIPTS := $(if $(filter Windows_NT,$(OS)),Scripts,bin)
BIN := $(VENV)/$(SCRIPTS)
READY := $(VENV)/.dev
WORKFLOWS := .github/workflows/test.yml .github/workflows/release.yml .github/workflows/tables.yml examples/review/review.yml

# Packages are compiled by the first process that imports them, a tenth of what they have; not anew by each process.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup lock demo test test_fast web test_lowest fuzz lint docs dist check_install follow bench review coverage retrieval consumers audit clean

help: ## Show these targets.
	@sed -n 's/^\([a-z_]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: $(VENV)/.dev-all ## Make .venv with all packages, in pinned versions; `make demo` and `make test` install fewer.

$(VENV)/.demo $(VENV)/.dev $(VENV)/.dev-all: pyproject.toml requirements.txt scripts/set_up.py
	$(PYTHON) scripts/set_up.py $(@F:.%=%)

# torch has one more hash than its index states, of the build for processors alone: uv keeps it until the version changes.
LOCK = PATH="$(CURDIR)/$(BIN):$$PATH" uv pip compile --quiet --universal --python-version 3.11.5 --group setup --no-annotate \
	--custom-compile-command 'make lock' pyproject.toml
lock: ## Write requirements.txt and its parts by uv, for every platform and Python; ARGS=--upgrade takes new versions.
	$(LOCK) --extra dev-all --generate-hashes $(ARGS) --output-file requirements.txt
	for group in dev demo; do $(LOCK) --extra $$group --constraint requirements.txt --output-file requirements/$$group.txt; done

demo: $(VENV)/.demo ## Export, optimize, run, time, describe and evaluate a real trained model, without the hub.
	$(BIN)/python scripts/demo.py

test_fast: $(READY) ## Run the fast tests (90 s on two cores).
	$(BIN)/python -m pytest --fast

test: $(READY) ## Run the test suite; `make setup` before it adds tests of stores and of other people's clients.
	$(BIN)/python -m pytest $(ARGS)

web: ## Install with npm what tests run in JavaScript, and a server of Azure's stores; without, these are skipped.
	ONNXRUNTIME_NODE_INSTALL=skip npm ci --prefix tests/training/web --no-audit --no-fund
	npm ci --prefix tests/encoding/azurite --no-audit --no-fund --ignore-scripts

test_lowest: ## Run all but the slow tests with the lowest versions that pyproject.toml allows.
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/$(SCRIPTS)/python -m pip install --quiet --constraint constraints-lowest.txt --editable '.[dev]'
	.venv-lowest/$(SCRIPTS)/python -m pytest -m 'not slow'

fuzz: $(READY) ## Give hostile models and tokenizers to the commands, and random training steps to the backend; takes hours.
	$(BIN)/python scripts/fuzz_models.py
	$(BIN)/python scripts/fuzz_training.py
	WIRE_FUZZ=400 $(BIN)/python -m pytest tests/model_file/test_wire_fuzz.py

lint: $(READY) ## Check style, types, workflows and CITATION.cff.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows $(WORKFLOWS)
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-actions action.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/model.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.citation-file-format CITATION.cff
	$(BIN)/zizmor --offline --quiet --config .github/zizmor.yml .github examples/review/review.yml action.yml
	$(BIN)/mypy

docs: $(READY) ## Build the documentation into build/docs; a warning is an error.
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --nitpicky --quiet docs build/docs

dist: export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct)
dist: $(READY) ## Build the packages for a release, and their bill of materials, into dist/: a commit gives the same bytes.
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/python scripts/write_sbom.py dist

check_install: $(READY) ## Install what dist/ has by its metadata alone, run it, and check it as an index does; fetches packages.
	$(BIN)/python scripts/check_install.py --torch $(or $(TORCH),torch)

follow: $(READY) ## Follow README and the start guide in a fresh clone with an empty home, in order, twice; fetches packages.
	$(BIN)/python scripts/follow_documents.py

bench: $(READY) ## Measure export, optimize and stats on this machine, and compare with peers.
	$(BIN)/python scripts/bench_commands.py

review: $(READY) ## Describe the difference of NEW and OLD, two ONNX files, in models/review.md and models/review.html.
	$(BIN)/onnxtool stats $(NEW) $(OLD) --format markdown --output models/review.md --force
	$(BIN)/onnxtool stats $(NEW) $(OLD) --format html --output models/review.html --force

coverage: $(READY) ## Export every model type of transformers from a tiny checkpoint, optimize it, and write build/coverage.md; takes hours.
	$(BIN)/python scripts/coverage.py --resume

retrieval: $(READY) ## Compare checkpoints of every module of sentence-transformers with it, and write docs/retrieval.md.
	$(BIN)/python -m tests.retrieval.comparison --output docs/retrieval.md

consumers: $(READY) ## Load exports for every target in their real consumers, and compare the answers with PyTorch's.
	$(BIN)/python scripts/check_consumers.py --work_dir models/consumers --write docs/consumers/measured.md

audit: $(READY) ## Run PyTorch's own operator tests through the backend, and write docs/operators.md; takes half an hour.
	$(BIN)/python scripts/audit_operators.py

clean: ## Remove what the demo and the benchmarks made.
	rm -rf models/*.onnx models/*.onnx.data models/*/
