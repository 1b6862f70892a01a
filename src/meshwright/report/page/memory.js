"use strict";
// Memory: each rank's peak by owner beside its device's limit, and one rank over time.
(() => {
  const { element, part, shownTimeline, table, tableOf, surface, colour, spans } = Meshwright;
  const MAX_BARS = 64, AXIS = 22;
  // The group of parts that goes up and down with the microbatches in flight; the others are in use all the time.
  const VARYING = "activations";

  // Bytes by group, in the order of drawing; what no group names comes last.
  function byOwner(parts, groups) {
    const sums = new Map([...Object.keys(groups), "other"].map((group) => [group, 0]));
    for (const [name, size] of Object.entries(parts)) {
      const owner = Object.keys(groups).find((group) => groups[group].includes(name)) || "other";
      sums.set(owner, sums.get(owner) + size);
    }
    return [...sums].filter(([, size]) => size > 0);
  }

  const biggest = (parts) => Object.entries(parts).reduce((a, b) => (b[1] > a[1] ? b : a), ["", 0])[0];

  part("memory", "Memory", {
    has: ({ result }) => Boolean(result && result.memory.rows.some(({ peak_bytes }) => peak_bytes !== null)),
    create(box, context) {
      const view = new View(box);
      view.update(context);
      return view;
    },
  });

  // Memory of the timeline that is shown, where its peaks are known: of which owner is not, but limits are the same.
  function memoryOf(memory, shown) {
    if (!shown || shown.part.origin === memory.origin || !shown.part.peak_memory_bytes.length) return memory;
    const rows = memory.rows.map(({ rank, limit_bytes }) => ({ rank, limit_bytes, parts: {}, peak_bytes: shown.part.peak_memory_bytes[rank] ?? null }));
    const num_over = rows.filter(({ peak_bytes, limit_bytes }) => limit_bytes !== null && peak_bytes > limit_bytes).length;
    return { ...memory, origin: shown.part.origin, rows, num_over };
  }

  class View {
    constructor(box) {
      this.rank = -1;
      this.note = element("p", { class: "mw-note" });
      this.legend = element("div");
      this.bars = element("div", { class: "mw-bars", role: "group", "aria-label": "Peak memory of each rank; choose one to see it over time" });
      this.title = element("p", { class: "mw-lead mw-small" });
      this.canvas = element("canvas", { tabindex: "0", role: "img", class: "mw-plot" });
      this.value = element("output", { class: "mw-details", "aria-live": "polite" });
      this.over = element("div", {}, this.title, this.canvas, this.value);
      this.surface = surface(this.canvas, (pen, width, height) => this.draw(pen, width, height));
      this.tableView = tableOf("Table of peak memory", () => this.makeTable());
      box.append(this.note, this.legend, this.bars, this.tableView.element, this.over);
      this.canvas.addEventListener("pointermove", (event) => this.point(event.clientX - this.canvas.getBoundingClientRect().left));
      this.canvas.addEventListener("keydown", (event) => this.key(event));
    }

    get followsTimeline() { return true; }

    update(context) {
      const { result, timelines } = context, shown = shownTimeline(context);
      this.counts = memoryOf(result.memory, shown);
      this.rows = this.counts.rows;
      this.timeline = timelines.find(({ part, memory }) => part.origin === this.counts.origin && memory.some(({ time }) => time.length > 0)) || null;
      const spare = ({ peak_bytes, limit_bytes }) => (limit_bytes === null ? -peak_bytes : limit_bytes - peak_bytes);
      const known = this.rows.filter(({ peak_bytes }) => peak_bytes !== null);
      this.fullest = known.reduce((a, b) => (spare(b) < spare(a) ? b : a));
      if (!this.row(this.rank)) this.rank = this.fullest.rank;
      this.cursor = null;
      this.note.textContent = this.headline();
      const owners = [...new Set(known.flatMap(({ parts }) => byOwner(parts, this.counts.groups).map(([owner]) => owner)))];
      this.legend.replaceChildren(owners.length ? element("ul", { class: "mw-legend", "aria-label": "Colours" }, ...owners.map((owner) =>
        element("li", {}, element("span", { class: `mw-swatch mw-own-${owner}`, "aria-hidden": "true" }), owner))) : "");
      this.drawBars();
      this.choose(this.rank);
      this.tableView.refresh();
    }

    headline() {
      const { rank, peak_bytes, limit_bytes, parts } = this.fullest, { bytes } = Meshwright.format;
      const { num_ranks, num_over } = this.counts;
      const limit = limit_bytes === null ? "" : ` of ${bytes(limit_bytes)}`, most = biggest(parts);
      const fits = limit_bytes === null ? "" : num_over ? ` Does not fit: ${num_over} of ${num_ranks} ranks need more than their limit.` : ` Fits on all ${num_ranks} ranks.`;
      const origin = this.counts.origin ? `${this.counts.origin[0].toUpperCase()}${this.counts.origin.slice(1)}: ` : "";
      return `${origin}${origin ? "f" : "F"}ullest is rank ${rank} with ${bytes(peak_bytes)}${limit}${most ? `, largest part: ${most}` : ""}.${fits}`;
    }

    row(rank) { return this.rows.find((item) => item.rank === rank); }

    // The limit is drawn where it is not far beyond everything else.
    get scale() {
      const peaks = Math.max(...this.rows.map(({ peak_bytes }) => peak_bytes || 0)), limits = Math.max(...this.rows.map(({ limit_bytes }) => limit_bytes || 0));
      return limits && limits < 4 * peaks ? Math.max(limits, peaks) * 1.03 : peaks * 1.08 || 1;
    }

    drawBars() {
      const shown = [...this.rows].filter(({ peak_bytes }) => peak_bytes !== null).slice(0, MAX_BARS), { scale } = this;
      if (!shown.includes(this.fullest)) shown.push(this.fullest);
      this.bars.replaceChildren(...shown.map((row) => this.drawBar(row, scale)));
      if (shown.length < this.counts.num_ranks) this.bars.append(element("p", { class: "mw-note", text: `${shown.length} of ${this.counts.num_ranks} ranks are drawn; the table has more.` }));
    }

    drawBar({ rank, peak_bytes, limit_bytes, parts }, scale) {
      const { bytes } = Meshwright.format, pieces = byOwner(parts, this.counts.groups), whole = pieces.length ? pieces : [["other", peak_bytes]];
      const words = `rank ${rank}: ${bytes(peak_bytes)}${limit_bytes === null ? "" : ` of ${bytes(limit_bytes)}`}${biggest(parts) ? `, largest part: ${biggest(parts)}` : ""}`;
      const over = limit_bytes !== null && peak_bytes > limit_bytes;
      const segments = whole.map(([owner, size]) => element("span", { class: `mw-segment mw-own-${owner}`, style: { width: `${(100 * size) / scale}%` } }));
      const limit = limit_bytes !== null && limit_bytes <= scale ? element("span", { class: "mw-limit", style: { left: `${(100 * limit_bytes) / scale}%` } }) : null;
      return element("button", { type: "button", class: "mw-barrow", "aria-label": words, "aria-pressed": "false", "data-rank": rank, onclick: () => this.choose(rank) },
        element("span", { class: "mw-barname", text: `rank ${rank}` }), element("span", { class: "mw-track" }, ...segments, limit),
        element("span", { class: over ? "mw-barvalue mw-over" : "mw-barvalue", text: `${bytes(peak_bytes)}${over ? " (over)" : ""}` }));
    }

    choose(rank) {
      this.rank = rank;
      for (const bar of this.bars.querySelectorAll("button")) bar.setAttribute("aria-pressed", String(Number(bar.dataset.rank) === rank));
      const series = this.timeline && this.timeline.memory.find((item) => item.rank === rank);
      this.over.hidden = !series || !series.time.length;
      if (this.over.hidden) return;
      this.series = series;
      this.title.textContent = `Rank ${rank} over time`;
      const { peak_bytes, limit_bytes } = this.row(rank), { bytes } = Meshwright.format;
      this.canvas.setAttribute("aria-label", `Memory of rank ${rank} over time: peak ${bytes(peak_bytes)}${limit_bytes === null ? "" : `, limit ${bytes(limit_bytes)}`}; left and right arrow keys read values`);
      this.value.textContent = "";
      this.surface.redraw();
    }

    get margin() { return 70; }
    x(time, width) { return this.margin + (time / this.timeline.duration) * (width - this.margin - 8); }

    draw(pen, width, height) {
      const { series, margin } = this, row = this.row(this.rank), bottom = height - AXIS;
      let most = row.peak_bytes || 0;
      for (const value of series.bytes) if (value > most) most = value;
      const top = row.limit_bytes !== null && row.limit_bytes < 4 * most ? Math.max(row.limit_bytes, most) * 1.06 : most * 1.12 || 1;
      const y = (value) => bottom - (value / top) * (bottom - 8);
      this.drawAxes(pen, width, height, top, y);
      const bands = byOwner(row.parts, this.counts.groups).filter(([owner]) => owner !== VARYING && owner !== "other");
      this.fillSeries(pen, width, y, row.parts && bands.length ? "own-activations" : "own-other");
      let below = 0;
      for (const [owner, size] of bands) {
        pen.fillStyle = colour(`own-${owner}`);
        pen.fillRect(margin, y(below + size), width - margin - 8, y(below) - y(below + size));
        below += size;
      }
      if (row.limit_bytes !== null) this.drawLimit(pen, width, row.limit_bytes, top, y);
      if (this.cursor !== null) { pen.fillStyle = colour("mark"); pen.fillRect(this.x(series.time[this.cursor], width), 8, 1.5, bottom - 8); }
    }

    // A step line; per pixel the largest value of the samples that fall on it.
    fillSeries(pen, width, y, fill) {
      const { series, margin } = this, end = width - 8;
      pen.fillStyle = colour(fill);
      let column = margin, value = series.bytes[0];
      for (let i = 1; i <= series.time.length; i++) {
        const next = Math.round(i < series.time.length ? this.x(series.time[i], width) : end);
        if (next - column >= 1 || i === series.time.length) {
          pen.fillRect(column, y(value), Math.max(next - column, 1), y(0) - y(value));
          column = next;
          value = series.bytes[i];
        } else value = Math.max(value, series.bytes[i]);
      }
    }

    drawLimit(pen, width, limit, top, y) {
      const words = `limit ${Meshwright.format.bytes(limit)}`;
      pen.fillStyle = pen.strokeStyle = colour("limit");
      pen.textAlign = "right";
      if (limit > top) pen.fillText(`${words}, above the picture`, width - 12, 12);
      else {
        pen.setLineDash([6, 4]);
        pen.lineWidth = 1.5;
        pen.beginPath();
        pen.moveTo(this.margin, y(limit));
        pen.lineTo(width - 8, y(limit));
        pen.stroke();
        pen.setLineDash([]);
        pen.fillText(words, width - 12, y(limit) + 10);
      }
      pen.textAlign = "left";
    }

    drawAxes(pen, width, height, top, y) {
      const bottom = height - AXIS, { margin, timeline } = this;
      pen.font = "11px system-ui, sans-serif";
      pen.textBaseline = "middle";
      const step = 2 ** Math.floor(Math.log2(top / 3));
      for (let value = 0; value <= top; value += step) {
        pen.fillStyle = colour("line");
        pen.fillRect(margin, y(value), width - margin - 8, 1);
        pen.fillStyle = colour("muted");
        pen.textAlign = "right";
        pen.fillText(value ? Meshwright.format.bytes(value) : "0", margin - 6, y(value));
      }
      pen.textAlign = "left";
      const unit = timeline.unit_s, marks = spans.ticks(0, timeline.duration * unit, width - margin);
      for (const tick of marks.found) {
        const x = this.x(tick / unit, width);
        if (x < width - 50) pen.fillText(Meshwright.tickText(tick, marks.step), x + 2, bottom + AXIS / 2);
      }
    }

    point(x) {
      const time = ((x - this.margin) / (this.canvas.clientWidth - this.margin - 8)) * this.timeline.duration;
      this.read(Math.max(spans.lowerBound(this.series.time, time, 0, this.series.time.length) - 1, 0));
    }

    key(event) {
      const last = this.series.time.length - 1, now = this.cursor === null ? 0 : this.cursor;
      const places = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last };
      if (!(event.key in places)) return;
      event.preventDefault();
      this.read(Math.min(Math.max(places[event.key], 0), last));
    }

    read(place) {
      this.cursor = place;
      const { seconds, bytes } = Meshwright.format;
      this.value.textContent = `rank ${this.rank} from ${seconds(this.series.time[place] * this.timeline.unit_s)}: ${bytes(this.series.bytes[place])}`;
      this.surface.redraw();
    }

    makeTable() {
      const names = [...new Set(this.rows.flatMap(({ parts }) => Object.keys(parts)))];
      return table(this.rows.map(({ rank, peak_bytes, limit_bytes, parts }) => ({
        rank, peak_bytes, limit_bytes, "largest part": biggest(parts) || null, ...Object.fromEntries(names.map((name) => [`${name}_bytes`, parts[name] || 0])) })),
      { caption: "Peak memory by owner" });
    }

    redraw() { if (!this.over.hidden) this.surface.redraw(); }
    paint() { if (!this.over.hidden) this.surface.paint(); }
  }
})();
