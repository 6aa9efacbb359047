# Everything a newcomer types. Each target makes .venv first when it has to, and fails when its work fails.
SHELL := bash
PY := .venv/bin/python
export PYTHON
.DEFAULT_GOAL := help
.PHONY: help setup quickstart demo-sft recipe-tiny recipe-135m demo-rl demo-rl-seeds demo-code demo-code-seeds demo-complexity-judge demo-search \
	demo-search-seeds test test-serve test-slurm test-recipe lint plan-check \
	verify verify-conversion verify-swap verify-judge test-256k bench-train bench-rl bench-engine bench-judge \
	bench-complexity bench-search bench-walk bench-agent bench-data bench-kernels mutate-kernels gpu-check

help:  ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## make .venv and install (PYTHON=... names the interpreter)
	@tools/setup_venv.sh

quickstart: setup  ## the whole recipe with a small model on the CPU, from synthesis to report page and export; 25 minutes
	$(PY) tools/recipe_tiny.py --seed 1

demo-sft: setup  ## fine-tune SmolLM2-135M on tool calls over two ranks, export it, ask it before and after; 5 minutes
	$(PY) tools/demo_sft.py

recipe-tiny: setup  ## the quickstart in three seeds, with the standard error over them; SEED= only that one
	$(PY) tools/recipe_tiny.py $(if $(SEED),--seed $(SEED),--seeds 3)

recipe-135m: setup  ## the same with SmolLM2-135M, as far as MINUTES= reach; the same command goes on
	$(PY) tools/recipe_tiny.py --model smollm2 $(if $(MINUTES),--minutes $(MINUTES))

demo-rl: setup  ## a small model, two reward models and both RL stages on the CPU, judged by held-out reward models; 15 minutes
	$(PY) tools/demo_rl.py $(if $(SEED),--seed $(SEED))

demo-rl-seeds: setup  ## the same over three seeds, with the standard error over them
	$(PY) tools/demo_rl.py --seeds 3

demo-code: setup  ## a small model learns from the sandbox: first to pass tests, then to be fast; 20 minutes
	$(PY) tools/demo_code.py $(if $(SEED),--seed $(SEED))

demo-code-seeds: setup  ## the same over three seeds, with the standard error over them
	$(PY) tools/demo_code.py --seed 2 --seeds 3

demo-complexity-judge: setup  ## a small model learns to name the time complexity of programs it has not seen; 5 minutes
	$(PY) tools/demo_complexity_judge.py $(if $(SEED),--seed $(SEED))

demo-search: setup  ## deep search from wiki to RL on the CPU: a small model learns to find answers; 20 minutes
	$(PY) tools/demo_search.py $(if $(SEED),--seed $(SEED))

demo-search-seeds: setup  ## the same over three seeds, with the standard error over them
	$(PY) tools/demo_search.py --seeds 3

test: setup  ## all tests that need no GPU; prints what was skipped and why
	OMP_NUM_THREADS=1 $(PY) -m pytest -m "not slow and not slurm" -n 2 --dist loadfile --durations=10

test-slurm: setup  ## stages, chains and disasters on a real Slurm of four virtual nodes; as root, minutes; K= some of them
	OMP_NUM_THREADS=1 $(PY) -m pytest -m slurm tests/slurm $(if $(K),-k "$(K)") --durations=10

test-recipe: setup  ## the whole recipe in miniature, killed at ten random moments: the same weights in the end; minutes
	OMP_NUM_THREADS=1 $(PY) -m pytest -s -m slow tests/jobs/test_cascade_kill.py

test-serve: setup  ## the server engine against a real vLLM on the CPU; its own Python 3.11 environment, 3.5 GB
	@tools/serve_venv.sh
	OMP_NUM_THREADS=1 $(PY) -m pytest -m serve tests/serve

lint: setup  ## style of every Python file
	$(PY) -m ruff check .

verify: setup  ## every topology against one process; JSON= writes the table to a file
	OMP_NUM_THREADS=1 $(PY) tools/verify_matrix.py $(if $(JSON),--json $(JSON))

verify-swap: setup  ## pair-wise reward models with and without swap consistency, DATA= preference pairs; 10 minutes
	OMP_NUM_THREADS=1 $(PY) tools/verify_swap.py --data $(DATA)

verify-judge: setup  ## HumanEval and MBPP solutions through the judge, whole and with one operator changed; DATA= their folder
	OMP_NUM_THREADS=1 $(PY) tools/verify_judge.py --data $(DATA)

test-256k: setup  ## one real step at 262144 tokens on four ranks; minutes
	OMP_NUM_THREADS=1 $(PY) tools/verify_256k.py

bench-train: setup  ## tokens per second beside TRL's SFTTrainer
	$(PY) tools/bench_train.py

bench-rl: setup  ## seconds per GRPO step beside TRL's GRPOTrainer
	$(PY) tools/bench_rl.py

bench-engine: setup  ## rollout tokens per second beside transformers, and weight sync beside a raw exchange
	$(PY) tools/bench_engine.py

bench-judge: setup  ## tests per second in full isolation, beside one bubblewrap per test; PEER= a clone of LiveCodeBench
	OMP_NUM_THREADS=1 $(PY) tools/bench_judge.py $(if $(PEER),--peer $(PEER))

bench-complexity: setup  ## how often the empirical time complexity is right, beside a busy core
	OMP_NUM_THREADS=1 $(PY) tools/bench_complexity.py

bench-search: setup  ## a wiki's index beside rank_bm25 and bm25s: documents and queries per second, recall; DATA= its folder
	OMP_NUM_THREADS=1 $(PY) tools/bench_search.py $(if $(DATA),--data $(DATA))

bench-walk: setup  ## steps of random walks per second on a graph of a million links
	OMP_NUM_THREADS=1 $(PY) tools/bench_walk.py

bench-agent: setup  ## bookkeeping of an episode of 600 turns, beside a loop that renders its history every turn
	OMP_NUM_THREADS=1 $(PY) tools/bench_agent.py

bench-data: setup  ## packing, and tokenising beside datasets.map
	OMP_NUM_THREADS=1 $(PY) tools/bench_data.py

bench-kernels: setup  ## memory and time of every kernel beside its peers, on the CPU or on the GPU at hand
	$(PY) kernels/bench.py

mutate-kernels: setup  ## break every kernel on purpose, one change at a time: the tests must notice each; minutes
	OMP_NUM_THREADS=1 $(PY) -m tests.kernels.mutate

gpu-check: setup  ## kernels and back ends on a GPU machine
	$(PY) tools/check_backends.py
	$(PY) kernels/gpu_check.py

plan-check: setup  ## the planner's step times beside published ones
	$(PY) tools/plan_published.py

verify-conversion: setup  ## the full 3.93B shape from Hugging Face and back, bit for bit; 24 GB of disk, minutes
	$(PY) tools/verify_conversion.py
