#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# An aarch64 CPython with wheels that runs here under user-mode emulation: no chroot, no container, no binfmt; the
# host's apt state stays untouched. About 25 s and 250 MB.
#   usage: cross/arm_python.sh DIR [further pip packages...]
#   then:  ARM_CPU=cortex-a72 DIR/python script.py      DIR/run: any other aarch64 program
#   ARM_CPU  cortex-a53, cortex-a72 (no dotprod: Pi 3/4) | cortex-a76 (dotprod: Pi 5, RK3588) | max,sve=off,pauth-impdef=on (i8mm)
#   QARGS    further emulator arguments, e.g. "-p 16384" (page size) or "-plugin file=build/icount.so,out=counts.txt"
# Needs qemu-user and mmdebstrap on Debian 12 or 13. /proc/cpuinfo shows the host there: features come from getauxval.
set -euo pipefail
dir=$(realpath -m "${1:?usage: arm_python.sh DIR [packages]}"); shift
python=${PYTHON:-python3}
for need in qemu-aarch64 mmdebstrap "$python"; do
  command -v "$need" >/dev/null || { echo "arm_python.sh: no $need (apt-get install qemu-user mmdebstrap)" >&2; exit 1; }
done
suite=$(. /etc/os-release; echo "${VERSION_CODENAME:-}")
case $suite in
  bookworm) version=3.11 ;;
  trixie) version=3.13 ;;
  *) echo "arm_python.sh: the host is '$suite', expected Debian bookworm or trixie" >&2; exit 1 ;;
esac
mkdir -p "$dir"
exec 9> "$dir/lock"; flock 9    # two runs may want it at once
sources=
for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.sources; do
  if [ -s "$file" ]; then sources=$file; fi   # the newer place wins
done
[ -n "$sources" ] || { echo "arm_python.sh: no package sources under /etc/apt" >&2; exit 1; }
if [ ! -e "$dir/root/complete" ]; then
  rm -rf "$dir/root"
  mmdebstrap --quiet --arch=arm64 --variant=extract \
    --include=python$version-minimal,libpython$version-stdlib,libstdc++6,libgcc-s1,zlib1g,libffi8 "$suite" "$dir/root" "$sources"
  touch "$dir/root/complete"
fi
packages="numpy cffi safetensors tokenizers jinja2 tqdm $*"
if [ "$(cat "$dir/packages" 2> /dev/null)" != "$version $packages" ]; then
  "$python" -m pip install -q --disable-pip-version-check --no-compile --upgrade --target "$dir/site" \
    --only-binary=:all: --implementation cp --python-version "$version" \
    --platform manylinux2014_aarch64 --platform manylinux_2_17_aarch64 --platform manylinux_2_28_aarch64 --platform manylinux_2_34_aarch64 \
    $packages
  # bytecode made here if this host has the same Python: otherwise a one-test run takes 10 s instead of 4
  if command -v "python$version" >/dev/null; then
    "python$version" -m compileall -q -j0 "$dir/site" "$dir/root/usr/lib/python$version" >/dev/null 2>&1 || true
  fi
  echo "$version $packages" > "$dir/packages"
fi
cat > "$dir/run" <<E
#!/bin/bash
exec qemu-aarch64 -cpu "\${ARM_CPU:-cortex-a76}" -L "$dir/root" \${QARGS:-} "\$@"
E
cat > "$dir/python" <<E
#!/bin/bash
# settings of the host's OpenBLAS name x86 cores
unset OPENBLAS_CORETYPE OPENBLAS_L2_SIZE
export PYTHONPATH="\${PYTHONPATH:+\$PYTHONPATH:}$dir/site" PYTHONNOUSERSITE=1 OPENBLAS_NUM_THREADS=1
export ARM_PYTHON="$dir/python" ARM_RUN="$dir/run"
exec qemu-aarch64 -cpu "\${ARM_CPU:-cortex-a76}" -L "$dir/root" \${QARGS:-} "$dir/root/usr/bin/python$version" "\$@"
E
chmod +x "$dir/run" "$dir/python"
