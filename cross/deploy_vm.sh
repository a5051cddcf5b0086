#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# board/deploy.py against a whole emulated board (cross/board_vm.sh): wheel, ssh, install, check, bench, results back; then once more, which must do nothing twice.
#   usage: cross/deploy_vm.sh [--cpu CPU] [--dir DIR] [MODEL]      CPU: cortex-a76 (default), cortex-a72, max,pauth-impdef=on; DIR: default build/board_vm
# Without MODEL a small one is made from a seed. Results go to DIR/results.
set -euo pipefail
cd "$(dirname "$0")/.."
cpu=cortex-a76; dir=build/board_vm; model=
while [ $# -gt 0 ]; do
  case $1 in
    --cpu) cpu=$2; shift 2 ;;
    --dir) dir=$2; shift 2 ;;
    -*) echo "deploy_vm.sh: unknown option $1" >&2; exit 2 ;;
    *) model=$1; shift ;;
  esac
done
python=${PYTHON:-python3}
mkdir -p "$dir"
if [ -z "$model" ]; then
  model=$dir/toy.kestrel
  PYTHONPATH=$PWD "$python" -c 'import sys; from kestrel.toy import write_toy; write_toy(sys.argv[1])' "$model"
fi
bash cross/board_vm.sh build "$dir"
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
bash cross/board_vm.sh boot "$dir" "$cpu" "$port"
trap 'bash cross/board_vm.sh stop "$dir"' EXIT
begin=$SECONDS
"$python" board/deploy.py board --ssh-config "$dir/ssh_config" --model "$model" --results "$dir/results" --quick > "$dir/paths"
echo "deploy_vm.sh: the first run took $((SECONDS - begin)) s"
begin=$SECONDS
"$python" board/deploy.py board --ssh-config "$dir/ssh_config" --model "$model" --install-only 2> "$dir/second.log" || { cat "$dir/second.log"; exit 1; }
if ! grep -q 'up to date' "$dir/second.log" || grep -q '^copy .* MiB' "$dir/second.log"; then cat "$dir/second.log"; echo "deploy_vm.sh: the second run did something twice"; exit 1; fi
echo "deploy_vm.sh: the second run, with nothing to copy or install, took $((SECONDS - begin)) s"
# the user that it ran as has no rights; what it left, in KiB
ssh -F "$dir/ssh_config" board 'id -u; du -sk kestrel kestrel/venv'
cat $(grep '\.md$' "$dir/paths")
