#!/usr/bin/env bash
# What only a machine with a GPU can check: tests marked `gpu`, steps of plans beside those of plain PyTorch, and predicted
# steps before and after `meshwright measure`. At most 8 minutes a call; what is left goes on in the next one.
#
#     scripts/gpu_check.sh OUT                  on the first GPU; some 8 minutes on an H100 with 16 host cores
#     scripts/gpu_check.sh OUT --quick          tiny models and few pairs: whether it runs there at all
#     scripts/gpu_check.sh OUT --device cpu     the same on a processor; nothing is judged
#
# benchmarks/gpu_check.py says what is run, what OUT gets and what exit codes mean (0 all passed; 1 a failure, a miss, or
# something left; 2 wrong arguments; 3 no GPU, not run). Commit OUT/DATE-gpu-check.md under benchmarks/reports.
#
# Installs nothing, and needs no network. PYTHON (by default that of .venv, else python3) needs torch for CUDA, 2.11 or
# newer, and for compiled cases triton (comes with torch) and a C compiler; flock is of util-linux. For a machine without
# network, carry these wheels there. On one with network, of the same Python and processor:
#
#     python -m pip download -d wheels -c constraints.txt numba numpy packaging rich tomli-w typer \
#         hypothesis pytest pytest-timeout pytest-xdist torch
#
# (leave torch out, and with it 3 GB, where the machine has one), then on the machine, behind `cd` to the checkout:
#
#     python -m venv --system-site-packages .venv
#     .venv/bin/python -m pip install --no-index --find-links wheels numba numpy packaging rich tomli-w typer \
#         hypothesis pytest pytest-timeout pytest-xdist
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$([ -x "$root/.venv/bin/python" ] && echo "$root/.venv/bin/python" || echo python3)}
command -v "$python" >/dev/null || { echo "not run: there is no $python; set PYTHON"; exit 3; }
exec "$python" "$root/benchmarks/gpu_check.py" "$@"
