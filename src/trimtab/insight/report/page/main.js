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
  const tiles = run.tiles.map((tile) => el("div", { class: "tile" }, el("span", { class: "tile-name" }, tile.name),
    el("span", { class: "tile-value" }, tile.value), el("span", { class: "tile-from" }, tile.from)));
  const notes = run.notes.length ? el("div", { class: "note", role: "note" }, el("b", {}, "Missing or left out"),
    el("ul", {}, run.notes.map((note) => el("li", {}, note)))) : null;
  return el("section", { id: "summary", "aria-labelledby": "summary-title" }, picker,
    el(data.groups.length ? "h2" : "h1", { id: "summary-title" }, run.name), el("p", { class: "lead" }, run.title),
    el("div", { class: "tiles" }, tiles), el("p", { class: "summary-text" }, withCode(run.summary.join(" "))), notes);
}

function configSection(run) {
  const facts = el("table", { class: "facts wide" }, el("tbody", {}, run.facts.map((fact) => el("tr", {},
    el("th", { scope: "row" }, fact.name), el("td", {}, fact.value)))));
  return section("configuration", "Configuration", run.config ? null : "There is no configuration to show.", facts,
    run.config ? el("details", { open: true }, el("summary", {}, "config.toml"), el("pre", { class: "text", tabindex: "0" }, run.config)) : null);
}

const footer = () => el("footer", {}, "Made by trimtab. This file is complete: it loads nothing from the network.");

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
    cursor.step = null;
    const microscope = { openStep: () => {} };
    const openStep = (step) => microscope.openStep(step);
    const slot = el("div", { class: "slot", id: "microscope-slot" });
    const comparison = data.groups.length ? [el("h1", {}, data.title), compareSection(data)] : [];
    const sections = [...comparison, summarySection(data, run, showRun), curvesSection(data, run, openStep), controlSection(run, openStep),
      alarmsSection(run, openStep), heatMapsSection(run), replaySection(run), slot, configSection(run), footer()];
    replaceContent(main, ...sections.filter(Boolean));
    linkSections(["microscope-slot", "Microscope"]);
    // The blocks of the responses come after this script in the file, so they are not parsed yet.
    whenLoaded(() => {
      Object.assign(microscope, microscopeSection(data, run));
      slot.replaceChildren(microscope.node);
      repaint = microscope.repaint || repaint;
    });
  }

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
  } else showRun(0);
}

function whenLoaded(action) {
  // After a timeout, so that the browser paints the curves first.
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", () => setTimeout(action));
  else action();
}

start();
