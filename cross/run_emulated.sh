#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The test suite and the identity check as aarch64, on emulated cores (a core with i8mm: the kernels' tests and the check); one line per core,
# logs in build/emulated/.
#   usage: cross/run_emulated.sh [-j CORES_AT_ONCE] [--tests-only|--check-only] [--full-check] [CPU...]
#   the check takes cells for each pair of settings (`kestrel check --quick`); --full-check: their whole product, many minutes a core
#   CPU: names of qemu-aarch64 -cpu (default: cortex-a72, cortex-a76, and a core with i8mm when csrc has units for it)
#   KESTREL_ARM_PYTHON: folder of the emulated Python (default build/arm_python; made there when missing)
# Run the native suite first: it leaves the real model where the emulated one looks for it.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
jobs=$(nproc); parts="tests check"; strength=--quick; cpus=()
while [ $# -gt 0 ]; do
  case $1 in
    -j) jobs=$2; shift 2 ;;
    --tests-only) parts=tests; shift ;;
    --check-only) parts=check; shift ;;
    --full-check) strength=--full; shift ;;
    -*) echo "run_emulated.sh: unknown option $1" >&2; exit 2 ;;
    *) cpus+=("$1"); shift ;;
  esac
done
if [ ${#cpus[@]} -eq 0 ]; then
  cpus=(cortex-a72 cortex-a76)
  if compgen -G 'csrc/*_neon_i8mm.c' > /dev/null; then cpus+=(max,sve=off,pauth-impdef=on); fi
fi
arm=$(realpath -m "${KESTREL_ARM_PYTHON:-build/arm_python}")
logs=$PWD/build/emulated
mkdir -p "$logs"

PYTHON=$python bash cross/arm_python.sh "$arm" pytest pytest-benchmark hypothesis gguf > "$logs/arm_python.log" 2>&1 \
  || { echo "run_emulated.sh: no emulated Python: $(tail -1 "$logs/arm_python.log")" >&2; exit 1; }
tree=$("$python" cross/build_aarch64.py) || exit 1
"$python" cross/check_objects.py --cc "${CROSS_CC:-aarch64-linux-gnu-gcc}" > "$logs/check_objects.log" 2>&1 \
  || { cat "$logs/check_objects.log"; exit 1; }
echo "objects: $(grep -c ' ok$' "$logs/check_objects.log") checked by disassembly, each holds only its own instruction set"

one_core() { # CPU: prints its line, fails when anything failed
  local cpu=$1 log=$logs/${1%%,*} line="" status=0 begin=$SECONDS rc
  export ARM_CPU=$cpu PYTHONPATH=$tree PYTHONUNBUFFERED=1
  # the third core has two kernels of its own and nothing else: the harness and the identity check say all of it in a third of the time
  local tests=tests
  case $cpu in max,*) tests="tests/test_checkasm.py tests/test_exp.py tests/test_native.py" ;; esac
  cd "$tree"
  for part in $parts; do
    if [ "$part" = tests ]; then
      "$arm/python" -m pytest -q -p no:cacheprovider --color=no $tests > "$log.tests.log" 2>&1; rc=$?
      line+="; tests: $(tail -1 "$log.tests.log" | tr -d '=' | sed 's/^ *//; s/ *$//')"
    else
      "$arm/python" board/check.py $strength > "$log.check.log" 2> "$log.check.err"; rc=$?
      line+="; check: $(sed -n 's/^golden [^:]*: *\([0-9a-f]\{16\}\).*/golden \1, /p' "$log.check.log" | head -1)$(grep -v '^ *$' "$log.check.log" | tail -1)"
    fi
    if [ $rc -ne 0 ]; then status=1; line+=" (FAILED, exit $rc, see build/emulated/$(basename "$log").$part.log)"; fi
  done
  echo "emulated $cpu${line} [$((SECONDS - begin)) s]"
  return $status
}

failed=0; pids=()
for cpu in "${cpus[@]}"; do
  while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do sleep 0.5; done
  ( one_core "$cpu" ) &
  pids+=($!)
done
for i in "${!pids[@]}"; do
  if ! wait "${pids[$i]}"; then
    failed=1
    name=${cpus[$i]%%,*}
    for log in "$logs/$name.tests.log" "$logs/$name.check.log" "$logs/$name.check.err"; do
      if [ -s "$log" ]; then echo "--- $log"; tail -60 "$log"; fi
    done
  fi
done
exit $failed
