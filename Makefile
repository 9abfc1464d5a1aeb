# Coppice. `make demo` shows it, `make test` tests it, `make help` lists the rest.
# Knobs: V=1 shows commands, SANITIZE=address,undefined builds a flavour of its own, CC=clang, PREFIX=.

comma   := ,
FLAVOUR := $(if $(SANITIZE),$(subst $(comma),-,$(SANITIZE)),release)$(if $(EMULATE),-emulate)
B       := build/$(FLAVOUR)
Q       := $(if $(V),,@)
JOBS    := $(shell nproc 2>/dev/null || echo 1)
PREFIX  ?= /usr/local
WERROR  := $(if $(CI),-Werror)

CFLAGS  ?= -O2 -g
# -ffp-contract=off: a multiply and an add are fused only where the source says fma; the bits depend on it.
override CFLAGS += -std=c11 -D_GNU_SOURCE -ffp-contract=off -fno-math-errno -fno-strict-aliasing -pthread -I. -MMD -MP \
          -Wall -Wextra -Wshadow -Wstrict-prototypes -Wvla $(WERROR) \
          $(if $(EMULATE),-DCOP_EMULATE_AVX512) $(if $(SANITIZE),-fsanitize=$(SANITIZE) -fno-sanitize-recover=all -fno-omit-frame-pointer)
