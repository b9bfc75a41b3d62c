# On a fresh machine with Python >= 3.11: `make serve`, `make test`, and `make gate` before a merge. `make help` lists the rest.
PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PINNED := pyproject.toml constraints.txt
BUILDER := .venv-build
PEERS := .venv-peers
PEERS_PINNED := lab/bench/peers/requirements.txt
VLLM := .venv-vllm
VLLM_PINNED := lab/bench/peers/requirements-vllm.txt
CONFORMANCE := .venv-conformance
RAY_LLM := .venv-ray-llm
KERNELS := .venv-kernels
LLAMA := .venv-llama
LLAMA_PINNED := lab/bench/peers/requirements-llama.txt
LLAMA_BUILD := -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
	-DLLAMA_BUILD_APP=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF

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

# The commands whose results stand in docs/measurements/ are slow and not part of the tests.
MEASURED := docs/measurements

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help serve image first-minutes test gate test-rest test-long test-browser test-gpu gpu gpu-check gpu-speed gpu-texts gpu-decode gpu-wheels gpu-kernels format lint check dist test-wheel wheel-times \
	lock sbom audit \
	bench bench-engine bench-linears bench-quantized bench-adapters bench-serving bench-pipeline bench-placements bench-pool bench-routing bench-neighbours bench-pacer bench-demo bench-drafters bench-peers \
	simulate-autoscaling simulate-fleet conformance families proofs structured fuzz chaos chaos-gateways chaos-network chaos-releases overload misuse survey docs clean

help:  ## List the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

serve: $(VENV)/installed  ## Serve the demo pair on http://127.0.0.1:8000; ARGS="..." are passed on
	$(BIN)/specserve serve $(ARGS)

test: check  ## Run linter, type check, import rules and the core's tests
	$(BIN)/python -m tests.support.suite core $(ARGS)

gate: test  ## Run all that needs no GPU: `make test`, then `make test-rest`
	$(MAKE) test-rest

CHROMIUM = $(shell sh -c 'command -v chromium || command -v chromium-browser || command -v google-chrome')

test-rest: $(VENV)/installed-for-tests  ## Run tests on Ray and on emulated cards, proofs, tiny forms of commands, and the browser's
	$(BIN)/python -m tests.support.suite rest $(ARGS)
	@if test -n "$(CHROMIUM)"; then $(MAKE) test-browser; else \
		echo "the playground was NOT tested in a browser: there is no Chromium here; on Debian or Ubuntu: apt-get install chromium, then make test-browser"; fi

test-long: $(VENV)/installed-for-tests  ## Run the tests that take a minute or more each
	$(BIN)/python -m pytest -m long $(ARGS)

# ARGS="--screenshots=docs/guides/playground" takes the pictures of the docs.
test-browser: $(VENV)/installed-for-browser  ## Test the playground in the system's Chromium
	$(BIN)/python -m pytest -m browser $(ARGS)

test-gpu: $(VENV)/installed-for-tests  ## Run the tests that need a GPU
	$(BIN)/python -m pytest -m gpu $(ARGS)

# A borrowed machine may have torch and no network: `make gpu GPU_PYTHON=python3` runs its own, with
# what `make gpu-wheels` has brought into .wheels. Each step stays under ten minutes on one card.
GPU_PYTHON ?= $(BIN)/python
WHEELS := .wheels

gpu: gpu-check gpu-speed gpu-texts gpu-decode  ## Run all that needs a GPU, in four steps, and write its page
	PYTHONPATH=$(WHEELS)/site $(GPU_PYTHON) -m tests.gpu page $(ARGS)

gpu-check: $(WHEELS)/site  ## Compare a card's results with the CPU's
	PYTHONPATH=$(WHEELS)/site $(GPU_PYTHON) -m tests.gpu check $(ARGS)

gpu-speed: $(WHEELS)/site  ## Time passes, sampling and rounds on a card
	PYTHONPATH=$(WHEELS)/site $(GPU_PYTHON) -m tests.gpu speed $(ARGS)

