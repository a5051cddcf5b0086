#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The whole suite: natively, and as aarch64 on emulated cores where the emulator can be had.
#   usage: bash tests/run.sh [--native] [pytest arguments for the native run]
# Its own environment is .venv-test/; the real model comes to $KESTREL_CACHE (default ~/.cache/kestrel).
set -euo pipefail
cd "$(dirname "$0")/.."
native=no
if [ "${1:-}" = --native ]; then native=yes; shift; fi
mkdir -p build

python3 -c 'import sys; sys.exit(sys.version_info < (3, 9))' || { echo "tests/run.sh: python3 is older than 3.9" >&2; exit 1; }
if [ ! -x .venv-test/bin/python ]; then
  echo "making .venv-test/"
  python3 -m venv .venv-test || { echo "tests/run.sh: python3 -m venv failed (Debian: apt-get install python3-venv)" >&2; exit 1; }
fi
python=$PWD/.venv-test/bin/python
stamp=$(cat pyproject.toml setup.py | sha256sum)
if [ "$(cat .venv-test/stamp 2>/dev/null)" != "$stamp" ]; then
  "$python" -m pip install -q --disable-pip-version-check -e '.[test]' 2> build/pip.log || { cat build/pip.log >&2; exit 1; }
  echo "$stamp" > .venv-test/stamp
fi

# The AVX-512 kernels are proven through SIMDe, on any x86 host; a machine without its headers says so and leaves that file out.
left_out=()
if [ "$(uname -m)" = x86_64 ] && ! echo '#include <simde/x86/avx512.h>' | ${CC:-cc} -E -x c - > /dev/null 2>&1; then
  if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends libsimde-dev > build/apt.log 2>&1; then
    echo "installed libsimde-dev"
  else
    echo "== AVX-512 through SIMDe: NOT RUN, this machine lacks simde/x86/avx512.h (as root: apt-get install libsimde-dev)"
    left_out=(--ignore tests/test_simde.py)
  fi
fi

echo "== native: $(uname -m)"
status=0
"$python" -m pytest -q --color=no ${left_out[@]+"${left_out[@]}"} "$@" tests 2>&1 | tee build/tests-native.log || status=1
summary=$(grep -E '[0-9]+ (passed|failed|error)' build/tests-native.log | tail -1 || true)

echo "== native: identity check"
if "$python" board/check.py --full > build/check-native.log 2> build/check-native.err; then
  tail -2 build/check-native.log
else
  status=1; cat build/check-native.log build/check-native.err; echo "== native: identity check FAILED"
fi

missing=()
if [ $native = no ] && [ "$(uname -m)" != aarch64 ]; then
  needs() { # COMMAND PACKAGE
    command -v "$1" > /dev/null || missing+=("$2")
  }
  needs qemu-aarch64 qemu-user; needs mmdebstrap mmdebstrap; needs aarch64-linux-gnu-gcc gcc-aarch64-linux-gnu
  system=$(. /etc/os-release 2>/dev/null && echo "${VERSION_CODENAME:-unknown}" || echo unknown)
  if [ ${#missing[@]} -gt 0 ] && [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    echo "installing ${missing[*]} for the emulated run"
    if DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" libc6-dev-arm64-cross > build/apt.log 2>&1; then
      missing=()
    else
      tail -3 build/apt.log >&2
    fi
  fi
fi

if [ $native = yes ]; then
  echo "== emulated aarch64: NOT RUN, --native was given"
elif [ "$(uname -m)" = aarch64 ]; then
  echo "== emulated aarch64: not needed, this machine is one"
elif [ "$system" != bookworm ] && [ "$system" != trixie ]; then
  echo "== emulated aarch64: NOT RUN, the emulated Python is made from Debian 12 or 13 packages, this is '$system'"
elif [ ${#missing[@]} -gt 0 ]; then
  echo "== emulated aarch64: NOT RUN, this machine lacks ${missing[*]} (as root: apt-get install ${missing[*]} libc6-dev-arm64-cross)"
else
  echo "== emulated aarch64: suite and identity check"
  PYTHON=$python bash cross/run_emulated.sh || status=1
fi
echo "== native: ${summary:-no closing line from pytest}"
exit $status