LDFLAGS += -pthread $(if $(SANITIZE),-fsanitize=$(SANITIZE))
MSGPACK := $(if $(wildcard /usr/lib/*/libmsgpack-c.so /usr/lib/libmsgpack-c.so /usr/local/lib/libmsgpack-c.so),-lmsgpack-c,-lmsgpackc)
LDLIBS  := -lzmq $(MSGPACK) -lzstd -lxxhash -ljansson -lgmp -lm

sources  = $(wildcard $(1)/*.c $(1)/*/*.c)
objects  = $(patsubst %.c,$B/%.o,$(call sources,$(1)))
LIBS    := $(foreach l,worker engine kernels proto,$B/lib$l.a)
UNIT    := $(patsubst tests/unit/%.c,$B/tests/%,$(wildcard tests/unit/test_*.c))
FUZZ    := $(patsubst tests/fuzz/%.c,$B/tests/%,$(wildcard tests/fuzz/fuzz_*.c))
VENV    := build/venv
TRAINER := build/venv-trainer
CHECKS  := $(UNIT) $(FUZZ)
# Tests that compare instruction sets; `check` runs them a second time with the AVX-512 bodies emulated.
EMULATED := $(patsubst %,$B/tests/test_%,kernels attention math sampler draw_exact)

# A name that no test has is told before anything is built for it.
TEST_NAMES := $(notdir $(basename $(wildcard tests/unit/test_*.c tests/fuzz/fuzz_*.c tests/*/test_*.py)))
$(foreach t,$(TESTS),$(if $(findstring $t,$(TEST_NAMES)),,$(error no test has "$t" in its name: names are those of the files, such as test_options)))

all: $B/coppice build/coppice           ## the program, build/coppice
	$(Q)command -v nvcc >/dev/null || echo "nvcc not found: built for the CPU"

build/coppice: $B/coppice
	$(Q)ln -sf $(FLAVOUR)/coppice $@

$B/coppice: $B/worker/main.o $(LIBS)
	$(Q)echo "  LD  $@" && $(CC) $(LDFLAGS) -o $@ $^ $(LDLIBS)

# main.o stays out of libworker.a, so that tests can link the rest of the worker.
$B/libworker.a:  $(filter-out $B/worker/main.o,$(call objects,worker))
$B/libengine.a:  $(call objects,engine)
$B/libkernels.a: $(call objects,kernels)
$B/libproto.a:   $(filter-out $B/proto/python/%,$(call objects,proto))
$B/lib%.a:
	$(Q)mkdir -p $(@D) && rm -f $@ && $(AR) rcs $@ $^

# The bodies of each instruction set; the best is picked at run time.
# EMULATE=1 is a flavour in which the AVX-512 bodies run on any x86-64 machine: SIMDe puts plain C in place of the intrinsics.
ifeq ($(shell uname -m),x86_64)
$B/kernels/cpu/%_avx2.o: override CFLAGS += -mavx2 -mfma -O3
AVX512 := $(if $(EMULATE),-mavx2 -mfma -Wno-psabi,-mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mprefer-vector-width=512)
$B/kernels/cpu/%_avx512.o: override CFLAGS += $(AVX512) -O3
$B/kernels/cpu/%_avx512bf16.o: override CFLAGS += $(AVX512) $(if $(EMULATE),,-mavx512bf16) -O3
endif
# Plain C serves where there is no body of its own (ARM64, say): let the compiler vectorise it.
$B/kernels/cpu/%_scalar.o: override CFLAGS += -O3
# Loading weights: its loops vectorize.
$B/engine/widen.o: override CFLAGS += -O3

$B/%.o: %.c
	$(Q)mkdir -p $(@D) && echo "  CC  $<" && $(CC) $(CFLAGS) -c -o $@ $<

$B/tests/test_%: $B/tests/unit/test_%.o $(LIBS)
	$(Q)echo "  LD  $@" && mkdir -p $(@D) && $(CC) $(LDFLAGS) -o $@ $^ -lcmocka $(LDLIBS)

$B/tests/fuzz_%: $B/tests/fuzz/fuzz_%.o $B/tests/fuzz/replay.o $(LIBS)
	$(Q)echo "  LD  $@" && mkdir -p $(@D) && $(CC) $(LDFLAGS) -o $@ $^ $(LDLIBS)

$(addprefix $B/,mixed_batch bare_engine): $B/%: $B/tests/bench/%.o $(LIBS)
	$(Q)echo "  LD  $@" && $(CC) $(LDFLAGS) -o $@ $^ $(LDLIBS)

-include $(shell find $B -name '*.d' 2>/dev/null)

deps:                                   ## install missing packages (as root), or say which
	$(Q)deploy/deps

$(VENV)/ready: tests/requirements.txt $(wildcard proto/python/pyproject.toml proto/python/coppice/*.py)
	$(Q)echo "  VENV $(VENV)"
	$(Q)[ -x $(VENV)/bin/python ] || python3 -m venv $(VENV)
	$(Q)$(VENV)/bin/pip install -q --disable-pip-version-check -r tests/requirements.txt
	$(Q)$(VENV)/bin/pip install -q --disable-pip-version-check --force-reinstall --no-deps ./proto/python
	$(Q)touch $@

# The usual index has PyTorch for x86-64 with CUDA only, some gigabytes: the builds for the CPU are tried first.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

$(TRAINER)/ready: tests/trainer/requirements.txt $(wildcard proto/python/pyproject.toml proto/python/coppice/*.py)
	$(Q)echo "  VENV $(TRAINER)"
	$(Q)[ -x $(TRAINER)/bin/python ] || python3 -m venv $(TRAINER)
	$(Q)$(TRAINER)/bin/pip install -q --disable-pip-version-check --retries 0 --timeout 10 --index-url $(TORCH_INDEX) torch 2>/dev/null || \
	  echo "  VENV no PyTorch at $(TORCH_INDEX): taking the one with CUDA"
	$(Q)$(TRAINER)/bin/pip install -q --disable-pip-version-check -r tests/trainer/requirements.txt
	$(Q)$(TRAINER)/bin/pip install -q --disable-pip-version-check --force-reinstall --no-deps ./proto/python
	$(Q)touch $@

demo: deps                              ## start a worker on the bundled model and sample from it
	$(Q)$(MAKE) --no-print-directory -j$(JOBS) all $(VENV)/ready
	$(Q)$(VENV)/bin/python -m coppice.demo --worker build/coppice --model tests/models/calc-d4

checks: $B/coppice $(CHECKS)            ## build what `check` runs
ifeq ($(shell uname -m)$(SANITIZE),x86_64)
	$(Q)$(MAKE) --no-print-directory EMULATE=1 emulated
endif

emulated: $(EMULATED)

check:                                  ## every test (packages and venv already there)
	$(Q)$(MAKE) --no-print-directory -j$(JOBS) checks $(VENV)/ready
	$(Q)$(MAKE) --no-print-directory layers
	$(Q)$(VENV)/bin/python tests/run.py --build $B $(TESTS)

test: deps                              ## set up and run every test; TESTS=name runs those whose name holds it
	$(Q)$(MAKE) --no-print-directory check

# Its own, because of PyTorch: a loop that learns, on a worker.
test-trainer: deps                      ## the loop of a trainer, with PyTorch in a venv of its own
	$(Q)$(MAKE) --no-print-directory -j$(JOBS) all $(TRAINER)/ready
	$(Q)$(TRAINER)/bin/python tests/run.py --build $B --trainer $(TESTS)

asan:                                   ## the same tests under AddressSanitizer and UBSan
	$(Q)$(MAKE) --no-print-directory deps
	$(Q)$(MAKE) --no-print-directory check SANITIZE=address,undefined

tsan:                                   ## the same tests under ThreadSanitizer
	$(Q)$(MAKE) --no-print-directory deps
	$(Q)$(MAKE) --no-print-directory check SANITIZE=thread

layers:                                 ## includes go one way: worker -> engine -> kernels, worker -> proto
	$(Q)tests/layers

fuzz: deps                              ## fuzz each target for SECONDS (60) with clang's libFuzzer
	$(Q)tests/fuzz/run $(or $(SECONDS),60)

# SEED=N begins with that episode of the random work; the rollouts over the socket take a few minutes more.
soak: deps                              ## serve random work for SECONDS (600), then 20 000 rollouts
	$(Q)$(MAKE) --no-print-directory -j$(JOBS) all $B/tests/test_soak $(VENV)/ready
	$(Q)SEED=$(or $(SEED),$$(date +%s)) SOAK_SECONDS=$(or $(SECONDS),600) $B/tests/test_soak
	$(Q)COPPICE=$B/coppice SOAK_REQUESTS=$(or $(REQUESTS),20000) $(VENV)/bin/python -m pytest -sq -p no:cacheprovider tests/integration/test_soak.py

install: $B/coppice                     ## install the program under PREFIX
	install -Dm755 $B/coppice $(DESTDIR)$(PREFIX)/bin/coppice

format:                                 ## clang-format the C sources
	$(Q)clang-format -i $$(git ls-files '*.c' '*.h')

clean:                                  ## remove build/
	rm -rf build

help:                                   ## this list
	$(Q)sed -n 's/^\([a-z][a-z-]*\):.*## \(.*\)/  \1	\2/p' $(MAKEFILE_LIST) | expand -t 16

.PHONY: all deps demo checks emulated check test test-trainer asan tsan layers fuzz soak install format clean help
.DEFAULT_GOAL := all