gpu-texts: $(WHEELS)/site  ## Write whole texts on a card
	PYTHONPATH=$(WHEELS)/site $(GPU_PYTHON) -m tests.gpu texts $(ARGS)

gpu-decode: $(WHEELS)/site  ## Decode with models of true shapes on a card
	PYTHONPATH=$(WHEELS)/site $(GPU_PYTHON) -m tests.gpu decode $(ARGS)

FOR_THERE := --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
	--platform manylinux_2_28_x86_64 --platform manylinux_2_31_x86_64 \
	--platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -d $(WHEELS)

gpu-wheels: $(VENV)/installed-for-tests  ## Bring what a machine with its own torch may lack
	$(BIN)/python -m pip download $(FOR_THERE) -c constraints.txt llguidance msgpack pyzmq psutil

# Compiled here, for the card that is to come; MAX_JOBS bounds the compilers that run at a time. Without -P
# specserve/types.py would be taken for the library's.
GPU_ARCHITECTURES ?= 9.0a
comma := ,
locked = $(1)==$(shell sed -n 's/^$(1)==\([^ ]*\).*/\1/p' locks/$(2).txt)

gpu-kernels: $(VENV)/installed-for-tests $(KERNELS)/installed  ## Compile FlashInfer's kernels for such a machine: GPU_ARCHITECTURES="9.0a"
	$(KERNELS)/bin/python -P specserve/flashinfer_kernels.py --architectures "$(GPU_ARCHITECTURES)" --out $(KERNELS)/compiled $(ARGS)
	rm -rf $(KERNELS)/whole
	$(KERNELS)/bin/python -m pip download --no-deps -d $(KERNELS)/whole $(call locked,flashinfer-python,flashinfer)
	$(BIN)/python -m tests.gpu.flashinfer_wheel $(KERNELS)/whole/flashinfer_python-*.whl $(KERNELS)/compiled $(WHEELS)
	$(BIN)/python -m pip download $(FOR_THERE) $(call locked,apache-tvm-ffi,flashinfer) $(call locked,nvidia-ml-py,flashinfer)

