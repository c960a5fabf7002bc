# Two commands for a fresh machine: `make demo` and `make test`. Both make the virtual environment
# first, the demo with no more than it needs; it is completed anew when pyproject.toml changes.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# What an environment depends on.
SOURCES := pyproject.toml $(wildcard native/*.txt native/src/* native/include/*)

# The tests start many processes: the first that imports a module compiles it for all.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := install --quiet --disable-pip-version-check --no-compile

# Programs that build with ninja: under `make -j` it would look for job slots that make does not lend
# them, and say "ninja: error", though it then builds.
ALONE := MAKEFLAGS=

.PHONY: demo test test-full lint types modules native native-sanitized check check-full check-without-native \
    check-lowest check-more check-newest environments-and-more soak docs dist release-notes clean

demo: $(VENV)/.examples
	$(BIN)/python examples/demo.py

# What every change must pass. What takes longest comes first of what is done side by side.
test: $(VENV)/.installed
	$(MAKE) -j 2 modules types native lint
	$(MAKE) check

# What is slow and rare besides: other versions and systems, no native library, sanitizers, real time,
# chance. Installing waits for the disk, soaking for faults, Spark for Java: they go side by side.
test-full: check-full native-sanitized check-without-native
	$(MAKE) -j 2 soak environments-and-more
	$(MAKE) check-lowest check-newest

# One after the other: the native library is built in one folder for all.
environments-and-more:
	$(MAKE) $(LOWEST)/.installed
	$(MAKE) $(NEWEST)/.installed
	$(MAKE) check-more

lint: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run --Werror native/include/*.h native/src/*.[ch] native/tests/*.[ch]

types: $(VENV)/.installed
	$(BIN)/mypy

# What each process of the tests would else compile for itself when all begin: TensorFlow, and our loops.
modules: $(VENV)/.installed
	$(BIN)/python -c "from tests import forkserver; forkserver.preload()"

# The C library's own tests, plain, and under two sanitizers.
native: SANITIZERS := ""
native-sanitized: SANITIZERS := address thread
native native-sanitized: $(VENV)/.installed
	@export $(ALONE); if ! command -v cc > /dev/null; then echo "no C compiler: the C tests are skipped"; exit 0; fi; \
	for sanitizer in $(SANITIZERS); do \
	    $(BIN)/cmake -S native -B build/native$$sanitizer -G Ninja -DRINGREDUCE_TESTS=ON \
	        -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DRINGREDUCE_SANITIZE=$$sanitizer > /dev/null && \
	    $(BIN)/cmake --build build/native$$sanitizer && \
	    $(BIN)/ctest --test-dir build/native$$sanitizer --output-on-failure || exit 1; \
	done

# Many tests kill, stop and starve real processes, three tests at a time, since many wait; whole programs
# in real time two at a time, since they do not. What fails is run once more by itself; both runs are
# shown, since a race may pass the second time, and `make test-full` fails for those of which
# tests/run_again.txt has no cause. A JUnit file, if one is wanted, is another for each run.
PYTEST := $(ALONE) $(BIN)/python -m pytest
# A file's tests stay together: most share a ring that the first of them has started. Shared out by
# tests/scheduling.py.
SHARED_OUT := --dist loadfile --durations=10
AGAIN := --last-failed --last-failed-no-failures none
IF_LISTED := $(AGAIN) --listed tests/run_again.txt

# XLA compiles at once rather than well, and TensorFlow leaves the graphs of tests/programs that ask
# for it as they are; waits of faults pass in a fraction of their time.
GRAPHS := XLA_FLAGS=--xla_backend_optimization_level=0 KEEP_GRAPHS=1
QUICK := RINGREDUCE_TIME_SCALE=0.4 $(GRAPHS)

check: $(VENV)/.installed
	$(QUICK) $(PYTEST) -n 3 $(SHARED_OUT) -m "not full" || $(QUICK) $(PYTEST) -m "not full" $(AGAIN)

# Further sizes and combinations, other random examples, in real time, the last test first, each on ranks
# of its own; then of `check` the faults in real time too, and training whose graphs are optimized, all in
# fresh processes.
REAL := tests/communicator tests/transport tests/bootstrap/test_hellos.py \
    tests/keras/test_jit.py tests/keras/test_loop.py tests/keras/test_steps.py tests/tensorflow/test_order.py

check-full: $(VENV)/.installed
	export RINGREDUCE_TEST_RANDOM=1 RINGREDUCE_TEST_REVERSED=1 RINGREDUCE_TEST_ALONE=1 $(GRAPHS); \
	$(PYTEST) -n 3 $(SHARED_OUT) --part full -m full || $(PYTEST) --part full -m full $(IF_LISTED)
	export RINGREDUCE_TEST_FRESH=1; $(PYTEST) -n 3 $(SHARED_OUT) --part real -m "not full" $(REAL) || \
	    $(PYTEST) --part real -m "not full" $(REAL) $(IF_LISTED)

# What depends on TensorFlow and Keras, with the lowest versions that are supported.
FRAMEWORK := $(addprefix tests/tensorflow/test_,bridge.py lending.py routes.py order.py tensors.py tf_api.py) \
    $(addprefix tests/keras/test_,callback_parts.py callbacks.py data.py evaluation.py fit.py horovod.py jit.py \
    loop.py normalization.py optimizer.py optimizer_keras.py saving.py steps.py tape.py)
LOWEST := build/lowest
# There is no TensorFlow before 2.20, and no numpy before 2.1, for Python 3.13.
LOWEST_VERSIONS = $(shell $(PYTHON) -c 'import sys; print(*("tensorflow==2.18.*", "numpy==1.26.*", \
    "numba==0.60.*") if sys.version_info < (3, 13) else ("tensorflow==2.20.*", "numpy==2.1.*"))')

# Its numba has a cache of its own: each version compiles anew what another has left.
check-lowest: export NUMBA_CACHE_DIR = $(abspath $(LOWEST))/numba
check-lowest: $(LOWEST)/.installed
	export $(QUICK); \
	$(LOWEST)/bin/python -c 'import keras; assert keras.__version__.startswith("3.12."), keras.__version__' && \
	{ $(LOWEST)/bin/python -m pytest -n 3 $(SHARED_OUT) --part lowest -m "not full" $(FRAMEWORK) || \
	  $(LOWEST)/bin/python -m pytest --part lowest -m "not full" $(FRAMEWORK) $(IF_LISTED); }

$(LOWEST)/.installed: $(SOURCES)
	$(PYTHON) -m venv $(LOWEST)
	$(ALONE) $(LOWEST)/bin/python -m pip $(INSTALL) --editable ".[test]" \
	    "keras==3.12.*" $(LOWEST_VERSIONS)
	touch $@

# The same, but what takes longest, with pre-releases: what breaks there is said, and fails nothing. An
# environment has either keras or keras-nightly, which write into one folder.
NEWEST := build/newest
NEW := $(filter-out %order.py %routes.py %callbacks.py %callback_parts.py %evaluation.py %horovod.py %tape.py,$(FRAMEWORK))

check-newest: export NUMBA_CACHE_DIR = $(abspath $(NEWEST))/numba
check-newest: $(NEWEST)/.installed
	$(NEWEST)/bin/python -m pip list 2> /dev/null | grep -i -E "^(tensorflow|keras)" || true
	export $(QUICK); $(NEWEST)/bin/python -m pytest -n 3 $(SHARED_OUT) --part newest -m "not full" $(NEW) || \
	    echo "what failed above fails with pre-releases alone: see what changed there"

$(NEWEST)/.installed: $(SOURCES) $(VENV)/.installed
	$(PYTHON) -m venv $(NEWEST)
	$(ALONE) $(NEWEST)/bin/python -m pip $(INSTALL) "tensorflow>=2.22.0rc0" && \
	$(NEWEST)/bin/python -m pip uninstall --quiet --yes keras && \
	$(ALONE) $(NEWEST)/bin/python -m pip $(INSTALL) --force-reinstall --no-deps keras-nightly || \
	    echo "pre-releases cannot be installed for this Python"
	$(call with-tests-of,$(NEWEST))
	touch $@

# Has an environment find the packages of the tests behind its own, and this one.
with-tests-of = echo $(abspath $(VENV))/lib/python*/site-packages > $$(echo $1/lib/python*/site-packages)/tests.pth && \
    $(ALONE) $1/bin/python -m pip $(INSTALL) --no-deps --editable .

# What works together with much that other tests need not have, in an environment on top of theirs. A
# test names what is missing and is skipped, as without Java, which is installed where that is allowed.
MORE := build/more
JAVA := openjdk-17-jre-headless

MORE_TESTS := tests/spark tests/recipes
check-more: $(MORE)/.installed
	export $(GRAPHS); $(ALONE) $(MORE)/bin/python -m pytest --part more $(MORE_TESTS) || \
	    $(ALONE) $(MORE)/bin/python -m pytest --part more $(MORE_TESTS) $(IF_LISTED)

$(MORE)/.installed: $(SOURCES) $(VENV)/.installed
	$(PYTHON) -m venv $(MORE)
	$(call with-tests-of,$(MORE))
	$(ALONE) $(MORE)/bin/python -m pip $(INSTALL) --editable ".[spark,recipes]"
	command -v java || ! command -v apt-get || [ "$$(id -u)" != 0 ] || apt-get install -qq -y $(JAVA) || true
	touch $@

# Everything works without the native library, over sockets and Python.
PYTHON_ALONE := tests/tensorflow/test_bridge.py tests/tensorflow/test_bridge_failures.py tests/engine \
    tests/collectives tests/communicator/test_communicator.py tests/communicator/test_failures.py \
    tests/communicator/test_disagreement.py tests/transport/test_strangers.py \
    tests/keras/test_steps.py tests/keras/test_strategies.py

check-without-native: $(VENV)/.installed
	export RINGREDUCE_NATIVE=0 $(QUICK); \
	$(PYTEST) -n 3 $(SHARED_OUT) --part without-native -m "not full" $(PYTHON_ALONE) || \
	    $(PYTEST) --part without-native -m "not full" $(PYTHON_ALONE) $(IF_LISTED)

# The site, in build/docs. A link to a page, heading or name that does not exist is an error.
docs: $(VENV)/.installed
	$(BIN)/python -m sphinx --quiet --fresh-env --fail-on-warning -d build/doctrees -c docs . build/docs

# What is published: the source, and from that the wheel. Ends with two workers that train, from the wheel
# in an environment of its own, with no compiler in sight.
DIST := dist
BUILD := build/dist

dist: $(VENV)/.installed
	rm -rf $(DIST) $(BUILD)
	$(ALONE) $(BIN)/python -m build --outdir $(BUILD) .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m auditwheel repair --wheel-dir $(DIST) $(BUILD)/*.whl
	mv $(BUILD)/*.tar.gz $(DIST)
	$(PYTHON) -m venv $(BUILD)/installed
	cd $(BUILD)/installed && export PATH=$(abspath $(BUILD))/installed/bin && \
	python -m pip install --quiet --only-binary :all: "$$(echo $(abspath $(DIST))/*.whl)[examples]" && \
	python -c 'from ringreduce.effects import native; assert native.library(), native.why_missing()' && \
	ringreduce run -n 2 $(abspath examples/digits.py)
	rm -rf $(BUILD)

# The newest section of the changelog.
release-notes:
	@awk '/^## /{n++} n == 1' CHANGELOG.md

# Whole jobs with random faults.
soak: $(VENV)/.installed
	$(BIN)/python -m tests.soak --minutes 1.5
	$(BIN)/python -m tests.soak_elastic --minutes 1.5 --timeout-s 4

# .installed has all of .examples, and what development needs: Sphinx, Ray, pytest and so on.
$(VENV)/.examples: EXTRA := examples
$(VENV)/.installed: EXTRA := dev
$(VENV)/.examples $(VENV)/.installed: $(SOURCES)
	$(PYTHON) -m venv $(VENV)
	$(ALONE) $(BIN)/python -m pip $(INSTALL) --editable ".[$(EXTRA)]"
	touch $(VENV)/.examples $@

clean:
	rm -rf $(VENV) build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
