"use strict";
// The page: requests /status each second and shows it. Names are inserted as text only.
Dashboard.page = (() => {
  const EVERY_MS = 1000, PATIENCE_MS = 4000, WINDOW = 5, MOST = 180;
  const { element, format } = Meshwright;
  const find = (id) => document.getElementById(id);
  const orNothing = (say) => (value) => (value === null || value === undefined ? "–" : say(value));
  const number = orNothing((value) => (value >= 999.5 ? format.count(Math.round(value)) : format.general(value, 3)));
  const seconds = orNothing(format.seconds), percent = orNothing(format.percent), bytes = orNothing(format.bytes);
  const drops = (pairs) => (pairs.length ? pairs.map(([reason, rate]) => `${reason} ${format.general(rate, 2)}/s`).join(", ") : "none");

  // Status documents, the newest last, all of different moments.
  const documents = [];
  // Values of sparklines by name: one for each document.
  const history = new Map();
  let isPaused = false, since = null, count = 0;

  // --- figures ----------------------------------------------------------------------------------------------------

  // name; value from a document and the changes between two; format; text below; whether it has a sparkline
  const FIGURES = [
    ["Requests per second", (_, { total }) => total.requests_per_s, number, null, true],
    ["In time", (_, { total }) => total.in_time_share, percent, () => "done, of all samples", true],
    ["p50", (_, { total }) => total.p50_s, seconds, () => "first byte to answer", true],
    ["p99", (_, { total }) => total.p99_s, seconds, () => "first byte to answer", true],
    ["Mean batch", (_, { total }) => total.mean_batch, number, (_, { total }) => `${number(total.batches_per_s)} batches/s`, true],
    ["Queued samples", (status) => status.queued, number, null, true],
    ["Devices up", (status) => status.up, (value) => String(value), (status) => `of ${status.devices}; ${status.idle} idle`, true],
    ["Connections", (status) => status.connections, number, null, true],
    ["Slack", (status) => status.slack_s, seconds, () => "batches end earlier", false],
    ["Guard", (status) => status.guard_s, seconds, () => "timers fire later", false],
    ["Delay", (status) => status.delay_s, seconds, () => "decision to start", false],
  ];

  function put(node, text) {
    if (node.textContent !== text) node.textContent = text;
  }

  function makeFigure([name, value, say, below, hasLine]) {
    const shown = element("dd"), small = element("small");
    const line = hasLine ? Dashboard.sparkline(name, say) : null;
    const children = [element("dt", { text: name }), shown, element("dd", { class: "db-below" }, small, line && line.element)];
    find("figures").append(element("div", { class: "mw-figure" }, ...children));
    return (status, window) => {
      put(shown, say(value(status, window)));
      put(small, below ? below(status, window) : "");
      if (line) line.update(history.get(name) || []);
    };
  }

  // --- tables -----------------------------------------------------------------------------------------------------

  // heading; class; content of the cell: a function of the row, or null for a sparkline
  const MODELS = [
    ["Model", "db-name", (row) => row.model],
    ["SLO", "mw-number", (row) => seconds(row.slo_s)],
    ["Requests/s", "mw-number", (row) => number(row.requests_per_s)],
    ["So far", "", null],
    ["In time", "mw-number", (row) => percent(row.in_time_share)],
    ["p50", "mw-number", (row) => seconds(row.p50_s)],
    ["p99", "mw-number", (row) => seconds(row.p99_s)],
    ["Mean batch", "mw-number", (row) => number(row.mean_batch)],
    ["Not done, by reason", "db-drops", (row) => drops(row.drops)],
  ];
  const PROCESSES = [
    ["Process", "db-name", (row) => row.process],
    ["Id", "mw-number", (row) => String(row.pid)],
    ["CPU", "mw-number", (row) => percent(row.cpu_share)],
    ["Memory", "mw-number", (row) => bytes(row.memory_bytes)],
    ["Restarts", "mw-number", (row) => String(row.restarts)],
  ];

  // A table whose rows stay the same elements, so that what is read or chosen in it stays.
  function makeTable(table, caption, columns, keyOf) {
    const body = element("tbody"), rows = new Map();
    const head = columns.map(([name, kind]) => element("th", { scope: "col", class: kind === "mw-number" ? kind : undefined, text: name }));
    table.append(element("caption", { class: "mw-hidden", text: caption }), element("thead", {}, element("tr", {}, ...head)), body);
    function make(key) {
      const cells = columns.map(([, kind, fill], place) => element(place ? "td" : "th", { class: kind || undefined, scope: place ? undefined : "row" }));
      const lines = columns.map(([name, , fill], place) => {
        if (fill) return null;
        const line = Dashboard.sparkline(`Requests per second of ${key}`, number);
        cells[place].append(line.element);
        return line;
      });
      return { row: element("tr", {}, ...cells), cells, lines };
    }
    return (found) => {
      const keys = new Set(found.map(keyOf));
      for (const [key, made] of rows) if (!keys.has(key)) { made.row.remove(); rows.delete(key); }
      found.forEach((item, place) => {
        const key = keyOf(item);
        if (!rows.has(key)) rows.set(key, make(key));
        const { row, cells, lines } = rows.get(key);
        if (body.children[place] !== row) body.insertBefore(row, body.children[place] || null);
        columns.forEach(([, , fill], column) => {
          if (fill) put(cells[column], fill(item));
          else lines[column].update(history.get(`model ${key}`) || []);
        });
      });
    };
  }

  // --- time -------------------------------------------------------------------------------------------------------

  function keep(name, value) {
    if (!history.has(name)) history.set(name, []);
    const values = history.get(name);
    values.push(value === undefined ? null : value);
    if (values.length > MOST) values.shift();
  }

  // Take a new document. Only values newer than the last ones are added to the sparklines.
  function take(status) {
    const last = documents[documents.length - 1];
    const step = last ? Dashboard.figures.between(last, status) : null;
    if (step && !step.is_new) documents[documents.length - 1] = status;
    else documents.push(status);
    if (documents.length > WINDOW + 1) documents.shift();
    if (step && step.is_new) {
      for (const [name, value, , , hasLine] of FIGURES) if (hasLine) keep(name, value(status, step));
      for (const row of step.models) keep(`model ${row.model}`, row.requests_per_s);
    }
    show(status, Dashboard.figures.between(documents[0], status));
  }

  let figures = null, models = null, processes = null;

  function show(status, window) {
    for (const update of figures) update(status, window);
    models(window.models);
    processes(window.processes);
    const span = Math.round(status.time_s - documents[0].time_s);
    put(find("basis"), span ? `Rates, shares and latencies are those of the last ${span} s; lines show the last 3 min at most, on an axis that starts at zero.` : "Rates follow in a second.");
    put(find("version"), `Meshwright ${status.version}`);
    say(status.ready ? "ready" : "not-ready", `${status.ready ? "Ready" : "Not ready"}, policy ${status.policy}`);
    document.title = `${status.ready ? "Ready" : "Not ready"} · Meshwright server`;
  }

  function say(state, words) {
    find("state").dataset.state = state;
    put(find("state-words"), words);
  }

  function reach(problem) {
    const message = find("message");
    if (!problem) {
      since = null;
      message.hidden = true;
      find("answer").classList.remove("db-stale");
      return;
    }
    if (since) return;
    since = new Date();
    find("answer").classList.add("db-stale");
    say("unreachable", "Unreachable");
    document.title = "Unreachable · Meshwright server";
    message.hidden = false;
    put(message, `The server has not answered since ${since.toLocaleTimeString()} (${problem}). The values shown are older; this is retried each second.`);
  }

  async function ask() {
    const controller = new AbortController();
    const timer = setTimeout(() => controller.abort(), PATIENCE_MS);
    try {
      const answer = await fetch("status", { signal: controller.signal, cache: "no-store" });
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      const status = await answer.json();
      reach(null);
      take(status);
    } catch (error) {
      reach(error.name === "AbortError" ? `nothing within ${PATIENCE_MS / 1000} s` : error.message);
    } finally {
      clearTimeout(timer);
      count += 1;
    }
  }

  async function goOn() {
    const begin = performance.now();
    if (!isPaused) await ask();
    setTimeout(goOn, Math.max(EVERY_MS - (performance.now() - begin), 50));
  }

  function pause() {
    isPaused = !isPaused;
    find("pause").setAttribute("aria-pressed", String(isPaused));
    // A sparkline cannot show a time without documents.
    if (!isPaused) documents.length = 0;
  }

  function start() {
    figures = FIGURES.map(makeFigure);
    models = makeTable(find("models"), "Models", MODELS, (row) => row.model);
    processes = makeTable(find("processes"), "Processes", PROCESSES, (row) => row.process);
    find("pause").addEventListener("click", pause);
    find("tools").append(Meshwright.themeButton());
    return goOn();
  }

  return { start, get count() { return count; } };
})();
Dashboard.page.start();
