# SPDX-License-Identifier: Apache-2.0
# The front door: `make demo` and `make test` do all their own set-up, in .venv and build/ only.
# Meson (meson.build) is the build; this file only calls it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check -q
RELEASE := build/release
SOURCES := $(shell find src include python cli man meson.build meson_options.txt pyproject.toml \
	README.md -type f -not -name '*.pyc' 2>/dev/null)
SECONDS_FUZZ := $(or $(SECONDS),60)

.PHONY: all demo test unittest lint install install-test dist bench fuzz coverage soak gpu-check valgrind sanitize-python test-aarch64 clean help

all: $(RELEASE)/build.ninja
	@$(BIN)/ninja -C $(RELEASE)

help:
	@echo "make demo | test | lint | install [PREFIX=DIR] | install-test | dist | bench | fuzz | coverage | soak | gpu-check"

# ---- set-up, each step once ----

$(VENV)/.build-ready: tools/requirements-build.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV): build tools"
	@$(PIP) install -r tools/requirements-build.txt
	@touch $@

$(VENV)/.test-ready: tools/requirements-test.txt $(VENV)/.build-ready
	@echo "setting up $(VENV): test tools"
	@$(PIP) install -r tools/requirements-test.txt
	@touch $@

$(RELEASE)/build.ninja: $(VENV)/.build-ready
	@mkdir -p build
	@$(BIN)/meson setup $(RELEASE) > build/setup.log 2>&1 || { cat build/setup.log; exit 1; }

# The package, built from the sources as they are now.
$(VENV)/.package-ready: $(VENV)/.build-ready $(SOURCES)
	@echo "building the Python package"
	@$(PIP) install --no-build-isolation --no-deps --force-reinstall .
	@touch $@

# ---- what people ask for ----

demo: all $(VENV)/.test-ready $(VENV)/.package-ready
	@$(BIN)/python tools/demo.py

test unittest: $(VENV)/.test-ready $(VENV)/.package-ready
	@$(BIN)/python tools/run_tests.py $(if $(SANITIZE),--sanitize --tsan)

# Python tests with the extension under the sanitizers.
sanitize-python: $(VENV)/.test-ready
	@$(BIN)/python tools/sanitize_python.py $(TESTS)

# Some of the C tests under valgrind, which must be installed.
valgrind: $(VENV)/.build-ready
	@$(BIN)/python tools/run_tests.py --valgrind

lint: $(VENV)/.test-ready $(VENV)/.package-ready
	@$(BIN)/python tools/run_tests.py --only lint

# With PREFIX: library, command, headers, pkg-config file and man pages under it.
# Without: the Python package into the active environment.
ifdef PREFIX
install: $(VENV)/.build-ready
	@mkdir -p build
	@$(BIN)/meson setup build/install --wipe --prefix "$(abspath $(PREFIX))" -Dtests=false > build/install-setup.log 2>&1 \
		|| $(BIN)/meson setup build/install --prefix "$(abspath $(PREFIX))" -Dtests=false > build/install-setup.log 2>&1 \
		|| { cat build/install-setup.log; exit 1; }
	@$(BIN)/meson install -C build/install
else
install:
	$(PYTHON) -m pip install .
endif

# The package and what its tests need, into the active environment; no GPU or torch headers.
install-test:
	$(PYTHON) -m pip install . -r tools/requirements-test.txt

dist: $(VENV)/.test-ready
	@$(BIN)/python -m build --no-isolation --skip-dependency-check --outdir dist .
	@$(BIN)/python -m wheel tags --remove --python-tag cp310 dist/*-linux_*.whl > /dev/null
	@PATH="$(BIN):$$PATH" $(BIN)/auditwheel repair --plat auto --wheel-dir dist dist/*-linux_*.whl > build/auditwheel.log 2>&1
	@rm -f dist/*-cp310-abi3-linux_*.whl
	@ls -l dist

bench: all $(VENV)/.test-ready $(VENV)/.package-ready
	@$(BIN)/python -m fastsafetensors.bench$(if $(SAVE),_save,$(if $(LAYERS),_layers)) $(BENCH_ARGS)

fuzz: $(VENV)/.build-ready
	@$(BIN)/python tools/run_fuzzers.py --seconds $(SECONDS_FUZZ)

# Lines and branches of src/ that the C tests reach; the report goes to build/coverage.
coverage: $(VENV)/.build-ready
	@$(PIP) install gcovr
	@$(BIN)/python tools/measure_coverage.py

# Thousands of loads and saves in one process: memory and descriptors stay level.
soak: $(VENV)/.test-ready $(VENV)/.package-ready
	@$(BIN)/python tools/soak.py $(SOAK_ARGS)

# The GPU's suite and benchmark on a machine that has one, without network; reports go to OUT
# (build/gpu-check). What can be built is built first; where nothing can, what is built is used.
gpu-check:
	@if test -x $(BIN)/meson || test ! -x $(RELEASE)/cli/fastsafetensors; then $(MAKE) -s all; fi
	@$(PYTHON) tools/gpu_check.py --build $(RELEASE) $(if $(OUT),--out "$(OUT)") $(GPU_ARGS)

# The C tests cross-built for aarch64 and run under qemu; skipped by name without the tools.
test-aarch64: $(VENV)/.build-ready
	@$(BIN)/python tools/test_aarch64.py

clean:
	rm -rf build dist $(VENV)
