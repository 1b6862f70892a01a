"use strict";
// Predicted beside measured: the step, each kind of instruction with the interval of its durations, ranks, order.
(() => {
  const { element, svg, part, table } = Meshwright;
  const MAX_WIDTH = 720, TOP = 26;
  // Where there is room, names stand beside the marks, else above them.
  const WIDE = { row: 26, left: 190, right: 90, beside: true }, NARROW = { row: 42, left: 6, right: 66, beside: false };

  part("comparison", "Predicted and measured", {
    has: ({ page }) => Boolean(page.comparison),
    create(box, context) {
      const body = element("div");
      box.append(body);
      const view = { redraw() {} };
      view.update = (next) => {
        view.context = next;
        view.width = body.clientWidth;
        body.replaceChildren(...draw(next.page.comparison, Math.max(Math.min(body.clientWidth, MAX_WIDTH), 240)));
      };
      new ResizeObserver(() => { if (body.clientWidth !== view.width) view.update(view.context); }).observe(body);
      view.update(context);
      return view;
    },
  });

  function draw({ step, ranks, instructions, same_order, differences }, width) {
    const { seconds, signedPercent, percent } = Meshwright.format;
    const error = step.relative_error === null ? "" : ` (${signedPercent(step.relative_error)})`;
    const headline = `A step was predicted to take ${seconds(step.predicted_s)} and took ${seconds(step.measured_s)}${error}, ` +
      `the median of ${step.num_steps} ${step.num_steps === 1 ? "step" : "steps"} that spread by ${percent(step.measured_spread)}.`;
    const order = same_order ? "Every stream issued its instructions in the predicted order." : "The order differs from the predicted one:";
    const rows = [{ name: "step", predicted_s: step.predicted_s, measured_s: step.measured_s, relative_error: step.relative_error, measured_interval_s: step.measured_interval_s },
      ...instructions.map((row) => ({ ...row, name: `${row.opcode.replaceAll("_", " ")}, stage ${row.stage}` }))];
    return [
      element("p", { class: "mw-lead mw-small", text: headline }),
      picture(rows, width),
      element("p", { class: "mw-note", text: "Each row has its own scale, from 0. A hollow mark is predicted, a filled one measured; the bar holds the middle 80 % of the measured times, " +
        "the thin line the middle 80 % of the predicted times. A measured transfer includes the time of waiting for the other rank." }),
      element("p", { text: order }),
      ...(differences.length ? [element("ul", {}, ...differences.slice(0, 20).map((text) => element("li", { text })))] : []),
      table([step], { caption: "Step", hide: ["measured_interval_s"] }),
      table(instructions.map(withIntervals), { caption: "Median of each kind of instruction" }),
      table(ranks, { caption: "Busy seconds per step and peak memory of each rank" }),
    ];
  }

  function withIntervals({ predicted_interval_s, measured_interval_s, ...row }) {
    const [low, high] = measured_interval_s || [null, null], [least, most] = predicted_interval_s || [null, null];
    return { ...row, predicted_p10_s: least, predicted_p90_s: most, measured_p10_s: low, measured_p90_s: high };
  }

  function picture(rows, width) {
    const form = width < 560 ? NARROW : WIDE, height = TOP + rows.length * form.row + 6;
    const marks = rows.flatMap((row, place) => drawRow(row, TOP + place * form.row, width, form));
    const heads = [svg("text", { x: form.left, y: 14, class: "mw-axis", text: "0" }), svg("text", { x: width - form.right + 8, y: 14, class: "mw-axis", text: "error" })];
    return svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img",
      "aria-label": "Predicted and measured times of the step and of each kind of instruction; the tables below say the same" }, ...heads, ...marks);
  }

  function drawRow(row, y, width, { row: tall, left, right, beside }) {
    const { predicted_interval_s: ours, measured_interval_s: theirs, predicted_s, measured_s } = row;
    const most = Math.max(predicted_s || 0, measured_s || 0, ...(ours || [0]), ...(theirs || [0])) * 1.04 || 1, room = width - left - right;
    const x = (value) => left + (value / most) * room, middle = beside ? y + tall / 2 : y + tall - 12;
    const name = beside ? { x: left - 10, y: middle + 4, "text-anchor": "end" } : { x: left, y: y + 14 };
    const made = [svg("text", { ...name, text: row.name }), svg("line", { x1: left, x2: left + room, y1: middle, y2: middle, class: "mw-rule" })];
    if (theirs) made.push(svg("rect", { x: x(theirs[0]), y: middle - 5, width: Math.max(x(theirs[1]) - x(theirs[0]), 2), height: 10, class: "mw-interval" }));
    if (ours) made.push(svg("line", { x1: x(ours[0]), x2: x(ours[1]), y1: middle, y2: middle, class: "mw-predicted" }));
    if (measured_s !== null) made.push(svg("circle", { cx: x(measured_s), cy: middle, r: 5, class: "mw-measured" }));
    if (predicted_s !== null) made.push(svg("circle", { cx: x(predicted_s), cy: middle, r: 5, class: "mw-predicted" }));
    if (row.relative_error !== null) made.push(svg("text", { x: width - right + 8, y: middle + 4, text: Meshwright.format.signedPercent(row.relative_error) }));
    return made;
  }
})();
