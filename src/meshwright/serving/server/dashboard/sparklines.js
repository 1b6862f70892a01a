"use strict";
// A line of recent values, second by second, with a text alternative.
Dashboard.sparkline = (() => {
  const WIDTH = 120, HEIGHT = 30, LEAST = 60;

  // The path of values, the last at the right end; null is a gap. The axis starts at zero.
  function pathOf(values) {
    const steps = Math.max(values.length, LEAST) - 1;
    const top = Math.max(...values.filter((value) => value !== null), Number.MIN_VALUE);
    let path = "", isOpen = false;
    values.forEach((value, place) => {
      if (value === null) { isOpen = false; return; }
      const x = WIDTH - ((values.length - 1 - place) * WIDTH) / steps;
      const y = HEIGHT - 1 - (value / top) * (HEIGHT - 2);
      path += `${isOpen ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
      if (!isOpen && (place + 1 === values.length || values[place + 1] === null)) path += "h0.5";
      isOpen = true;
    });
    return path;
  }

  // An element, and a function that draws values into it.
  function sparkline(name, say) {
    const line = Meshwright.svg("path"), title = Meshwright.svg("title");
    const ground = Meshwright.svg("path", { class: "db-ground", d: `M0 ${HEIGHT - 0.5}H${WIDTH}` });
    const element = Meshwright.svg("svg", { class: "db-line", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" }, title, ground, line);
    function update(values) {
      line.setAttribute("d", pathOf(values));
      const known = values.filter((value) => value !== null);
      const words = known.length ? `from ${say(Math.min(...known))} to ${say(Math.max(...known))}, now ${say(known[known.length - 1])}` : "nothing yet";
      const text = `${name} in the last ${Math.round(values.length)} s: ${words}`;
      if (title.textContent !== text) { title.textContent = text; element.setAttribute("aria-label", text); }
    }
    return { element, update };
  }

  return Object.assign(sparkline, { pathOf });
})();
