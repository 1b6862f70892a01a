#!/usr/bin/env bash
# What only a machine with a GPU can check: tests marked `gpu`, and steps of plans beside those of plain PyTorch.
# Installs nothing: PYTHON (by default that of .venv, else python3) needs torch for CUDA and what the tests import.
# Some 6 minutes on one H100. Exit code 0: all passed; 1: something failed, a step or a prediction that misses its target
# included; 3: torch sees no GPU, nothing was checked.
#
#     scripts/gpu_check.sh [FOLDER]    logs go to FOLDER, by default gpu-check in the checkout; the report to
#                                      benchmarks/reports
#     QUICK=1 scripts/gpu_check.sh     fewer steps, without a report; for slower GPUs, too
set -uo pipefail
folder=$(realpath -m "${1:-$(dirname "${BASH_SOURCE[0]}")/../gpu-check}")
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}"

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "$python: torch sees no CUDA device here, so nothing was checked. Set PYTHON to one that does." >&2
    exit 3
fi
mkdir -p "$folder"
failed=()
check() { # check NAME SECONDS COMMAND...
    echo "== $1: ${*:3}"
    timeout --kill-after=10 "$2" "${@:3}" 2>&1 | tee "$folder/$1.log"
    [ "${PIPESTATUS[0]}" -eq 0 ] || failed+=("$1")
}

check software 60 "$python" -m meshwright doctor
check tests 300 "$python" -m pytest -q -m gpu tests
check steps 900 "$python" benchmarks/runtime.py --only device --json "$folder/steps.json" ${QUICK:+--quick}
if [ "${#failed[@]}" -gt 0 ]; then
    echo "failed: ${failed[*]}; logs in $folder" >&2
    exit 1
fi
echo "all passed; logs in $folder"
