#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Tests and the identity check as aarch64, on emulated cores; one line per run, logs in build/emulated/, and one golden digest for all of them.
#   usage: cross/run_emulated.sh [-j RUNS_AT_ONCE] [--all | RUN...]
#   RUN: CPU[:BUILD[:PAGE[:WHAT]]]
#     CPU    a name of qemu-aarch64 -cpu: cortex-a53 and cortex-a72 (no dotprod: Pi 3, 4), cortex-a76 (dotprod: Pi 5, RK3588, Orin); i8mm: a core that has it
#     BUILD  gcc (default), zig: the compiler of the wheels, or musl: the kernel harness alone, static, by zig for musl
#     PAGE   size of a page: 4096 (default), 16384 (Pi 5), 65536
#     WHAT   suite (default): the test files that say something about ARM, then kestrel check; kernels: the kernels' tests, then kestrel check;
#            check: kestrel check alone
#   default: what continuous integration runs. The suite on one core, the kernels' tests on a core of each generation by gcc, the kernel harness with every
#            instruction set by clang (zig), the identity check on each core, and between them every build and every page size;
#            then the counts of executed instructions against the recorded ones (icount.json).
#   --all: every build on every core with every page size, suites, the check's full product, the kernel harness under AddressSanitizer: for a night.
#   KESTREL_ARM_PYTHON: folder of the emulated Python (default build/arm_python; made there when missing)
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
jobs=$(nproc); strength=--quick; runs=()
while [ $# -gt 0 ]; do
  case $1 in
    -j) jobs=$2; shift 2 ;;
    --all)
      strength=--full
      for cpu in cortex-a53 cortex-a72 cortex-a76 i8mm; do
        for page in 4096 16384 65536; do
          for build in gcc zig; do runs+=("$cpu:$build:$page:$([ $page = 4096 ] && echo suite || echo check)"); done
        done
        runs+=("$cpu:musl")
      done
      shift ;;
    -*) echo "run_emulated.sh: unknown option $1" >&2; exit 2 ;;
    *) runs+=("$1"); shift ;;
  esac
done
counted=no
if [ ${#runs[@]} -eq 0 ]; then   # the long one first
  counted=yes
  runs=(cortex-a76:gcc:4096:suite i8mm:gcc:4096:kernels cortex-a72:gcc:65536:kernels cortex-a53:zig:16384:check i8mm:musl)
fi
arm=$(realpath -m "${KESTREL_ARM_PYTHON:-build/arm_python}")
logs=$PWD/build/emulated
mkdir -p "$logs"
exec 8> "$logs/lock"; flock 8    # the trees are one run's at a time

PYTHON=$python bash cross/arm_python.sh "$arm" pytest pytest-benchmark hypothesis gguf > "$logs/arm_python.log" 2>&1 \
  || { echo "run_emulated.sh: no emulated Python: $(tail -1 "$logs/arm_python.log")" >&2; exit 1; }
declare -A cc tree
cc[gcc]=${CROSS_CC:-aarch64-linux-gnu-gcc}
for run in "${runs[@]}"; do
  build=$(cut -d: -f2 -s <<< "$run"); build=${build:-gcc}
  case $build in gcc|zig|musl) ;; *) echo "run_emulated.sh: $run: build $build, expected gcc, zig or musl" >&2; exit 2 ;; esac
  [ -z "${tree[$build]:-}" ] || continue
  case $build in
    zig) cc[zig]=$("$python" cross/build.py --print-cc --target manylinux_2_28_aarch64) || exit 1 ;;
    musl) cc[musl]=$("$python" cross/build.py --print-cc --target musllinux_1_2_aarch64) || exit 1 ;;
  esac
  tree[$build]=$("$python" cross/build_aarch64.py --cc "${cc[$build]}") || exit 1
  "$python" cross/check_objects.py --cc "${cc[$build]}" > "$logs/check_objects.$build.log" 2>&1 || { cat "$logs/check_objects.$build.log"; exit 1; }
  echo "objects: $(grep -c ' ok$' "$logs/check_objects.$build.log") of $build checked by disassembly, each holds only its own instruction set"
