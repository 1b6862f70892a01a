"use strict";
// What the timeline, the schedule and the search share: names, colours and the search by time of decoded spans.
Meshwright.spans = (() => {
  // Kinds by the opcode's name; each has its colour, and what is written on a span tells kinds apart without colour.
  const KINDS = [
    ["forward", /^forward/, "forward"],
    ["weights", /^backward_weight/, "weight gradients"],
    ["backward", /^backward/, "backward"],
    ["optimizer", /^optimizer/, "optimizer"],
    ["activation", /_activation$/, "activation transfer"],
    ["gradient", /_gradient$/, "gradient transfer"],
    ["exchange", /reduce|gather|scatter|exchange/, "gradient exchange"],
  ];

  const kindOf = (opcode) => (KINDS.find(([, pattern]) => pattern.test(opcode)) || ["other"])[0];
  const kinds = () => [...KINDS.map(([kind, , words]) => [kind, words]), ["other", "other"]];

  let palette = null;
  function colours() {
    if (!palette) palette = Object.fromEntries(kinds().flatMap(([kind]) => [kind, `${kind}-alt`]).map((kind) => [kind, Meshwright.colour(kind)]));
    return palette;
  }
  const forgetColours = () => { palette = null; };

  // Kind, template and letter of each opcode of a timeline, once per timeline.
  const looks = new WeakMap();
  function looksOf(timeline) {
    if (!looks.has(timeline)) {
      looks.set(timeline, timeline.part.opcodes.map(({ name, template }) => {
        const kind = kindOf(name);
        const letter = kind === "optimizer" ? "O" : /^[A-Z]+(?=\{)/.test(template) ? template.match(/^[A-Z]+/)[0] : "";
        return { name, template, kind, letter };
      }));
    }
    return looks.get(timeline);
  }

  function nameOf(timeline, i) {
    return looksOf(timeline)[timeline.opcode[i]].template
      .replace("{stage}", timeline.stage[i]).replace("{microbatch}", timeline.microbatch[i]).replace("{peer}", timeline.peer[i]);
  }

  // The first index in first..last whose value is at least x, of a column that ascends there.
  function lowerBound(column, x, first, last) {
    while (first < last) {
      const middle = (first + last) >> 1;
      if (column[middle] < x) first = middle + 1; else last = middle;
    }
    return first;
  }

  // Neighbouring microbatches of a track differ in shade. Replicas take every R-th microbatch: the distance is divided out.
  const shades = new WeakMap();
  function shadesOf(timeline) {
    if (!shades.has(timeline)) {
      const made = new Uint8Array(timeline.num), gcd = (a, b) => { while (b) [a, b] = [b, a % b]; return a; };
      for (const { first, last } of timeline.tracks) {
        let stride = 0, before = -1;
        for (let i = first; i < last && stride !== 1; i++) {
          const microbatch = timeline.microbatch[i];
          if (microbatch < 0) continue;
          if (before >= 0) stride = gcd(stride, Math.abs(microbatch - before));
          before = microbatch;
        }
        for (let i = first; i < last; i++) made[i] = Math.floor(timeline.microbatch[i] / (stride || 1)) & 1;
      }
      shades.set(timeline, made);
    }
    return shades.get(timeline);
  }
  const fillOf = (timeline, i, kind) => colours()[shadesOf(timeline)[i] ? `${kind}-alt` : kind];

  // Latest end up to each span of its track: ascending even where spans overlap.
  const reaches = new WeakMap();
  function reachOf(timeline) {
    if (!reaches.has(timeline)) {
      const reach = new Float64Array(timeline.num);
      for (const { first, last } of timeline.tracks)
        for (let i = first, latest = -Infinity; i < last; i++) reach[i] = latest = Math.max(latest, timeline.end[i]);
      reaches.set(timeline, reach);
    }
    return reaches.get(timeline);
  }

  // The span of a track at a moment, the one that began last; -1 if the track is idle then.
  function spanAt(timeline, track, time) {
    const { first, last } = timeline.tracks[track];
    const from = lowerBound(reachOf(timeline), time, first, last);
    for (let i = lowerBound(timeline.start, time, first, last); i >= from; i--)
      if (i < last && timeline.start[i] <= time && time <= timeline.end[i]) return i;
    return -1;
  }

  // Draws the spans of one track between two moments into y..y+height; `x(time)` is in pixels of `context`. Spans below
  // a pixel are drawn one per pixel, found by binary search, so the work grows with the width and not with the spans.
  // `among` {first, last} takes only some of the track's spans.
  function drawTrack(context, timeline, track, { from, to, x, perPixel, y, height, text, dim, short, among }) {
    const { first, last } = among || timeline.tracks[track];
    const table = looksOf(timeline), { start, end } = timeline;
    const stop = lowerBound(start, to, first, last);
    let i = lowerBound(reachOf(timeline), from, first, last);
    while (i < stop) {
      const left = Math.max(x(start[i]), -4), right = Math.min(x(end[i]), context.canvas.width + 4), width = right - left;
      const look = table[timeline.opcode[i]];
      context.fillStyle = fillOf(timeline, i, look.kind);
      context.globalAlpha = dim ? 0.25 : 1;
      if (width < 1) {
        context.fillRect(Math.floor(left), y, 1, height);
        // At least one span on, also where the clock ticks in larger steps than a pixel.
        i = Math.max(i + 1, lowerBound(start, start[i] + perPixel * (Math.floor(left) + 1 - left), i + 1, stop));
        continue;
      }
      context.fillRect(left, y, width > 3 ? width - 0.75 : width, height);
      if (text && width > 12 && !dim) writeLabel(context, timeline, i, look, left, width, y, height, text, short);
      i++;
    }
    context.globalAlpha = 1;
  }

  // Full name where it fits, else letter and microbatch, else the microbatch alone, else nothing.
  function writeLabel(context, timeline, i, look, left, width, y, height, text, brief = false) {
    const microbatch = String(timeline.microbatch[i]);
    const short = look.kind === "optimizer" ? "O" : look.letter + microbatch;
    const choices = [brief ? "" : nameOf(timeline, i), look.letter ? short : "", look.letter ? (look.kind === "optimizer" ? "O" : microbatch) : ""];
    const label = choices.find((choice) => choice && context.measureText(choice).width <= width - 4);
    if (!label) return;
    context.fillStyle = text;
    context.fillText(label, left + (width - context.measureText(label).width) / 2, y + height / 2);
  }

  // One span in full colour, at least a pixel wide, over what `drawTrack` drew; framed if it is the chosen one.
  function drawSpan(context, timeline, i, { x, y, height, text, framed }) {
    const left = Math.max(x(timeline.start[i]), -4), width = Math.min(x(timeline.end[i]), context.canvas.width + 4) - left;
    const look = looksOf(timeline)[timeline.opcode[i]];
    context.fillStyle = fillOf(timeline, i, look.kind);
    context.fillRect(left, y, Math.max(width, 1), height);
    if (text && width > 12) writeLabel(context, timeline, i, look, left, width, y, height, text);
    if (!framed) return;
    context.strokeStyle = Meshwright.colour("mark");
    context.lineWidth = 2;
    context.strokeRect(left - 1, y - 1, Math.max(width, 2) + 2, height + 2);
  }

  // Tick distances 1, 2, 5 · 10^n seconds for about one tick per `pixels`.
  function ticks(from_s, to_s, width, pixels = 110) {
    const raw = (to_s - from_s) / Math.max(width / pixels, 1);
    const base = 10 ** Math.floor(Math.log10(raw || 1e-12));
    const step = [1, 2, 5, 10].map((factor) => factor * base).find((size) => size >= raw * 0.999);
    const found = [];
    for (let k = Math.ceil(from_s / step - 1e-9); k * step <= to_s * (1 + 1e-12) && found.length < 200; k++) found.push(k * step);
    return { step, found };
  }

  // The kinds of work on some tracks as a legend.
  function legend(timeline, tracks) {
    const used = new Set();
    for (const { first, last } of tracks) for (let i = first; i < last; i++) used.add(looksOf(timeline)[timeline.opcode[i]].kind);
    return Meshwright.element("ul", { class: "mw-legend", "aria-label": "Colours" }, ...kinds().filter(([kind]) => used.has(kind)).map(([kind, words]) =>
      Meshwright.element("li", {}, Meshwright.element("span", { class: `mw-swatch mw-fill-${kind}`, "aria-hidden": "true" }), words)));
  }

  return { kindOf, looksOf, nameOf, lowerBound, reachOf, spanAt, drawTrack, drawSpan, ticks, legend, forgetColours };
})();
