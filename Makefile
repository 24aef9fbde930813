# Everything a person runs here. Each target creates the virtual environment it needs.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
EXTRAS := $(VENV)/.extras
SITE   := $(VENV)/.docs
TRITON := .venv-kernels
# One thread each: two processes share two cores.
PYTEST := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest --durations=10

.PHONY: demo test test-all test-rest test-slow test-federation test-cluster test-gpu test-kernels benchmark docs wheel pins check format clean

demo: $(READY)          ## the embedded demo: five methods, three seeds, a minute on two ARM cores
	rm -rf runs/demo
	$(BIN)/fedaux run recipes/demo.toml --out runs/demo

test: $(EXTRAS)         ## the quick tests, those of the extras included; at most four minutes on two cores
	$(PYTEST) -n 2 --dist worksteal

test-all: test test-rest ## everything that a CPU can test; at most 25 minutes on two cores

test-rest: $(EXTRAS)    ## what `make test` leaves out; three at a time on two cores, since federations wait
	$(PYTEST) -n 3 --dist worksteal -m '(slow or federation) and not gpu and not network'

test-slow: $(EXTRAS)    ## tests of more than some seconds
	$(PYTEST) -n 2 --dist worksteal -m 'slow and not gpu and not network and not federation'

test-federation: $(EXTRAS) ## federations of real processes on loopback: parity, faults, security, the deployment page
	$(PYTEST) -m federation

test-cluster: $(EXTRAS) ## runs of several processes that torchrun starts, one of which dies
	$(PYTEST) -m 'not gpu' tests/running/test_ranks.py

test-gpu: $(EXTRAS)     ## what needs a CUDA GPU: the fast ways equal the plain loop there
	$(PYTEST) -m gpu

test-kernels: $(TRITON)/.ready ## the kernels for GPUs without one, in Triton's interpreter; a quarter of an hour
	$(TRITON)/bin/python -m pytest -m 'kernels or not kernels' tests/fast/test_kernels.py tests/fast/test_depthwise.py

benchmark: $(EXTRAS)    ## a table of seconds and memory beside a plain loop; minutes on a CPU
	$(BIN)/python benchmarks/table.py

# Not --quiet: MkDocs would then count no warnings.
docs: $(SITE)           ## the site, offline: build/site/index.html; a warning or a broken link fails it
	$(BIN)/mkdocs build --strict

wheel: $(READY)          ## a wheel to install elsewhere: build/wheel/fedaux-*.whl
	$(BIN)/python -m pip wheel --disable-pip-version-check --quiet --no-deps --wheel-dir build/wheel .

pins: $(READY)          ## deploy/requirements*.txt, with hashes; needs uv and a package index
	$(BIN)/python deploy/pins.py

check: $(EXTRAS)        ## formatting, lint, strict types, size
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy examples
	$(BIN)/python .ci/size.py

format: $(EXTRAS)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(TRITON) runs build .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e .
	touch $@

$(EXTRAS): $(READY)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[dev,parquet,hdf5,encoders,text,privacy,dpsgd,onnx,pandas,flower,simulation]'
	touch $@

$(SITE): $(READY)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[docs]'
	touch $@

# Triton's interpreter does not go with NumPy 2.4.
$(TRITON)/.ready: pyproject.toml constraints.txt
	test -x $(TRITON)/bin/python || $(PYTHON) -m venv $(TRITON)
	grep -v '^numpy==' constraints.txt > $(TRITON)/constraints.txt
	$(TRITON)/bin/python -m pip install --disable-pip-version-check --quiet -c $(TRITON)/constraints.txt -e '.[dev]' 'triton==3.6.0' 'numpy<2.4'
	touch $@
