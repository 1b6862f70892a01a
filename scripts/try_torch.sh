#!/usr/bin/env bash
# Does Meshwright work with another version of torch? Tests and the demo, in a clone and an environment that are thrown
# away; nothing here is changed. Takes what is committed. KEEP=folder makes them there, and keeps them.
#
#     scripts/try_torch.sh 2.14.1                     all parts
#     scripts/try_torch.sh 2.14.1 capture runtime     some of capture, runtime, training, rewrite, serving, demo
#
# A build for CUDA, which is what PyPI has, runs on processors, too: 5 GB. Ends with a row for docs/torch-versions.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
version=${1:?which version of torch, as 2.14.1}
shift
parts=("${@:-capture}")
[ "$#" -gt 0 ] || parts=(capture runtime training rewrite serving demo)
python=${PYTHON:-python3}

folder=${KEEP:-$(mktemp -d)}
[ -n "${KEEP:-}" ] || trap 'rm -rf "$folder"' EXIT
if [ ! -d "$folder/checkout" ]; then
    git clone -q . "$folder/checkout"
    "$python" -m venv "$folder/venv"
    # Versions of what comes with torch are its own to say.
    grep -vE '^(torch|triton|nvidia-[a-z0-9-]+|cuda-[a-z0-9-]+|sympy|networkx|fsspec|filelock|setuptools)==' \
        constraints.txt >"$folder/constraints.txt"
    "$folder/venv/bin/python" -m pip install -q --disable-pip-version-check -c "$folder/constraints.txt" \
        "torch==$version" -e "$folder/checkout[serve,metrics,tensorboard,rewrite,search,hf,tables,validate,dev]"
fi
cd "$folder/checkout"
row="| $("$folder/venv/bin/python" -c 'import torch; print(torch.__version__)') |"
for part in "${parts[@]}"; do
    log="$folder/$part.log"
    if [ "$part" = demo ]; then
        command=("$folder/venv/bin/python" examples/demo.py --out "$folder/demo")
    else
        command=("$folder/venv/bin/python" -m pytest -q -n logical --maxprocesses 4 --hypothesis-profile=quick
            -m "not slow and not long and not lint" "tests/$part")
    fi
    echo "== $part: ${command[*]}"
    if timeout 1800 "${command[@]}" >"$log" 2>&1; then
        found=$([ "$part" = demo ] && echo runs || grep -oE '[0-9]+ passed' "$log" | tail -1)
    else
        found=$(grep -oE '[0-9]+ (failed|passed|errors?)' "$log" | paste -sd, - || true)
        found="**${found:-failed}**"
        tail -n 15 "$log"
    fi
    row+=" $found |"
done
echo "$row"
