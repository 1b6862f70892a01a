"use strict";
// The page: a change of a control becomes a request, its answer becomes the picture and the link.
const Playground = (() => {
  const { element } = Meshwright;
  const byId = (id) => document.getElementById(id);
  const PAGE = crypto.randomUUID();
  const PARTS = ["explanation", "timeline", "memory", "cluster", "schedule"];
  const FILES = [["plan.json", "Plan"], ["trace.json", "Trace"], ["report.html", "Report"]];
  let cuts = "balanced", pinned = "", query = "", start = "", number = 0;
  // A moment without changes, after which the interval of the step time is asked for.
  const QUIET_MS = 400;
  // So long an answer may take before the page says that it is being computed.
  const PATIENCE_MS = 150;
  let quiet = 0, patience = 0;
  let busy = false, waiting = null, drawn = false, asked = "";
  // The last response, for whoever measures: from the event of a control to the painted answer.
  const last = { server_ms: null, total_ms: null, number: 0 };

  async function post(path, data) {
    const sent = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(data) };
    try {
      return await (await fetch(path.slice(1), sent)).json();
    } catch {
      return { status: "impossible", message: "The server does not answer. Start it again: meshwright show --play." };
    }
  }

  // One request under way, and the newest change behind it; what lies between is never sent.
  async function ask(text, since) {
    asked = text;
    waiting = { text, since };
    if (busy) return;
    busy = true;
    clearTimeout(quiet);
    setBusy(true);
    while (waiting) {
      const { text: now, since: begin } = waiting;
      waiting = null;
      number += 1;
      const reply = await post("/answer", { query: now, pinned, page: PAGE, number });
      if (reply.status !== "stale") await show(reply, now, begin);
    }
    busy = false;
    setBusy(false);
    quiet = setTimeout(weigh, QUIET_MS, query);
  }

  // Answers that come at once need no word; "computing" would only flicker.
  function setBusy(isBusy) {
    clearTimeout(patience);
    for (const id of ["answer", "figures"]) byId(id).setAttribute("aria-busy", String(isBusy));
    const tell = () => { byId("busy").textContent = isBusy ? "computing …" : ""; };
    if (isBusy && drawn) patience = setTimeout(tell, PATIENCE_MS);
    else tell();
  }

  // Two more simulations, so they wait until nobody moves a control.
  async function weigh(text) {
    if (busy || byId("answer").classList.contains("pg-stale")) return;
    const reply = await post("/interval", { query: text });
    if (!busy && text === query) Figures.showInterval(reply);
  }

  async function show(reply, text, since) {
    const isPicture = reply.status === "fits" || reply.status === "too large";
    byId("answer").classList.toggle("pg-stale", !isPicture);
    byId("figures").classList.toggle("pg-stale", !isPicture);
    byId("answer").classList.toggle("pg-tight", reply.status === "too large");
    query = reply.query || text;
    setLink();
    setTools(isPicture);
    if (!isPicture) {
      Figures.say(reply.message || "The state cannot be shown.");
      Figures.showPinned(pinned ? { query: pinned } : null);
      byId("status").textContent = "";
    } else {
      Figures.update(reply);
      Cuts.update(reply.layers);
      byId("basis").textContent = [reply.document.results[0].basis, reply.carried].filter(Boolean).join(" ");
      if (drawn) await Meshwright.update(byId("views"), reply.document);
      else await Meshwright.render(byId("views"), reply.document, { parts: PARTS });
      drawn = true;
      document.title = `${reply.document.title} · Meshwright playground`;
    }
    last.number += 1;
    last.server_ms = reply.answered_in_s === undefined ? null : 1000 * reply.answered_in_s;
    last.total_ms = performance.now() - since;
    byId("timing").textContent = last.server_ms === null ? "" : `Answered in ${last.total_ms.toFixed(0)} ms, of which the server ${last.server_ms.toFixed(0)} ms.`;
  }

  function setLink() {
    const link = pinned ? `${query}&pinned=${encodeURIComponent(pinned)}` : query;
    history.replaceState(null, "", `?${link}`);
  }

  // A state without a plan has nothing to save or to compare with.
  function setTools(isPicture) {
    byId("pin").disabled = !isPicture;
    for (const [file] of FILES) {
      const link = byId(`save-${file}`);
      if (isPicture) link.href = `${file}?${query}`;
      else link.removeAttribute("href");
      link.setAttribute("aria-disabled", String(!isPicture));
    }
  }

  // A control may tell twice of one change.
  function change(since) {
    const text = Controls.read(cuts);
    if (text !== asked) ask(text, since);
  }

  function go(text, since) {
    cuts = Controls.set(text);
    ask(Controls.read(cuts), since);
  }

  function pin() {
    pinned = query;
    ask(query, performance.now());
  }

  function tools() {
    const button = (id, text, onclick) => element("button", { type: "button", class: "mw-button", id, text, onclick });
    const copy = button("copy-link", "Copy link", async () => {
      await navigator.clipboard.writeText(location.href);
      copy.textContent = "Copied";
      setTimeout(() => { copy.textContent = "Copy link"; }, 1500);
    });
    byId("tools").append(
      Search.button(), button("pin", "Pin to compare", pin), copy,
      ...FILES.map(([file, name]) => element("a", { class: "mw-button", id: `save-${file}`, download: file, text: `Save ${name.toLowerCase()}`, title: file })),
      button("reset", "Start again", () => { pinned = ""; go(start, performance.now()); }),
      Meshwright.themeButton());
    setTools(false);
  }

  // The page's own state with what a link names; what it names wrongly or twice stays, so that the server says so.
  function complete(link) {
    const whole = new URLSearchParams(start);
    // Cuts belong to the layers and stages that they were made for.
    if (["kind", "model", "stages"].some((name) => link.has(name))) whole.set("cuts", "balanced");
    for (const name of link.keys()) whole.delete(name);
    for (const [name, value] of link) whole.append(name, value);
    return whole.toString();
  }

  function open(offered) {
    const link = new URLSearchParams(location.search);
    start = offered.start;
    pinned = link.get("pinned") ? complete(new URLSearchParams(link.get("pinned"))) : "";
    link.delete("pinned");
    // First the page's own state, for a control that cannot hold what the link says.
    cuts = Controls.set(start);
    if (!link.size) return ask(Controls.read(cuts), performance.now());
    const whole = complete(link);
    cuts = Controls.set(whole);
    return ask(whole, performance.now());
  }

  async function begin() {
    setBusy(true);
    const offered = await (await fetch("options")).json();
    tools();
    Controls.build(byId("controls"), offered, (event) => {
      if (["kind", "model", "stages"].some((name) => event.target.id === `control-${name}`)) cuts = "balanced";
      change(event.timeStamp);
    });
    Cuts.build((text, event) => { cuts = text; change(event.timeStamp); });
    Search.build({ post, query: () => query, show: (text, event) => go(text, event.timeStamp) });
    byId("pinned").addEventListener("unpin", () => { pinned = ""; ask(query, performance.now()); });
    byId("pinned").addEventListener("recall", () => go(pinned, performance.now()));
    window.addEventListener("popstate", () => location.reload());
    await open(offered);
  }

  begin();
  return { last };
})();
