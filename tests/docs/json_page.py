"""``docs/json.md``, made from the table of documents that ``--json`` prints: ``python -m tests.docs.json_page``."""

from __future__ import annotations

from meshwright.cli.json_output import OUTPUTS
from tests.project import ROOT

PAGE = ROOT / "docs" / "json.md"
_HEAD = """# Output as JSON

Every command takes `--json`: it prints one JSON document on standard output, and nothing else. Progress, remarks and
errors go to standard error. The [exit code](commands/plan.md) says how a command ended.

```console
$ meshwright plan gpt-tiny --cluster 2xcpu --batch 8 --json | head -2
{{
  "schema": "{schema}",
```

The first key, `schema`, names the kind of document and its version. A version grows when a key goes or changes its
meaning; keys may be added at any time. Keys end with their units: `_s` seconds, `_bytes`, `_flops`, `_share` (of 1),
`_per_s`. A key that has nothing to say is absent or null. Documents that are files, too (graphs, plans, clusters,
timelines, comparisons), are printed as they stand in their files, with the schema of the file.

The code contains a table of these documents, from which this page is generated.
"""


def make_page() -> str:
    """The page's text."""
    parts = [_HEAD.format(schema=f"meshwright/plans/{OUTPUTS['plans'].version}")]
    for kind, output in OUTPUTS.items():
        lines = [
            f"\n## `meshwright/{kind}/{output.version}`\n",
            f"Printed by `{output.command.replace(', where', '`, where', 1)}",
        ]
        lines[-1] += "." if "`, where" in lines[-1] else "`."
        if output.open:
            lines[-1] += " Beside these keys it has figures that the command's page describes."
        lines += ["", "| key | what it holds |", "|---|---|"]
        lines += [f"| `{key}` | {what} |" for key, what in output.keys.items()]
        parts.append("\n".join(lines) + "\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(make_page())
