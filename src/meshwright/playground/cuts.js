"use strict";
// The bar of layers: as wide as they take time, coloured by stage, with a handle at every cut.
const Cuts = (() => {
  const { element, format } = Meshwright;
  // Layers that take next to no time stay wide enough to be seen and cut.
  const SMALLEST_SHARE = 0.25;
  // The views have so many colours of stages, the same for every picture.
  const COLOURS = 8;
  let layers = null, cuts = [], edges = [], changed = () => {};
  let bar, note, words;

  function build(notify) {
    changed = notify;
    [bar, note, words] = ["cuts", "cuts-note", "cuts-words"].map((id) => document.getElementById(id));
  }

  function update(data) {
    const focused = bar.contains(document.activeElement) ? document.activeElement.dataset.cut : null;
    layers = data;
    cuts = [...data.cuts];
    const mean = data.seconds.reduce((sum, item) => sum + item, 0) / data.seconds.length || 1;
    const weights = data.seconds.map((item) => item / mean + SMALLEST_SHARE);
    const total = weights.reduce((sum, item) => sum + item, 0);
    edges = [0];
    for (const weight of weights) edges.push(edges[edges.length - 1] + weight / total);
    draw();
    if (focused !== null) bar.querySelector(`[data-cut="${focused}"]`)?.focus({ preventScroll: true });
  }

  const stageOf = (layer) => cuts.filter((cut) => cut <= layer).length;
  const percent = (share) => `${(100 * share).toFixed(4)}%`;

  function draw() {
    const tiles = layers.names.map((name, index) => element("span", {
      class: `pg-layer mw-stage-${stageOf(index) % COLOURS}`, title: `${name}: ${format.seconds(layers.seconds[index])}, stage ${stageOf(index)}`,
      style: { left: percent(edges[index]), width: percent(edges[index + 1] - edges[index]) },
    }));
    const bounds = [0, ...cuts, layers.names.length];
    const names = bounds.slice(0, -1).map((start, stage) => element("span", {
      class: "pg-stage", text: stage, style: { left: percent(edges[start]), width: percent(edges[bounds[stage + 1]] - edges[start]) },
    }));
    bar.replaceChildren(...tiles, ...names, ...cuts.map(handle));
    say();
  }

  function say() {
    const bounds = [0, ...cuts, layers.names.length];
    const seconds = bounds.slice(0, -1).map((start, stage) => layers.seconds.slice(start, bounds[stage + 1]).reduce((sum, item) => sum + item, 0));
    const slowest = seconds.indexOf(Math.max(...seconds));
    const mean = seconds.reduce((sum, item) => sum + item, 0) / seconds.length;
    const excess = seconds[slowest] / mean - 1;
    words.textContent = cuts.length
      ? `Slowest: stage ${slowest}, ${format.seconds(seconds[slowest])} per microbatch, ${format.percent(excess)} above the mean of all stages.`
      : `One stage of ${layers.names.length} layers, ${format.seconds(seconds[0])} per microbatch.`;
    note.replaceChildren(
      layers.is_balanced ? "Balanced: the slowest stage is as fast as it can be. Move a cut with the mouse or the arrow keys." : "Cut by hand. ",
      ...(layers.is_balanced ? [] : [element("button", { type: "button", id: "balance", class: "mw-button", text: "Balance again", onclick: (event) => changed("balanced", event) })]),
    );
  }

  function handle(cut, index) {
    const [low, high] = range(index);
    return element("span", {
      class: "pg-handle", role: "slider", tabindex: "0", "data-cut": String(index), "aria-label": `Cut between stage ${index} and stage ${index + 1}`,
      "aria-valuemin": low, "aria-valuemax": high, "aria-valuenow": cut, "aria-valuetext": `stage ${index + 1} begins with layer ${cut}, ${layers.names[cut]}`,
      style: { left: percent(edges[cut]) }, onkeydown: (event) => press(event, index), onpointerdown: (event) => drag(event, index),
    });
  }

  const range = (index) => [(index ? cuts[index - 1] : 0) + 1, (index + 1 < cuts.length ? cuts[index + 1] : layers.names.length) - 1];

  function move(index, place, event) {
    const [low, high] = range(index);
    const cut = Math.max(low, Math.min(high, place));
    if (cut === cuts[index]) return;
    cuts[index] = cut;
    layers.is_balanced = false;
    draw();
    bar.querySelector(`[data-cut="${index}"]`).focus({ preventScroll: true });
    changed(cuts.join(","), event);
  }

  function press(event, index) {
    const [low, high] = range(index);
    const places = { ArrowLeft: cuts[index] - 1, ArrowDown: cuts[index] - 1, ArrowRight: cuts[index] + 1, ArrowUp: cuts[index] + 1, Home: low, End: high };
    if (!(event.key in places)) return;
    event.preventDefault();
    move(index, places[event.key], event);
  }

  function drag(event, index) {
    event.preventDefault();
    event.currentTarget.focus({ preventScroll: true });
    const box = bar.getBoundingClientRect();
    // The handles are redrawn while one is dragged, so the window listens.
    const follow = (moved) => {
      const share = (moved.clientX - box.left) / box.width;
      let nearest = 0;
      edges.forEach((edge, place) => { if (Math.abs(edge - share) < Math.abs(edges[nearest] - share)) nearest = place; });
      move(index, nearest, moved);
    };
    const end = () => { for (const name of ["pointerup", "pointercancel"]) window.removeEventListener(name, end); window.removeEventListener("pointermove", follow); };
    window.addEventListener("pointermove", follow);
    for (const name of ["pointerup", "pointercancel"]) window.addEventListener(name, end);
  }

  return { build, update };
})();
