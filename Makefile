PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.tandem

.PHONY: help setup run one fmt lint type check test gate chance mutations e2e e2e-prepare e2e-full slurm gpu \
	cluster soak soak-operator soak-strangers generate picture images clean index \
	bench bench-scale bench-short-jobs bench-recovery bench-checkpoint bench-bucket bench-operator bench-strategies \
	bench-fine-tuning bench-queue bench-sweep bench-save-interval bench-mirrors bench-corruption bench-swap
.DEFAULT_GOAL := help

help: ## Show this help
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# uv resolves in a second and hard-links what is already on the disk; it is installed into the environment itself.
$(STAMP): pyproject.toml constraints.txt
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	@test -x $(BIN)/uv || $(BIN)/python -m pip install -q -c constraints.txt uv
	@# The distribution is called tandem-training. One that is called tandem is another one, with modules of the same name.
	@$(BIN)/uv pip uninstall -q --python $(BIN)/python tandem 2>/dev/null || true
	@$(BIN)/uv pip install -q --python $(BIN)/python $(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS)) \
		-c constraints.txt -e '.[dev]'
	@# Where Python may not write bytecode, each start would compile torch again: 7 s instead of 3. What some packages
	@# ship for other versions of Python does not compile, and that is fine.
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@

setup: $(STAMP) ## Make .venv with everything in it

run: $(STAMP) ## Train and evaluate real digits on this machine, then write a report
	@$(BIN)/tandem run examples/digits.yaml --fresh
	@$(BIN)/tandem report runs/digits
	@echo; echo "To have the tandem command in this terminal:  . $(VENV)/bin/activate"

one: $(STAMP) ## One test, or several, of any tier that needs no cluster: make one T=tests/unit/core/test_retention.py
	@test -n "$(T)" || { echo 'make one: which? make one T=tests/unit/core/test_manifest.py, or T="tests/unit -k retention"'; exit 2; }
	@$(BIN)/pytest -m "full or not full" $(T)

fmt: $(STAMP) ## Format the code
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

lint: $(STAMP) ## Style, import rules
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports --no-cache

type: $(STAMP) ## Strict types
	@$(BIN)/mypy

# Each worker takes whole files: what a file shares is made once. Tests of processes mostly wait, so a third one fits in.
PYTEST := $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

check: $(STAMP) ## Style, types and unit tests: after each change (3 min)
	@began=$$(date +%s); $(MAKE) --no-print-directory lint type && $(PYTEST) --tier=check --began=$$began tests/unit

test: check ## All that needs no cluster, with real processes: before each commit (11 min)
	@$(PYTEST) -n 3 --tier=test -m "not full and not gate" tests/integration

gate: $(STAMP) ## What a change has to pass to land: of every tier the tests that it reaches (ARGS="--since COMMIT" or --all)
	@$(BIN)/python -m tests.gate $(ARGS)

chance: $(STAMP) ## Run tests again and again beside other work, and say which fail by chance (ARGS="--times 20 --beside 2 tests/…")
	@$(BIN)/python -m tests.support.chance $(ARGS)

e2e: $(STAMP) ## Tests on a real Kubernetes: the one in KUBECONFIG, or one started here (root, Go; 12 min, 15 more the first time)
	@$(BIN)/python -m tests.cluster $(ARGS)

e2e-prepare: $(STAMP) ## Compile and build what e2e needs, before it is needed
	@$(BIN)/python -m tests.cluster --prepare

e2e-full: $(STAMP) ## Everything that no other tier runs: lost nodes, rivals, all faults, a soak (ARGS=--touched: what changes touch)
	@$(BIN)/python -m tests.full $(ARGS)

slurm: $(STAMP) ## Tests on a real SLURM, started here from Debian's packages (root, Debian; 4 min)
	@$(PYTEST) --tier=slurm tests/slurm

gpu: $(STAMP) ## Tests on a GPU: NCCL, float16, NVML, compile, saves; where there is none, it says that all were skipped
	@$(BIN)/pytest tests/gpu

mutations: $(STAMP) ## Weaken each rule against wrong results in a copy, and see whether a test fails (20 min; ARGS=NAME)
	@$(BIN)/python -m tests.support.mutations $(ARGS)

# Where one of them ends with 1 a goal is missed, with 3 one could not be judged; make itself then ends with 2.
bench: $(STAMP) ## Throughput beside a bare DDP loop, with and without evaluators (two idle cores; ARGS="--rounds 9 --only loop")
	@$(BIN)/python -m benchmarks.throughput $(ARGS)

bench-scale: $(STAMP) ## One coordinator under 1,000 and 10,000 simulated agents (ARGS="--agents 1000 --seconds 20")
	@$(BIN)/python -m benchmarks.scale $(ARGS)

bench-short-jobs: $(STAMP) ## Thousands of short jobs, some of which lose their coordinator, and whether each ends (ARGS="--jobs 200 --ranks real --beside 2")
	@$(BIN)/python -m benchmarks.short_jobs $(ARGS)

bench-recovery: $(STAMP) ## Recovery from faults beside plain torchrun (root; ARGS="--only all --rounds 5")
	@$(BIN)/python -m benchmarks.recovery $(ARGS)

