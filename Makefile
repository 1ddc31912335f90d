# Every verb does the whole set-up first (.ci/setup: once per set of pins), then runs one Python program.
# ARGS is pasted into the command line as you wrote it: Hydra overrides, quoted as in a shell.
# PROMPT and RUNS never touch a shell: they travel in the environment, with every quote, dollar and newline in place.

.DEFAULT_GOAL := help
.PHONY: help install distill collect train evaluate plan generate publish publish-data check-drafter certify \
	certify-long bench bench-drafters bench-curve bench-peers compare engines sweep search price test check

# On few cores OpenMP's busy waiting makes two processes stall each other tenfold; these act before torch is loaded.
export GOMP_SPINCOUNT ?= 0
export OMP_WAIT_POLICY ?= passive
export TOKENIZERS_PARALLELISM ?= false
export PYTHONUNBUFFERED ?= 1
# Packages are installed without bytecode (.ci/setup): where none may be written, every start would compile them anew,
# 7 s for torch and transformers. It goes below .venv, so that no source folder gets any.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX ?= $(CURDIR)/.venv/pycache

# make would expand them on their way into the environment: a "$(shell ...)" inside would run.
unexport ARGS PROMPT RUNS
MAKEOVERRIDES :=
ifeq ($(origin PROMPT),command line)
export DRAFTSMITH_PROMPT := $(value PROMPT)
endif
ifeq ($(origin RUNS),command line)
export DRAFTSMITH_RUNS := $(value RUNS)
endif

python := .venv/bin/python
# No globbing: bench.sets=[builtin,spec_bench] is a value, not a pattern.
run := @set -f; exec $(python) -m

help: ## list the verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo 'ARGS="key=value ..." overrides any setting; python -m <stage> --help lists them'

install: ## the set-up alone: .venv with pinned packages, torch first
	@.ci/setup

distill: install ## collect, train and evaluate a drafter, then report (ARGS="experiment=tiny target=org/name")
	$(run) conf distill $(value ARGS)

collect: install ## let the target write the training data
	$(run) data $(value ARGS)

train: install ## distill a drafter from a collected store
	$(run) train $(value ARGS)

evaluate: install ## acceptance, speed and losslessness of a drafter
	$(run) eval $(value ARGS)

plan: install ## what each kind of drafter would give on this machine, before training (ARGS="plan.kinds=[ngram,eagle3]")
	$(run) eval.plan $(value ARGS)

generate: install ## stream an answer with the drafter, accepted tokens marked (PROMPT="...")
	$(run) inference $(value ARGS)

publish: install ## build the hub folder, checked, with its model card (REPO=owner/name uploads it)
	$(run) eval.publish $(if $(filter command line,$(origin REPO)),push=true repo_id=$(value REPO)) $(value ARGS)

publish-data: install ## build a collected store's data set, with its card (REPO=owner/name uploads it)
	$(run) eval.publish_data $(if $(filter command line,$(origin REPO)),push=true repo_id=$(value REPO)) $(value ARGS)

check-drafter: install ## what an engine would load of a drafter folder, and whether it drafts as it was trained to
	$(run) eval.preflight $(value ARGS)

engines: install ## exported drafters run in transformers (and vLLM, llama.cpp: engines.vllm=true engines.llama_cpp=true) against our own loop
	$(run) eval.engines_run $(value ARGS)

bench: install ## measure what costs time on this machine
	$(run) eval.bench $(value ARGS)

bench-drafters: install ## every kind of drafter, same store and training time, in one table (ARGS="compare.kinds=[hydra,lm]")
	$(run) eval.bench_drafters $(value ARGS)

bench-curve: install ## acceptance against response tokens and training time, and how many tokens more would take
	$(run) eval.bench_curve $(value ARGS)

bench-peers: install ## drafters that other trainers made of the same store, steps and vocabulary, beside ours
	$(run) eval.bench_peers $(value ARGS)

search: install ## trainings on one store with settings that Optuna chooses (ARGS="'objective=choice(lk,e2e)' trials=20")
	$(run) train.search $(value ARGS)

compare: install ## finished runs side by side on one page (RUNS="runs/a runs/b runs/c")
	$(run) eval.compare_runs $(value ARGS)

sweep: install ## speed-up by temperature, draft length, batch and context, within a budget (ARGS="sweep.budget=30min")
	$(run) eval.sweep $(value ARGS)

price: install ## GPU-hours, disk and bytes moved, computed from the target's configuration (TARGET=org/name TOKENS=100000000)
	$(run) eval.price $(if $(filter command line,$(origin TARGET)),target=$(value TARGET)) \
		$(if $(filter command line,$(origin TOKENS)),data.response_tokens=$(value TOKENS)) $(value ARGS)

certify: install ## losslessness at length: drafters against the target alone, greedy and sampled, and planted faults
	$(run) eval.certify $(value ARGS)

certify-long: install ## the same over 100 prompts of 256 tokens
	$(run) eval.certify prompts=100 max_new_tokens=256 $(value ARGS)

test: check ## ruff, mypy and every test, the slow ones too
	$(run) pytest -q -n 2 --dist loadfile $(value ARGS)

check: install ## ruff and mypy
	@$(python) -m ruff check .
	@$(python) -m mypy
