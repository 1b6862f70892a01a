"""Scripts that start a plan: with torchrun on every node, or by Slurm.

Ranks count the devices of the cluster that the plan does not leave out. Each node starts one rank for each of its
devices that the plan uses, and torchrun numbers the ranks node by node in the order of the node ranks. Paths in a
script are relative: the script changes to the folder in which the plan was made, because the plan's references (such
as the model's file) are relative to it.

Options of sbatch and srun: Slurm 25.05, sbatch(1) and srun(1); of torchrun: torch 2.13, torch.distributed.run.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from meshwright.spec import Cluster, Plan, PlanError, format_count
from meshwright.spec.used_devices import devices_per_node, visible_devices

# torchrun's own default (torch.distributed.run, --master-port), and accelerate's (accelerate launch).
DEFAULT_PORT = 29500


def ranks_per_node(plan: Plan, cluster: Cluster) -> tuple[int, ...]:
    """Return the number of ranks that each node starts, one per device of the plan; nodes without ranks are left out.

    Raises PlanError if the cluster is too small.
    """
    return tuple(map(len, devices_per_node(plan, cluster).values()))


def uses_cpus(plan: Plan, cluster: Cluster) -> bool:
    """Return whether all ranks compute on CPUs."""
    return all("cpu" in cluster.device_kind(device).name.lower() for device in plan.devices)


def launch_script(plan: Plan, cluster: Cluster, *, script: Path, plan_file: Path) -> str:
    """Return the text of a bash script that starts the plan with torchrun, on this node or on each of several.

    ``script`` and ``plan_file`` are the paths of script and plan; arguments of the script are passed to ``meshwright
    run``.
    """
    nodes = ranks_per_node(plan, cluster)
    start, plan_path = _relative(Path.cwd(), script.parent), _quote(_relative(plan_file, Path.cwd()))
    parts = [
        "#!/usr/bin/env bash",
        *_heading(plan, nodes),
        *(_by_hand(nodes, script.name) if len(nodes) > 1 else ()),
        "set -euo pipefail",
        "",
        *_checks(),
        f'CDPATH=\'\' cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")"{"" if start == "." else "/" + _quote(start)}',
        "# The ranks set their own number of threads.",
        "export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}",
        *(_nodes_by_hand(nodes) if len(nodes) > 1 else ()),
        *_visible(_shown_devices(plan, cluster)),
        *(_torchrun(nodes) if len(nodes) > 1 else _torchrun_here(nodes[0])),
        f'  --module meshwright run {plan_path} "$@"',
    ]
    return "\n".join(parts) + "\n"


def launch_lines(plan: Plan, cluster: Cluster, plan_file: Path, options: str = "") -> list[str]:
    """Return the commands for each of several nodes that start the plan with torchrun; empty for a plan of one node.

    ``options`` of `meshwright run` are repeated in the commands.
    """
    nodes = ranks_per_node(plan, cluster)
    if len(nodes) == 1:
        return []
    shown = _shown_devices(plan, cluster)
    place, count = "--master-addr=HOST", str(nodes[0]) if len(set(nodes)) == 1 else "RANKS"
    told = [] if len(set(nodes)) == 1 else [f"RANKS of each node: {', '.join(map(str, nodes))}."]
    return [
        f"The plan is for {len(nodes)} nodes. Type on each, N being 0 to {len(nodes) - 1} and HOST the name of node 0; "
        "all need the plan and the model's file at the same place:",
        f"torchrun --nnodes={len(nodes)} --node-rank=N --nproc-per-node={count} {place} --master-port={DEFAULT_PORT} "
        f"--module meshwright run {_quote(str(plan_file))} {options}".rstrip(),
        *told,
        *([f"CUDA_VISIBLE_DEVICES of each node: {' and '.join(shown)}."] if shown else []),
    ]


def slurm_script(plan: Plan, cluster: Cluster, *, script: Path, plan_file: Path) -> str:
    """Return the text of a script for sbatch, to be submitted from the folder in which the plan was made.

    Raises PlanError for nodes of different kinds: Slurm numbers its nodes itself, so ranks cannot be assigned to nodes.
    """
    nodes = ranks_per_node(plan, cluster)
    used = [cluster.nodes[index] for index in devices_per_node(plan, cluster)]
    if len({(node.devices, node.num_cores) for node in used}) > 1:
        raise PlanError(
            f"The nodes of cluster {cluster.name!r} differ, and Slurm numbers the nodes of a job itself, so the "
            f"planned ranks cannot be assigned to nodes. Leave --slurm out and start the script on every node "
            "with its NODE_RANK."
        )
    if _shown_devices(plan, cluster):
        raise PlanError(
            f"The plan leaves out devices of a node that it uses ({list(plan.idle)}), and Slurm itself decides "
            "which devices of a node a job gets. Leave --slurm out and start the script on every node."
        )
    is_cpu = uses_cpus(plan, cluster)
    plan_path = _quote(_relative(plan_file, Path.cwd()))
    parts = [
        "#!/usr/bin/env bash",
        f"#SBATCH --job-name={_job_name(plan.model)}",
        f"#SBATCH --nodes={len(nodes)}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --cpus-per-task={max(nodes) if is_cpu else used[0].num_cores}",
        *([] if is_cpu else [f"#SBATCH --gpus-per-node={max(nodes)}"]),
        "#SBATCH --output=%x-%j.out",
        "# Add what your site asks for: --partition, --account, --time.",
        "#",
        *_heading(plan, nodes),
        f"# Submit it from the folder in which the plan was made: sbatch {_quote(_relative(script, Path.cwd()))}",
        "set -euo pipefail",
        "",
        'if [ -z "${SLURM_JOB_ID:-}" ]; then',
        f'  echo "{script.name}: not in a job of Slurm; start it with sbatch" >&2',
        "  exit 2",
        "fi",
        f"if [ ! -f {plan_path} ]; then",
        f'  echo {_quote(script.name + ": no such file in this folder:")} {plan_path}". '
        'Submit from the folder in which the plan was made." >&2',
        "  exit 2",
        "fi",
        'if ! read -r MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST"); then',
        '  echo "scontrol does not name the nodes of this job" >&2',
        "  exit 2",
        "fi",
        "# Jobs that share a node get ports of their own.",
        "MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}",
        "export MASTER_ADDR MASTER_PORT",
        "export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}",
        "# One agent per node. Since Slurm 22.05 srun does not take --cpus-per-task from sbatch.",
        "exec srun --ntasks-per-node=1 --kill-on-bad-exit=1 \\",
        '  ${SLURM_CPUS_PER_TASK:+"--cpus-per-task=$SLURM_CPUS_PER_TASK"} bash -c \'',
        *_checks(),
        "NODE_RANK=$SLURM_NODEID",
        *_torchrun(nodes),
        '  --module meshwright run "$@"',
        f'\' {_quote(script.name)} {plan_path} "$@"',
    ]
    return "\n".join(parts) + "\n"


def _heading(plan: Plan, nodes: tuple[int, ...]) -> list[str]:
    stages, ranks = format_count(len(plan.stages), "stage"), format_count(sum(nodes), "rank")
    return [
        f"# {_comment(plan.model)} on {_comment(plan.cluster)}: {stages}, {ranks}, {format_count(len(nodes), 'node')}.",
        "# Arguments are those of `meshwright run`, for instance: --steps 100 --save-model model.pt",
        "# To train with a script of your own, name it in the last line instead of `--module meshwright run`.",
    ]


def _by_hand(nodes: tuple[int, ...], name: str) -> list[str]:
    return [
        f"# Start it on each of the {len(nodes)} nodes; all need the plan and the model's file at the same place:",
        f"#   NODE_RANK=0 MASTER_ADDR=node0 ./{_comment(name)}    (NODE_RANK 0 to {len(nodes) - 1}, "
        "MASTER_ADDR always node 0)",
    ]


def _checks() -> list[str]:
    return [
        "if ! command -v torchrun >/dev/null; then",
        '  echo "torchrun is not in PATH; activate the environment in which meshwright and torch are installed" >&2',
        "  exit 2",
        "fi",
    ]


def _nodes_by_hand(nodes: tuple[int, ...]) -> list[str]:
    last = len(nodes) - 1
    valid = str(last) if last == 0 else f"0 to {last}"
    return [
        'if [ -z "${NODE_RANK:-}" ] || [ -z "${MASTER_ADDR:-}" ]; then',
        f'  echo "set NODE_RANK ({valid}) and MASTER_ADDR (name or address of node 0), on every node" >&2',
        "  exit 2",
        "fi",
        f'if ! [[ "$NODE_RANK" =~ ^[0-9]+$ ]] || [ "$NODE_RANK" -gt {last} ]; then',
        f'  echo "NODE_RANK is $NODE_RANK; expected {valid}" >&2',
        "  exit 2",
        "fi",
        f"MASTER_PORT=${{MASTER_PORT:-{DEFAULT_PORT}}}",
    ]


def _shown_devices(plan: Plan, cluster: Cluster) -> list[str]:
    """The devices of each node that ranks see, if some are to be hidden."""
    return [] if uses_cpus(plan, cluster) else visible_devices(plan, cluster)


def _visible(devices: list[str]) -> list[str]:
    """Lines that hide the devices of a node that the plan leaves out."""
    if len(devices) < 2:
        return [f"export CUDA_VISIBLE_DEVICES={item}" for item in devices]
    return [f"devices=({' '.join(devices)})", 'export CUDA_VISIBLE_DEVICES="${devices[NODE_RANK]}"']


def _torchrun_here(num_ranks: int) -> list[str]:
    return ["exec torchrun \\", f"  --standalone --nproc-per-node={num_ranks} \\"]


def _torchrun(nodes: tuple[int, ...]) -> list[str]:
    if len(set(nodes)) == 1:
        count, table = str(nodes[0]), []
    else:
        count, table = '"${ranks[NODE_RANK]}"', [f"ranks=({' '.join(map(str, nodes))})"]
    return [
        *table,
        "exec torchrun \\",
        f'  --nnodes={len(nodes)} --node-rank="$NODE_RANK" --nproc-per-node={count} \\',
        '  --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \\',
    ]


def _relative(path: Path, start: Path) -> str:
    return Path(os.path.relpath(path.resolve(), start.resolve())).as_posix()


def _quote(text: str) -> str:
    return shlex.quote(text)


def _comment(text: str) -> str:
    """Text for a comment: one line, whatever a name contains."""
    return " ".join(text.split())


def _job_name(model: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model).name).strip("-.") or "meshwright"