done

one_run() { # CPU BUILD PAGE WHAT NAME: prints its line, fails when anything failed
  local cpu=$1 build=$2 page=$3 what=$4 name=$5 line="" begin=$SECONDS rc status=0
  export ARM_CPU=$cpu QARGS="-p $page" PYTHONPATH=${tree[$build]} PYTHONUNBUFFERED=1
  [ "$cpu" != i8mm ] || ARM_CPU=max,sve=off,pauth-impdef=on
  cd "${tree[$build]}"
  if [ "$build" = musl ]; then
    KESTREL_CHECKASM_SMALL=1 "$arm/run" build/*/checkasm > "$logs/$name.log" 2>&1; rc=$?
    line+="; kernel harness: $(tail -1 "$logs/$name.log")"
    [ $rc -eq 0 ] || { status=1; line+=" (FAILED, exit $rc)"; }
  else
    local files=tests
    [ "$what" != kernels ] || files="tests/test_checkasm.py tests/test_exp.py tests/test_native.py"
    if [ "$what" != check ]; then
      "$arm/python" -m pytest -q -p no:cacheprovider --color=no $files > "$logs/$name.log" 2>&1; rc=$?
      line+="; tests: $(tail -1 "$logs/$name.log" | tr -d '=' | sed 's/^ *//; s/ *$//')"
      [ $rc -eq 0 ] || { status=1; line+=" (FAILED, exit $rc)"; }
    fi
    "$arm/python" board/check.py $strength > "$logs/$name.check.log" 2> "$logs/$name.check.err"; rc=$?
    line+="; check: $(sed -n 's/^golden toy: *\([0-9a-f]\{16\}\).*/golden \1, /p' "$logs/$name.check.log")$(grep -v '^ *$' "$logs/$name.check.log" | tail -1)"
    [ $rc -eq 0 ] || { status=1; line+=" (FAILED, exit $rc)"; }
  fi
  echo "emulated $cpu, $build, pages of $((page / 1024))K${line} [$((SECONDS - begin)) s]"
  return $status
}

failed=0; pids=(); names=()
for run in "${runs[@]}"; do
  IFS=: read -r cpu build page what <<< "$run"
  build=${build:-gcc}; page=${page:-4096}; what=${what:-suite}
  name=$cpu-$build-$page
  while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do sleep 0.5; done
  rm -f "$logs/$name".*log "$logs/$name".*err
  ( one_run "$cpu" "$build" "$page" "$what" "$name" ) &
  pids+=($!); names+=("$name")
done
for i in "${!pids[@]}"; do
  if ! wait "${pids[$i]}"; then
    failed=1
    for log in "$logs/${names[$i]}".*; do
      if [ -s "$log" ]; then echo "--- $log"; tail -60 "$log"; fi
    done
  fi
done
if [ $counted = yes ]; then
  "$python" cross/icount_step.py --gate > "$logs/icount.log" 2>&1 || failed=1
  sed 's/^/emulated, counted: /' "$logs/icount.log"
fi
if [ $strength = --full ]; then
  PYTHON=$python bash cross/asan.sh > "$logs/asan.log" 2>&1 || { failed=1; tail -60 "$logs/asan.log"; }
  echo "emulated i8mm, gcc, AddressSanitizer; kernel harness: $(tail -1 "$logs/asan.log")"
fi
digests=$(for name in "${names[@]}"; do sed -n 's/^golden toy: *\([0-9a-f]*\).*/\1/p' "$logs/$name.check.log" 2> /dev/null; done)
different=$(sort -u <<< "$digests" | grep -c .)
echo "emulated: ${#runs[@]} runs, $(grep -c . <<< "$digests") of them with a golden digest, $different different"
[ "$different" -le 1 ] || failed=1
exit $failed
