"""What ``meshwright plan`` writes: the plan, and the script that starts it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from meshwright.spec.cluster import Cluster
from meshwright.spec.codec import write_document
from meshwright.spec.errors import DocumentError, PlanError
from meshwright.spec.files import refuse_replacing, write_text
from meshwright.spec.model_files import is_stored_graph
from meshwright.spec.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFiles:
    """Paths of the plan and its script; None if not written. ``slurm``: the script is for sbatch."""

    plan: Path | None
    script: Path | None
    slurm: bool


def files_to_write(model: str, out: Path | None, launch: Path | None, slurm: bool) -> PlanFiles:
    """Turn the options into paths, before anything is computed. Raises PlanError for options that conflict."""
    if out is not None and out.suffix and slurm and launch is None:
        raise PlanError(
            f"--slurm was given, but --out {out} names the plan's file alone. Add --launch launch.sbatch, or give "
            "--out a folder."
        )
    if out is not None and not out.suffix:
        if out.exists() and not out.is_dir():
            raise DocumentError(f"{out} is a file, not a folder. Give --out a folder, or a file that ends in .json.")
        name = "launch.sbatch" if slurm else "launch.sh"
        files = PlanFiles(plan=out / "plan.json", script=launch or out / name, slurm=slurm)
    else:
        files = PlanFiles(plan=out, script=launch, slurm=slurm)
    for place in (files.plan, files.script):
        if place is not None:
            refuse_replacing(place)
    if files.script is not None and is_stored_graph(model):
        raise PlanError(
            f"A plan made from the stored graph {model!r} cannot be started: it has no code and no weights to run. "
            "Plan from the model's own reference (a zoo name or path/to/file.py:function), or write the plan alone "
            "with --out plan.json."
        )
    return files


def no_files(model: str) -> str:
    """A hint for a user who asked for no file."""
    if is_stored_graph(model):
        return "No file was asked for: --out plan.json writes the plan."
    return "No file was asked for: --out FOLDER writes the plan and the script that starts it."


def write_plan_files(files: PlanFiles, plan: Plan, cluster: Cluster) -> list[str]:
    """Write the plan and its script; return one line per file for the user."""
    from meshwright.report.settings import launch_script, slurm_script

    if files.plan is None:
        return []
    text = None
    if files.script is not None and plan.is_runnable:
        make = slurm_script if files.slurm else launch_script
        text = make(plan, cluster, script=files.script, plan_file=files.plan)
    write_document(plan, files.plan)
    lines = [f"plan written to {files.plan}"]
    if files.script is not None and not plan.is_runnable:
        lines.append(f"no script: the plan {plan.only_simulated}, which can only be simulated")
    if files.script is not None and text is not None:
        write_text(text, files.script)
        mode = files.script.stat().st_mode
        files.script.chmod(mode | (mode & 0o444) >> 2)  # executable by everyone who may read it
        starter = "sbatch" if files.slurm else "bash"
        lines += [f"script written to {files.script}", f"start it with: {starter} {shlex.quote(str(files.script))}"]
    return lines
