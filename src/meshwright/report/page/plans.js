"use strict";
// The plans that were found: step time × peak memory × samples/s, the Pareto front marked, one plan chosen at a time.
(() => {
  const { element, svg, part, table } = Meshwright;
  // What the line above the figures says already.
  const HEADLINE = ["place", "plan", "schedule", "num_stages", "replicas", "num_microbatches", "microbatch_size"];
  const HEIGHT = 380, LEFT = 72, RIGHT = 20, TOP = 24, BOTTOM = 46, MAX_WIDTH = 860;

  part("plans", "The plans found", {
    has: ({ page }) => Boolean(page.plans && page.plans.rows.length),
    create(box, context) {
      const body = element("div");
      box.append(body);
      const view = { update: (next) => { view.context = next; view.width = body.clientWidth; refill(body, next); }, redraw() {} };
      // Redrawn where the width changes, so that its writing stays readable.
      new ResizeObserver(() => { if (body.clientWidth !== view.width) view.update(view.context); }).observe(body);
      view.update(context);
      return view;
    },
  });

  // What had the focus keeps it, so that choosing by keyboard can go on.
  function refill(body, context) {
    const focused = document.activeElement && body.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    body.replaceChildren(...draw(context, Math.max(Math.min(body.clientWidth, MAX_WIDTH), 280)));
    const again = focused && body.querySelector(`[data-key="${focused}"]`);
    if (again) again.focus();
  }

  function draw({ page, selected, select }, width) {
    const { rows, front, limit_bytes } = page.plans;
    const chosen = Math.min(selected, rows.length - 1), canSelect = (place) => place < page.results.length;
    const row = rows[chosen];
    return [
      element("p", { class: "mw-note", text: `Ringed plans are on the Pareto front: no other plan is at least as good in step time, peak memory and samples/s, and better in one of these. Larger circles process more samples/s. ${page.results.length > 1 ? "Choose a plan to see it in the whole page." : ""}` }),
      picture(rows, front, limit_bytes, chosen, (place) => canSelect(place) && select(place), canSelect, width),
      element("p", { class: "mw-lead mw-small", role: "status", text: `Plan ${row.place}: ${row.plan}` }),
      figures(row),
      table(rows.map((item, place) => ({ ...brief(item), front: front.includes(place) })), { caption: "All plans", mark: (_, place) => (place === chosen ? { class: "mw-chosen", "aria-current": "true" } : {}) }),
    ];
  }

  function figures(row) {
    const pairs = Object.entries(row).filter(([key, value]) => !HEADLINE.includes(key) && value !== null);
    return element("dl", { class: "mw-pairs" }, ...pairs.map(([key, value]) => element("div", {},
      element("dt", { text: Meshwright.format.heading(key) }), element("dd", { text: Meshwright.format.cell(key, value) }))));
  }

  function brief({ place, plan, step_time_s, samples_per_s, peak_memory_bytes, bubble_share, mfu_share }) {
    return { place, plan, step_time_s, samples_per_s, peak_memory_bytes, bubble_share, mfu_share };
  }

  function range(values) {
    const low = Math.min(...values), high = Math.max(...values), pad = (high - low || high || 1) * 0.12;
    return [Math.max(low - pad, 0), high + pad];
  }

  function picture(rows, front, limit, chosen, choose, canSelect, width) {
    const [left, right] = range(rows.map(({ step_time_s }) => step_time_s)), peaks = rows.map(({ peak_memory_bytes }) => peak_memory_bytes);
    const [low, high] = range(limit && limit < 2 * Math.max(...peaks) ? [...peaks, limit] : peaks);
    const x = (value) => LEFT + ((value - left) / (right - left)) * (width - LEFT - RIGHT), y = (value) => HEIGHT - BOTTOM - ((value - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
    const fastest = Math.max(...rows.map(({ samples_per_s }) => samples_per_s)) || 1;
    const axes = [...axis(left, right, x, true, width), ...axis(low, high, y, false, width),
      svg("text", { x: (LEFT + width - RIGHT) / 2, y: HEIGHT - 8, "text-anchor": "middle", class: "mw-axis", text: "step time" }),
      svg("text", { x: 12, y: TOP - 6, class: "mw-axis", text: "peak memory" })];
    const sorted = front.map((place) => rows[place]).sort((a, b) => a.step_time_s - b.step_time_s);
    const line = svg("path", { class: "mw-front", d: sorted.map((row, i) => `${i ? "L" : "M"}${x(row.step_time_s).toFixed(1)} ${y(row.peak_memory_bytes).toFixed(1)}`).join("") });
    const bound = limit && limit <= high ? [svg("line", { x1: LEFT, x2: width - RIGHT, y1: y(limit), y2: y(limit), class: "mw-limit-line" }),
      svg("text", { x: width - RIGHT, y: y(limit) - 6, "text-anchor": "end", class: "mw-axis", text: `limit ${Meshwright.format.bytes(limit)}` })] : [];
    // The best plan is drawn last, above its neighbours.
    const dots = rows.map((row, place) => dot(row, place, { cx: x(row.step_time_s), cy: y(row.peak_memory_bytes), r: 8 + 6 * Math.sqrt(row.samples_per_s / fastest) },
      { onFront: front.includes(place), chosen: place === chosen, choose, able: canSelect(place) })).reverse();
    const image = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, class: "mw-pareto", role: "group", "aria-label": "Plans by step time and peak memory; the table below says the same" }, ...axes, line, ...bound, ...dots);
    return image;
  }

  function dot(row, place, { cx, cy, r }, { onFront, chosen, choose, able }) {
    const { seconds, bytes, general } = Meshwright.format;
    const words = `Plan ${row.place}${onFront ? ", on the front" : ""}: ${row.plan}; step ${seconds(row.step_time_s)}, ${bytes(row.peak_memory_bytes)}, ${general(row.samples_per_s, 4)} samples/s`;
    const act = able ? { tabindex: "0", onclick: () => choose(place), onkeydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(place); } } } : {};
    return svg("g", { role: able ? "button" : "img", "aria-label": words, "aria-pressed": able ? String(chosen) : null, "data-key": `plan-${place}`,
      class: `mw-dot${onFront ? " mw-on-front" : ""}${chosen ? " mw-dot-chosen" : ""}`, ...act },
    svg("title", { text: words }), svg("circle", { cx, cy, r }), svg("text", { x: cx, y: cy + 4, "text-anchor": "middle", text: String(row.place) }));
  }

  function axis(from, to, place, across, width) {
    const made = [];
    const step = across ? Meshwright.spans.ticks(from, to, width - LEFT - RIGHT).step : 2 ** Math.round(Math.log2((to - from) / 4));
    for (let value = Math.ceil(from / step) * step; value <= to; value += step) {
      const at = place(value);
      made.push(across ? svg("line", { x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM, class: "mw-rule" }) : svg("line", { x1: LEFT, x2: width - RIGHT, y1: at, y2: at, class: "mw-rule" }),
        across ? svg("text", { x: at, y: HEIGHT - BOTTOM + 16, "text-anchor": "middle", class: "mw-axis", text: Meshwright.tickText(value, step) })
          : svg("text", { x: LEFT - 8, y: at + 4, "text-anchor": "end", class: "mw-axis", text: value ? Meshwright.format.bytes(value) : "0" }));
    }
    return made;
  }
})();
