#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The kernel harness as aarch64 under AddressSanitizer, on an emulated core that has every instruction set: each variant against portable, in
# guarded buffers, with the compiler's own checks of the stack and of the tiles' arrays.
#   usage: cross/asan.sh [checkasm arguments]     (default: every NEON variant)
# Needs gcc-aarch64-linux-gnu (its libasan comes along) and qemu-user. Leaks are not looked for: LeakSanitizer stops its process by ptrace,
# which qemu-user does not have.
set -euo pipefail
cd "$(dirname "$0")/.."
cc=${CROSS_CC:-aarch64-linux-gnu-gcc}
"${PYTHON:-python3}" csrc/build.py --cc "$cc" --sanitize address --target checkasm > /dev/null 2>&1 \
  || exec "${PYTHON:-python3}" csrc/build.py --cc "$cc" --sanitize address --target checkasm
binary=build/$("$cc" -dumpmachine)-address/checkasm
libraries=$("$cc" -print-sysroot)
[ -e "$libraries/lib/ld-linux-aarch64.so.1" ] || libraries=/usr/aarch64-linux-gnu
run() {
  KESTREL_CHECKASM_SMALL=1 ASAN_OPTIONS=detect_leaks=0 \
    qemu-aarch64 -L "$libraries" -cpu "${ARM_CPU:-max,sve=off,pauth-impdef=on}" "$binary" "$@"
}
if [ $# -gt 0 ]; then run "$@"; exit; fi
for isa in neon neon_dotprod neon_i8mm; do run --variant $isa; done # portable is sanitized natively