# Nothing is downloaded here.
$(WHEELS)/site:
	mkdir -p $@
	if ls $(WHEELS)/*.whl >/dev/null 2>&1; then \
		$(GPU_PYTHON) -m pip install -q --no-index --no-deps --target $@ $(WHEELS)/*.whl; fi

format: $(VENV)/installed-for-tests  ## Format the code and apply the linter's safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lint: $(VENV)/installed-for-tests  ## Check formatting and lint rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

check: lint  ## Lint, check types strictly and check the import rules
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# Built from the contents of the sdist, so that a stale build/ is never included, by the setuptools of
# locks/tools.txt.
dist: $(BUILDER)/installed $(VENV)/installed  ## Build wheel, sdist and bill of materials into dist/
	rm -rf dist build
	$(BUILDER)/bin/python -m build --no-isolation --outdir dist $(ARGS)
	$(BIN)/python -m locks.sbom --out dist

image:  ## Build the image of a server: IMAGE=specserve TORCH=cpu, or TORCH=cuda for GPUs; IMAGE_FILE=deploy/Dockerfile for clusters
	@test -n "$(CONTAINERS)" || { echo "make image needs docker or podman, and neither is here" >&2; exit 1; }
	@$(CONTAINERS) info >/dev/null 2>&1 || { echo "make image: $(notdir $(CONTAINERS)) does not answer; is its daemon running?" >&2; exit 1; }
	$(CONTAINERS) pull $(BASE)
	base=$$($(CONTAINERS) image inspect --format '{{index .RepoDigests 0}}' $(BASE)) && \
	$(CONTAINERS) build -f $(IMAGE_FILE) -t $(IMAGE) --build-arg BASE=$$base --label org.opencontainers.image.base.name=$$base \
		--build-arg TORCH=$(TORCH) --build-arg TORCH_INDEX=$(TORCH_INDEX) $(ARGS) .

sbom: $(VENV)/installed  ## Write the bill of materials of a server into dist/
	$(BIN)/python -m locks.sbom $(ARGS)

# torch's builds without CUDA are in no package index: a new torch needs CPU_WHEELS, a folder of them.
lock: $(BUILDER)/installed  ## Write the locks with hashes after a change of dependencies
	$(BUILDER)/bin/python -m locks.write $(if $(CPU_WHEELS),--cpu-wheels $(CPU_WHEELS)) $(ARGS)

audit: $(BUILDER)/installed  ## Look for known vulnerabilities of what a server needs
	$(BUILDER)/bin/python -m locks.audit $(ARGS)

# Uses the installed dependencies, without network: doctor, generate, serve and a request.
test-wheel: $(VENV)/installed-for-tests  ## Try the wheel from an empty folder
	$(BIN)/python -m tests.support.wheel --borrow $(ARGS)

wheel-times: $(VENV)/installed-for-tests  ## Time the same steps in a fresh environment
	$(BIN)/python -m tests.support.wheel $(ARGS)

bench: bench-engine bench-pipeline  ## Measure the engine and the pipeline

bench-engine: $(VENV)/installed  ## Measure the engine in one process against transformers
	$(BIN)/python -m lab.bench.engine --out $(MEASURED)/engine-speed.md $(ARGS)

bench-serving: $(VENV)/installed  ## Measure the links between processes and the HTTP server
	$(BIN)/python -m lab.bench.link --out $(MEASURED)/link-speed.md
	$(BIN)/python -m lab.bench.serving --out $(MEASURED)/serving-speed.md $(ARGS)

bench-pipeline: $(VENV)/installed  ## Measure drafting behind verification
	$(BIN)/python -m lab.bench.pipeline --out $(MEASURED)/pipeline-speed.md \
		--trace docs/trace.json --greedy-trace docs/trace-greedy.json --plot $(MEASURED)/pacer.svg $(ARGS)
	for name in trace trace-greedy; do \
		$(BIN)/python -m specserve.tools.timeline docs/$$name.json --rounds 10 --out $(MEASURED)/$$name.svg && \
		rm docs/$$name.json || exit 1; done

bench-linears: $(VENV)/installed  ## Measure the kernels of linear layers
	$(BIN)/python -m lab.bench.linears --out $(MEASURED)/linears.md $(ARGS)

bench-quantized: $(VENV)/installed  ## Measure targets and drafts in INT8 and INT4 beside bf16
	$(BIN)/python -m lab.bench.quantized --out $(MEASURED)/quantized.md $(ARGS)

bench-adapters: $(VENV)/installed-for-tests  ## Measure a target with adapters that requests name, or do not
	$(BIN)/python -m lab.bench.adapters --out $(MEASURED)/adapters.md $(ARGS)

bench-placements: $(VENV)/installed-for-tests  ## Measure the draft apart and together with its target
	$(BIN)/python -m lab.bench.placements --out $(MEASURED)/placements.md $(ARGS)

simulate-autoscaling: $(VENV)/installed-for-tests  ## Simulate an hour of autoscaling by first tokens and by requests
	$(BIN)/python -m lab.bench.autoscaling --out $(MEASURED)/autoscaling.md $(ARGS)

simulate-fleet: $(VENV)/installed  ## Simulate fleets of 1,000 and 10,000 GPUs, and time the scheduler at their size
	$(BIN)/python -m lab.bench.fleet --out $(MEASURED)/fleet.md $(ARGS)

bench-pool: $(VENV)/installed-for-tests  ## Measure one draft for several engines beside a draft each
	$(BIN)/python -m lab.bench.pools --out $(MEASURED)/pools.md $(ARGS)

bench-routing: $(VENV)/installed-for-tests  ## Measure routing by prefixes between engines
	$(BIN)/python -m lab.bench.routing --out $(MEASURED)/routing.md $(ARGS)

bench-neighbours: $(VENV)/installed-for-tests  ## Measure passes beside processes that use a core now and then
	$(BIN)/python -m lab.bench.neighbours --out $(MEASURED)/neighbours.md $(ARGS)

bench-pacer: $(VENV)/installed-for-tests  ## Measure the pacer beside fixed gammas
	$(BIN)/python -m lab.bench.pacer --out $(MEASURED)/pacer.md $(ARGS)
	$(BIN)/python -m lab.bench.first_token --out $(MEASURED)/first-token.md
	$(BIN)/python -m lab.bench.acceptance_by_position --out $(MEASURED)/acceptance-by-position.md

bench-demo: $(VENV)/installed-for-tests  ## Measure the race on the demo pair
	$(BIN)/python -m lab.bench.demo_race --out $(MEASURED)/demo-race.md $(ARGS)

first-minutes: $(VENV)/installed-for-tests  ## Run the quick start in a fresh environment and time it
	$(BIN)/python -m lab.bench.first_minutes --out $(MEASURED)/first-minutes.md $(ARGS)

bench-drafters: $(VENV)/installed  ## Measure every kind of drafter
	$(BIN)/python -m lab.bench.drafters --out $(MEASURED)/drafters.md $(ARGS)

# The report names engines that could not be installed, and the reason.
bench-peers: $(VENV)/installed  ## Measure other engines beside specserve
	-$(MAKE) $(PEERS)/installed
	-$(MAKE) $(VLLM)/installed
	-$(MAKE) $(LLAMA)/installed
	$(BIN)/python -m lab.bench.peers --out $(MEASURED)/peers-speed.md $(ARGS)
	$(BIN)/python -m lab.bench.peers.summary $(MEASURED)/peers-speed.json --out $(MEASURED)/comparison.svg

# Ray Serve LLM takes requests in vLLM's classes, and refuses to be imported without them.
ray-llm: $(RAY_LLM)/installed  ## Test the engine behind Ray Serve LLM, behind its router and by direct streaming
	$(RAY_LLM)/bin/python -m pytest -W default -m long tests/ray_llm $(ARGS)
	RAY_SERVE_ENABLE_HA_PROXY=1 RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING=1 \
		$(RAY_LLM)/bin/python -m pytest -W default -m long tests/ray_llm $(ARGS)

bench-ray-llm: $(RAY_LLM)/installed  ## Measure the engine beside vLLM's, both behind Ray Serve LLM
	$(RAY_LLM)/bin/python -m lab.bench.ray_llm --out $(MEASURED)/ray-llm.md $(ARGS)

# Each client is installed into an environment of its own below $(CONFORMANCE), once.
conformance: $(VENV)/installed-for-tests  ## Try clients of other projects on real servers
	$(BIN)/python -m tests.conformance --out $(MEASURED)/conformance.md $(ARGS)

families: $(VENV)/installed-for-tests  ## Try what works for each family of models
	$(BIN)/python -m tests.families --out $(MEASURED)/families.md $(ARGS)

proofs: $(VENV)/installed-for-tests  ## Sample continuations and compare them with the exact distribution
	$(BIN)/python -m tests.proofs.distribution --out $(MEASURED)/proofs.md $(ARGS)

structured: $(VENV)/installed-for-tests  ## Measure structured output
	$(BIN)/python -m lab.bench.structured $(ARGS)

fuzz: $(VENV)/installed-for-tests  ## Send damaged input of every kind: frames, requests, grammars, files, checkpoints
	$(BIN)/python -m tests.chaos.fuzz $(ARGS)

chaos: $(VENV)/installed-for-tests  ## Kill every role of a server under load
	$(BIN)/python -m tests.chaos.table $(ARGS)

chaos-gateways: $(VENV)/installed-for-tests  ## Kill, stop and cut off gateways of a server under load
	$(BIN)/python -m tests.chaos.gateways $(ARGS)

chaos-network: $(VENV)/installed-for-tests  ## Break every link of a server under load
	$(BIN)/python -m tests.chaos.network $(ARGS)

chaos-releases: $(VENV)/installed-for-tests  ## Update a server under load from one release to another and back
	$(BIN)/python -m tests.chaos.releases $(ARGS)

overload: $(VENV)/installed-for-tests  ## Send five times the load that the server can take
	$(BIN)/python -m tests.chaos.overload $(ARGS)

misuse: $(VENV)/installed-for-tests  ## Misuse a server in six ways beside clients that behave
	$(BIN)/python -m tests.chaos.misuse $(ARGS)

survey: $(VENV)/installed-for-tests  ## Print size, names and language of the tree in numbers
	$(BIN)/python -m tests.support.survey $(ARGS)

# Strict: a broken link fails. The tests check links, names and commands without the site generator.
docs: $(VENV)/installed-for-docs  ## Build the site into site/; ARGS=serve shows it while you write
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs $(or $(ARGS),build --clean --strict)

# A stamp that is older than its files triggers a new installation.
$(VENV)/installed: $(PINNED)
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(TORCH_FROM) -c constraints.txt -e '.[cpu]'
	touch $@

$(VENV)/installed-for-tests: $(PINNED)
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(TORCH_FROM) -c constraints.txt -e '.[cpu,test]'
	touch $(VENV)/installed $@

$(VENV)/installed-for-browser: $(VENV)/installed-for-tests
	$(BIN)/python -m pip install $(TORCH_FROM) -c constraints.txt -e '.[cpu,test,browser]'
	touch $@

$(BUILDER)/installed: locks/tools.txt
	$(PYTHON) -m venv $(BUILDER)
	$(BUILDER)/bin/python -m pip install --require-hashes --only-binary :all: -r locks/tools.txt
	touch $@

$(KERNELS)/installed: locks/flashinfer.txt locks/nvcc.txt
	$(PYTHON) -m venv $(KERNELS)
	$(KERNELS)/bin/python -m pip install $(TORCH_FROM) -c constraints.txt torch numpy \
		$(call locked,flashinfer-python,flashinfer) $(subst toolkit,toolkit[cccl$(comma)curand$(comma)nvcc],$(call locked,cuda-toolkit,torch-cuda))
	touch $@

$(VENV)/installed-for-docs: $(PINNED)
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(TORCH_FROM) -c constraints.txt -e '.[cpu,docs]'
	touch $(VENV)/installed $@

# The converter depends on torchvision but works without it; its build may not fit the pinned torch.
$(PEERS)/installed: $(PEERS_PINNED)
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --log $(PEERS)/install.log -r $(PEERS_PINNED)
	$(PEERS)/bin/python -m pip uninstall --yes torchvision
	touch $@

# Its media packages do not fit its torch either.
$(VLLM)/installed: $(VLLM_PINNED)
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --log $(VLLM)/install.log -r $(VLLM_PINNED)
	$(VLLM)/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
	touch $@

# vLLM comes first, since its own range of llguidance is older than ours.
$(RAY_LLM)/installed: $(VLLM_PINNED) $(PINNED)
	$(PYTHON) -m venv $(RAY_LLM)
	$(RAY_LLM)/bin/python -m pip install -r $(VLLM_PINNED)
	$(RAY_LLM)/bin/python -m pip install -e '.[cpu,ray-llm]' openai psutil pytest pytest-timeout
	$(RAY_LLM)/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
	touch $@

# Compiles llama.cpp for this processor: a quarter of an hour on two cores.
$(LLAMA)/installed: $(LLAMA_PINNED)
	$(PYTHON) -m venv $(LLAMA)
	CMAKE_ARGS="$(LLAMA_BUILD)" LLAMA_CPP_BUILD_JOBS=$$(nproc) $(LLAMA)/bin/python -m pip install \
		--log $(LLAMA)/install.log -r $(LLAMA_PINNED)
	touch $@

clean:  ## Remove environments, builds and caches
	rm -rf $(VENV) $(BUILDER) $(PEERS) $(VLLM) $(RAY_LLM) $(LLAMA) $(KERNELS) $(CONFORMANCE) build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
