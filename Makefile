# Two commands on a fresh machine with Python >= 3.11: `make serve` and `make test`.
PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PINNED := pyproject.toml constraints.txt
BUILDER := .venv-build
PEERS := .venv-peers
PEERS_PINNED := benchmarks/peers/requirements.txt

.DELETE_ON_ERROR:
.PHONY: serve test test-browser test-fast test-gpu dist test-wheel wheel-times bench bench-drafters bench-engine bench-pipeline bench-serving bench-peers proofs fuzz chaos overload structured docs check clean

serve: $(VENV)/installed
	$(BIN)/specserve serve $(ARGS)

test: check
	$(BIN)/python -m pytest $(ARGS)

test-fast: check
	$(BIN)/python -m pytest -m "not gpu and not browser and not slow" $(ARGS)

test-gpu: $(VENV)/installed-for-tests
	$(BIN)/python -m pytest -m gpu $(ARGS)

# The playground in the system's Chromium. ARGS="--screenshots=docs/playground" takes the pictures of the docs anew.
test-browser: $(VENV)/installed-for-browser
	$(BIN)/python -m pytest -m browser $(ARGS)

# A wheel and an sdist, in dist/. Built from what the sdist holds, so that a stale build/ cannot slip in.
dist: $(BUILDER)/installed
	rm -rf dist build
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BUILDER)/bin/python -m build --outdir dist $(ARGS)

# From the wheel, in an empty folder: doctor, generate, serve and a request. With the dependencies that are here, without network.
test-wheel: $(VENV)/installed-for-tests
	$(BIN)/python -m tests.support.wheel --borrow $(ARGS)

# The same in a fresh environment, into which all dependencies are installed: what each step takes. docs/packaging.md has figures.
wheel-times: $(VENV)/installed-for-tests
	$(BIN)/python -m tests.support.wheel $(ARGS)

# Slow, and not part of the tests: what they print stands in docs/, with date and machine.
bench: bench-engine bench-pipeline

bench-engine: $(VENV)/installed
	$(BIN)/python -m benchmarks.engine --out docs/engine-speed.md $(ARGS)

bench-serving: $(VENV)/installed
	$(BIN)/python -m benchmarks.link --out docs/link-speed.md
	$(BIN)/python -m benchmarks.serving --out docs/serving-speed.md $(ARGS)

bench-pipeline: $(VENV)/installed
	$(BIN)/python -m benchmarks.pipeline --out docs/pipeline-speed.md --trace docs/trace.json --plot docs/pacer.svg $(ARGS)
	$(BIN)/python -m specserve.tools.timeline docs/trace.json --out docs/trace.svg
	rm docs/trace.json

bench-drafters: $(VENV)/installed
	$(BIN)/python -m benchmarks.drafters --out docs/drafters.md $(ARGS)

# A peer that cannot be installed is named in the report, with why.
bench-peers: $(VENV)/installed
	-$(MAKE) $(PEERS)/installed
	$(BIN)/python -m benchmarks.peers --python $(PEERS)/bin/python --out docs/peers-speed.md $(ARGS)

proofs: $(VENV)/installed-for-tests
	$(BIN)/python -m tests.proofs.distribution $(ARGS)

# What it prints stands in docs/structured.md.
structured: $(VENV)/installed-for-tests
	$(BIN)/python -m benchmarks.structured $(ARGS)

# What it prints stands in docs/reliability.md.
fuzz: $(VENV)/installed-for-tests
	$(BIN)/python -m tests.chaos.fuzz $(ARGS)

chaos: $(VENV)/installed-for-tests
	$(BIN)/python -m tests.chaos.table $(ARGS)

overload: $(VENV)/installed-for-tests
	$(BIN)/python -m tests.chaos.overload $(ARGS)

# The guides as a site, in site/; `make docs ARGS=serve` shows it while you write. Strict: a broken link fails. Not among the tests, which do without the generator
# and hold links, names and commands of the pages by themselves (tests/docs/test_pages.py).
docs: $(VENV)/installed-for-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs $(or $(ARGS),build --clean --strict)

check: $(VENV)/installed-for-tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# The stamps are older than the files that they depend on when something is to be installed anew.
$(VENV)/installed: $(PINNED)
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e .
	touch $@

$(VENV)/installed-for-tests: $(PINNED)
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e '.[test]'
	touch $(VENV)/installed $@

$(VENV)/installed-for-browser: $(VENV)/installed-for-tests
	$(BIN)/python -m pip install -c constraints.txt -e '.[test,browser]'
	touch $@

$(BUILDER)/installed: constraints.txt
	$(PYTHON) -m venv $(BUILDER)
	$(BUILDER)/bin/python -m pip install -c constraints.txt build
	touch $@

$(VENV)/installed-for-docs: $(PINNED)
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e '.[docs]'
	touch $(VENV)/installed $@

# torchvision comes with the converter, which does without it, and may be built for another torch than the one that is pinned.
$(PEERS)/installed: $(PEERS_PINNED)
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --log $(PEERS)/install.log -r $(PEERS_PINNED)
	$(PEERS)/bin/python -m pip uninstall --yes torchvision
	touch $@

clean:
	rm -rf $(VENV) $(BUILDER) $(PEERS) build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
