// Builds the page, and again when another run is chosen.

function section(id, title, lead, ...children) {
  return el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title),
    lead ? el("p", { class: "lead" }, lead) : null, children);
}

function summarySection(data, run, showRun) {
  const picker = data.runs.length > 1 ? select("Run", data.runs.map((one, n) => [String(n), visible(one.name)]),
    String(data.runs.indexOf(run)), (value) => {
      showRun(Number(value));
      document.getElementById("summary").scrollIntoView(); // it is below the comparison
    }).node : null;
  const tiles = () => run.tiles.map((tile) => el("div", { class: "tile" }, el("span", { class: "tile-name" }, tile.name),
    el("span", { class: "tile-value" }, tile.value), el("span", { class: "tile-from" }, tile.from)));
  const notes = () => (run.notes.length ? [el("div", { class: "note", role: "note" }, el("b", {}, "Missing or left out"),
    el("ul", {}, run.notes.map((note) => el("li", {}, note))))] : []);
  const parts = [[el("div", { class: "tiles" }), tiles], [el("p", { class: "summary-text" }), () => withCode(run.summary.join(" "))],
    [el("div", {}), notes]];
  const draw = () => parts.forEach(([node, children]) => refill(node, children()));
  draw();
  growth.push(draw);
  return el("section", { id: "summary", "aria-labelledby": "summary-title" }, picker,
    el(data.groups.length ? "h2" : "h1", { id: "summary-title" }, run.name), el("p", { class: "lead" }, run.title), parts.map(([node]) => node));
}

function configSection(run) {
  const facts = el("table", { class: "facts wide" }, el("tbody", {}, run.facts.map((fact) => el("tr", {},
    el("th", { scope: "row" }, fact.name), el("td", {}, fact.value)))));
  return section("configuration", "Configuration", run.config ? null : "There is no configuration to show.", facts,
    run.config ? el("details", { open: true }, el("summary", {}, "config.toml"), el("pre", { class: "text", tabindex: "0" }, run.config)) : null);
}

const footer = () => el("footer", {}, source ? source.footer : "Made by trimtab. This file is complete: it loads nothing from the network.");

// A link to a token is a fragment of the address: `#run=0&step=40&response=3&token=17`.
const tokenLink = (run, entry, token) => `#run=${run}&step=${entry.step}&response=${entry.response}&token=${entry.start + token}`;

function linkedToken() {
  const given = new URLSearchParams(location.hash.slice(1));
  const numbers = ["run", "step", "response", "token"].map((name) => Number.parseInt(given.get(name) ?? "0", 10));
  return given.has("step") && numbers.every((n) => n >= 0) ? numbers : null;
}

function start() {
  const data = parseBlock("data");
  reasonTable = data.reasons;
  callOutcomes = new Map(Object.entries(data.call_outcomes || {}));
  conversationEnds = new Map(Object.entries(data.conversation_ends || {}));
  const main = document.getElementById("main");
  const nav = document.getElementById("sections");
  const button = document.getElementById("theme");
  let repaint = () => {};

  function linkSections(...more) {
    const titled = [...main.querySelectorAll("section")].filter((node) => node.querySelector("h2"));
    const links = titled.map((node) => [node.id, node.id === "summary" ? "Run" : node.querySelector("h2").textContent]);
    links.splice(-1, 0, ...more);
    nav.replaceChildren(...links.map(([id, title]) => el("a", { href: `#${id}` }, title)));
  }

  function showRun(number) {
    const run = data.runs[number];
    shown = number;
    cursor.step = null;
    growth.length = 0;
    const microscope = { openStep: () => {}, openToken: () => {} };
    const openStep = (step) => (source ? source.openStep(step) : microscope.openStep(step));
    const slot = el("div", { class: "slot", id: "microscope-slot" });
    const comparison = data.groups.length ? [el("h1", {}, data.title), compareSection(data)] : [];
    const tokens = source && !run.token_statistics ? [source.tokensSection(run)] : [heatMapsSection(run), replaySection(run)];
    const [now, table] = source ? [source.statusSection(run), source.responsesSection(run, number)] : [null, null];
    const sections = [now, ...comparison, summarySection(data, run, showRun), curvesSection(data, run, openStep), controlSection(run, openStep),
      alarmsSection(run, openStep), table, ...tokens, slot, configSection(run), footer()];
    replaceContent(main, ...sections.filter(Boolean));
    linkSections(["microscope-slot", "Microscope"]);
    const fillMicroscope = () => {
      Object.assign(microscope, microscopeSection(data, run));
      slot.replaceChildren(microscope.node);
      repaint = microscope.repaint || repaint;
    };
    openLink = () => {
      const [, step, response, token] = linkedToken() || [];
      if (step === undefined) return;
      if (source) source.openToken(step, response, token); else microscope.openToken(step, response, token);
    };
    if (source) source.shown({ run, number, slot, microscope, fillMicroscope });
    // The blocks of the responses come after this script in the file, so they are not parsed yet.
    else whenLoaded(() => { fillMicroscope(); openLink(); });
  }

  // Open the token that the address names, of the run that it names.
  let openLink = () => {};
  let shown = 0;
  function followLink() {
    const linked = linkedToken();
    if (!linked) return;
    if (linked[0] !== shown && data.runs[linked[0]]) showRun(linked[0]);
    openLink();
  }
  addEventListener("hashchange", followLink);

  function labelThemeButton() {
    button.textContent = theme() === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to the ${theme() === "dark" ? "light" : "dark"} theme`);
  }

  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = theme() === "dark" ? "light" : "dark";
    labelThemeButton();
    repaint();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { labelThemeButton(); repaint(); });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") document.getElementById("tip").hidden = true;
  });
  labelThemeButton();
  if (data.stress) {
    replaceContent(main, ...stressPage(data), footer());
    linkSections();
  } else {
    const linked = linkedToken();
    showRun(linked && data.runs[linked[0]] ? linked[0] : 0);
    source?.start(data, { showRun, shown: () => shown, openLink: () => openLink(), linkSections: () => linkSections(["microscope-slot", "Microscope"]) });
  }
}

function whenLoaded(action) {
  // After a timeout, so that the browser paints the curves first.
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", () => setTimeout(action));
  else action();
}

start();
