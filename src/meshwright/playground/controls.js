"use strict";
// The controls: a form from what the server offers, read as the query of a link and set from one.
const Controls = (() => {
  const { element } = Meshwright;
  const inputs = new Map(); // name in a link → element
  let options = null;

  // name, label, kind (choice, number, text, switch, factor), what it means
  const GROUPS = [
    ["Model", [
      ["model", "Model", "choice"],
      ["batch", "Global batch", "number", "samples per step, over all devices"],
      ["precision", "Precision", "choice"],
      ["optimizer", "Optimizer", "choice"],
    ]],
    ["Cluster", [
      ["kind", "Device", "choice"],
      ["nodes", "Nodes", "number"],
      ["devices", "Devices per node", "number"],
    ]],
    ["Plan", [
      ["stages", "Stages", "number"],
      ["replicas", "Replicas", "text", "auto, one number for all stages, or one per stage: 4,2,2"],
      ["layout", "Layout", "choice", "which ranks each stage runs on"],
      ["microbatch", "Microbatch", "number", "samples; must divide the global batch"],
      ["schedule", "Schedule", "choice"],
      ["chunks", "Stages per rank", "number", "for interleaved and looped-bfs; Stages is the number on all ranks"],
      ["zero", "ZeRO", "number", "what replicas shard: 1 optimizer states, 2 also gradients, 3 also parameters"],
      ["overlap", "Exchange overlaps backward", "switch"],
      ["bucket", "Bucket (MiB)", "number"],
    ]],
    ["Split ops", [
      ["tensor", "Tensor", "number", "devices that split each op; together they are one rank of the plan"],
      ["sequence", "Sequence parallel", "switch", "also split tokens between the split ops; needs tensor above 1"],
      ["context", "Context", "number"],
      ["expert", "Expert", "number"],
    ]],
    ["Save memory", [
      ["recompute", "Recompute", "choice", "what the backward pass recomputes (activation checkpointing)"],
      ["offload", "Offload", "choice", "what lies in host memory or on drives instead of on the devices"],
    ]],
    ["Everything else", [
      ["rest", "Other properties", "choice", "properties without a control: as in the plan that was opened, or none"],
      ["plan", "", "hidden"],
    ]],
    ["Scenario", [
      ["slow", "Slow device (rank)", "number"],
      ["slowdown", "This device", "factor"],
      ["link", "Links inside nodes", "factor"],
      ["nic", "Links between nodes", "factor"],
      ["nics", "NICs per node", "number", "0: as in the datasheet; with fewer, devices share them and transfers wait"],
      ["memory", "Memory (GiB)", "number", "of every device; 0: as in the datasheet"],
    ]],
  ];
  const CHOICES = { model: "models", kind: "kinds", precision: "precisions", optimizer: "optimizers", layout: "layouts", schedule: "schedules",
    recompute: "recomputes", offload: "offloads", rest: "rests" };
  // A part of the plan that no other value says; it is offered where a plan has one.
  const AS_PLANNED = "as-planned";
  const entry = (value) => element("option", { value, text: value === AS_PLANNED ? "as in the plan" : value });
  // A slider moves on a logarithmic scale, so that halves and doubles are equally far from 1.
  const STEPS = 40;
  const FASTEST = 0.25, SLOWEST = 16;
  const toFactor = (place) => {
    const factor = FASTEST * (SLOWEST / FASTEST) ** (place / STEPS);
    return Math.abs(factor - 1) < 1e-9 ? 1 : Number(factor.toPrecision(3));
  };
  const toPlace = (factor) => Math.round(STEPS * Math.log(factor / FASTEST) / Math.log(SLOWEST / FASTEST));

  function make(name, label, kind, hint) {
    const id = `control-${name}`;
    let input, extra = null;
    const limits = options.limits[name] || [];
    if (kind === "choice") {
      const entries = options[CHOICES[name]].map((item) => item.name || item);
      input = element("select", { id }, ...entries.map(entry));
    } else if (kind === "hidden") input = element("input", { id, type: "hidden" });
    else if (kind === "switch") input = element("input", { id, type: "checkbox" });
    else if (kind === "factor") {
      input = element("input", { id, type: "range", min: 0, max: STEPS, step: 1 });
      extra = element("output", { for: id });
    } else if (kind === "number") input = element("input", { id, type: "number", inputmode: "decimal", min: limits[0], max: limits[1], step: ["memory", "bucket"].includes(name) ? "any" : 1 });
    else input = element("input", { id, type: "text", spellcheck: "false" });
    input.dataset.kind = kind;
    inputs.set(name, { input, kind, output: extra, exact: null });
    if (kind === "hidden") return input;
    const note = hint ? element("small", { id: `${id}-note`, text: hint }) : null;
    if (note) input.setAttribute("aria-describedby", note.id);
    return element("div", { class: `pg-control pg-${kind}` }, element("label", { for: id, text: label }), input, extra, note);
  }

  function build(form, offered, changed) {
    options = offered;
    // Beside the pictures there is room for all groups, above them for one.
    const wide = window.matchMedia("(min-width: 861px)").matches;
    for (const [title, rows] of GROUPS) {
      form.append(element("details", { class: "pg-group", open: wide || title === "Plan" },
        element("summary", { text: title }), ...rows.map((row) => make(...row))));
    }
    form.addEventListener("submit", (event) => event.preventDefault());
    // Some browsers, and drivers of browsers, tell of a choice by "change" alone.
    for (const moment of ["input", "change"]) form.addEventListener(moment, (event) => {
      const found = [...inputs.values()].find((item) => item.input === event.target);
      if (!found) return;
      found.exact = null;
      fix(event.target === inputs.get("kind").input);
      show();
      changed(event);
    });
  }

  // What other controls leave to say: a cluster from a file has its own numbers of nodes and devices.
  function fix(isNew) {
    // Other schedules say themselves how many stages a rank has.
    inputs.get("chunks").input.parentElement.hidden = !["interleaved", "looped-bfs"].includes(inputs.get("schedule").input.value);
    const kind = options.kinds.find((item) => item.name === inputs.get("kind").input.value);
    for (const name of ["nodes", "devices"]) {
      const { input } = inputs.get(name);
      input.disabled = Boolean(kind && kind.fixed);
      if (isNew && kind && kind.fixed) input.value = kind.fixed[name];
    }
  }

  function show() {
    for (const { input, output, exact } of inputs.values()) {
      if (!output) continue;
      const factor = exact === null ? toFactor(Number(input.value)) : Number(exact);
      output.textContent = factor === 1 ? "as it is" : factor > 1 ? `${factor}× slower` : `${Number((1 / factor).toPrecision(3))}× faster`;
      input.setAttribute("aria-valuetext", output.textContent);
    }
  }

  // The link's query as the controls stand; `cuts` belongs to the bar of layers.
  function read(cuts) {
    const query = new URLSearchParams();
    for (const [name, { input, kind, exact }] of inputs) {
      if (kind === "switch") query.set(name, input.checked ? "on" : "off");
      else if (kind === "factor") query.set(name, exact === null ? toFactor(Number(input.value)) : exact);
      else query.set(name, input.value.trim().replace(/,\s+/g, ","));
    }
    query.set("cuts", cuts);
    return query.toString();
  }

  function set(text) {
    const query = new URLSearchParams(text);
    for (const [name, item] of inputs) {
      const value = query.get(name);
      if (value === null) continue;
      if (item.kind === "switch") item.input.checked = value === "on";
      else if (item.kind === "factor") {
        item.input.value = toPlace(Number(value) || 1);
        // What a link says stays as it is until the slider is moved.
        item.exact = toFactor(Number(item.input.value)) === Number(value) ? null : value;
      } else {
        // A value that the control cannot hold leaves it as it is; the server says what is wrong with the link.
        if (value === AS_PLANNED && item.kind === "choice" && ![...item.input.options].some((option) => option.value === value)) {
          item.input.append(entry(value));
        }
        const before = item.input.value;
        item.input.value = value;
        if (!item.input.value) item.input.value = before;
      }
    }
    fix(false);
    show();
    return query.get("cuts") || "balanced";
  }

  return { build, read, set };
})();
