"use strict";
// The headline: figures, what is wrong, and the difference from the pinned state.
const Figures = (() => {
  const { element, format } = Meshwright;
  // key, label, whether more is better
  const ROWS = [
    ["step_time_s", "Step time", false],
    ["samples_per_s", "Samples/s", true],
    ["tokens_per_s", "Tokens/s", true],
    ["bubble_share", "Bubble", false],
    ["peak_memory_bytes", "Peak memory", false],
    ["mfu_share", "MFU", true],
  ];
  const byId = (id) => document.getElementById(id);

  const figure = (key, value) => (key === "tokens_per_s" && value >= 1000 ? format.count(Math.round(value)) : format.cell(key, value));

  // What stands beside a figure, small.
  function beside(key, figures) {
    if (key === "peak_memory_bytes") return `${format.bytes(figures.reserved_memory_bytes)} reserved of ${format.bytes(figures.memory_limit_bytes)}`;
    if (key === "samples_per_s" && figures.sequence_length !== null) return `of ${format.count(figures.sequence_length)} tokens`;
    if (key === "tokens_per_s") return `${figure(key, figures.tokens_per_device_per_s)} per device`;
    if (key === "mfu_share") return `on ${format.count(figures.num_devices)} device${figures.num_devices === 1 ? "" : "s"}`;
    return "";
  }

  // Shares differ in points, everything else by a share of the pinned value.
  function difference(key, now, then, moreIsBetter) {
    if (now === null || then === null || now === then) return element("span", { class: "pg-same", text: "as pinned" });
    const points = key.endsWith("_share");
    const change = points ? now - then : now / then - 1;
    const sign = change > 0 ? "+" : "−";
    const size = points ? `${(100 * Math.abs(change)).toFixed(1)} points` : format.percent(Math.abs(change));
    const better = (change > 0) === moreIsBetter;
    return element("span", { class: better ? "pg-better" : "pg-worse", text: `${sign}${size} ${better ? "better" : "worse"}` });
  }

  function update(data) {
    const { figures, pinned } = data;
    const then = pinned && pinned.figures;
    const rows = ROWS.filter(([key]) => key !== "tokens_per_s" || figures[key] !== null);
    byId("figures").replaceChildren(...rows.map(([key, label, moreIsBetter]) => element("div", { class: "pg-figure", "data-key": key },
      element("dt", { text: label }),
      element("dd", {},
        element("b", { id: `figure-${key}`, text: figure(key, figures[key]) }),
        key === "step_time_s" ? element("span", { class: "pg-limit", id: "interval", text: "80 %: …" }) : null,
        beside(key, figures) ? element("span", { class: "pg-limit", text: beside(key, figures) }) : null,
        then ? difference(key, figures[key], then[key], moreIsBetter) : null))));
    byId("status").textContent = `Step time ${format.seconds(figures.step_time_s)}, ${data.status === "fits" ? "fits" : "does not fit"}.`;
    say(data.message);
    showPinned(pinned);
  }

  // The interval comes later than the figures; what it is worth is said where one points at it.
  function showInterval(data) {
    const place = byId("interval");
    if (!place || data.status !== "interval") return;
    place.textContent = `80 %: ${format.seconds(data.low_s)} to ${format.seconds(data.high_s)}`;
    place.title = data.words;
  }

  function say(message) {
    const box = byId("message");
    box.hidden = !message;
    if (box.textContent !== message) box.textContent = message;
  }

  function showPinned(pinned) {
    const box = byId("pinned");
    box.hidden = !pinned;
    if (!pinned) return;
    let what = "A state is pinned; the next one that has a plan is compared with it.";
    if (pinned.message) what = `The pinned state does not work: ${pinned.message}`;
    else if (pinned.figures) what = `Pinned: ${pinned.words}, ${format.seconds(pinned.figures.step_time_s)}. ${pinned.difference}`;
    box.replaceChildren(element("span", { text: what }),
      element("button", { type: "button", class: "mw-button", id: "unpin", text: "Unpin", onclick: () => box.dispatchEvent(new Event("unpin")) }),
      element("button", { type: "button", class: "mw-button", id: "recall", text: "Go to it", onclick: () => box.dispatchEvent(new Event("recall")) }));
  }

  return { update, say, showInterval, showPinned };
})();