bench-bucket: $(STAMP) ## Upload and download of a checkpoint beside plain requests (two idle cores and Go; ARGS="--rounds 5")
	@$(BIN)/python -m benchmarks.bucket $(ARGS)

bench-checkpoint: $(STAMP) ## Cost of a save beside torch.save, dcp, accelerate (two idle cores; ARGS="--rounds 5")
	@$(BIN)/python -m benchmarks.checkpoint $(ARGS); saving=$$?; \
		$(BIN)/python -m benchmarks.checkpoint.loading; loading=$$?; \
		$(BIN)/python -m benchmarks.checkpoint.restoring && exit $$((saving + loading))

bench-strategies: $(STAMP) ## Memory and speed of ddp and fsdp beside torch alone and accelerate, bubbles of pipelines (two idle cores; ARGS="--only memory")
	@$(BIN)/python -m benchmarks.strategies $(ARGS)

bench-fine-tuning: $(STAMP) ## Fine-tuning beside TRL's SFTTrainer and a plain loop (two idle cores; ARGS="--only packed kill --rounds 6")
	@$(BIN)/python -m benchmarks.fine_tuning $(ARGS)

bench-queue: $(STAMP) ## A week of a GPU queue in simulated time, elastic beside all or none (ARGS="--seeds 20 --load 1.3"; a minute)
	@$(BIN)/python -m benchmarks.queue_play $(ARGS)

bench-sweep: $(STAMP) ## Worker hours of a sweep with and without a pruner (two idle cores; ARGS="--trials 20 --seeds 0")
	@$(BIN)/python -m benchmarks.sweep $(ARGS)

bench-save-interval: $(STAMP) ## checkpoint.every: Auto beside the best interval, over failures in simulated time (ARGS="--seed 100 --traces 40"; half a minute)
	@$(BIN)/python -m benchmarks.save_interval $(ARGS)

bench-mirrors: $(STAMP) ## Cost of elasticity.mirror, and the work that a killed rank costs with it (two idle cores; ARGS="--only work --kills 9")
	@$(BIN)/python -m benchmarks.mirrors $(ARGS)

bench-corruption: $(STAMP) ## Wrong numbers that are planted, whether each is named, and false alarms (ARGS="--steps 100000 --only memory"; 5 minutes)
	@$(BIN)/python -m benchmarks.corruption $(ARGS)

bench-swap: $(STAMP) ## The weights of the next checkpoint in a warm evaluator beside a new process (ARGS="--rounds 5 --only '0.7 GB'")
	@$(BIN)/python -m benchmarks.swap $(ARGS)

bench-operator: $(STAMP) ## The operator under 1,000 jobs, and what it does when pods die (a cluster; ARGS="--only scale --jobs 1000")
	@$(BIN)/python -m benchmarks.operators $(ARGS)

cluster: $(STAMP) ## A Kubernetes of two nodes on this machine, by hand (ARGS="down | env | kill-node node-1 | …")
	@$(BIN)/python -m tests.support.cluster.machine $(or $(ARGS),up)

soak: $(STAMP) ## Random faults against one job, everything checked after each; random examples (root; SECONDS=600 SEED=1)
	@$(PYTEST) --tier=random -m property --hypothesis-profile=random tests/unit
	@$(BIN)/python -m tests.soak --seconds $(or $(SECONDS),600) --seed $(or $(SEED),1) $(ARGS)

soak-operator: $(STAMP) ## Hostile objects into an operator, each measured in time and memory (ARGS="--objects 10000 --seed 1"; some minutes)
	@$(BIN)/python -m tests.soak.hostile $(ARGS)

soak-strangers: $(STAMP) ## A client without a token against each server: longest /healthz and memory (ARGS="--only gzip silent"; 4 min)
	@$(BIN)/python -m tests.soak.strangers $(ARGS)

picture: $(STAMP) ## Take the pictures of README and the live page anew, and of both pages into runs/pictures (quiet cores, Chromium)
	@$(BIN)/python -m tests.support.picture
	@$(BIN)/python -m tests.support.page_pictures

index: $(STAMP) ## Ask the package index whether the distribution's name is free or ours (a person reads the answer)
	@$(BIN)/pip index versions $$($(BIN)/python -c 'from tandem.processes.distribution import NAME; print(NAME)') || true

generate: $(STAMP) ## Write the CRD, the JSON schema and the reference pages from the models, and the chart's pages
	@$(BIN)/python -m tools

# Not $(STAMP): whoever builds images needs a builder and Python, and no torch on this machine.
images: ## Build the images with Docker or buildah (TAG= REGISTRY=host/team/ TORCH_INDEX= PLATFORMS= PUSH=1; docs/images.md)
	@$(PYTHON) images/build.py $(foreach name,TAG REGISTRY BASE_IMAGE TORCH_INDEX CPU_ONLY PLATFORMS PIP_CONF SOURCE PUSH, \
		$(if $($(name)),--$(subst _,-,$(shell echo $(name) | tr A-Z a-z))=$($(name))))

clean: ## Remove the environment and the runs
	@rm -rf $(VENV) runs
