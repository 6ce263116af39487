// Puts the page together, and again when another run is chosen.

function section(id, title, words, ...children) {
  return el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title),
    words ? el("p", { class: "lead" }, words) : null, children);
}

function summarySection(data, run, choose) {
  const picker = data.runs.length > 1 ? select("Run", data.runs.map((one, n) => [String(n), visible(one.name)]),
    String(data.runs.indexOf(run)), (value) => choose(Number(value))).node : null;
  const tiles = run.tiles.map((tile) => el("div", { class: "tile" }, el("span", { class: "tile-name" }, tile.name),
    el("span", { class: "tile-value" }, tile.value), el("span", { class: "tile-from" }, tile.from)));
  const notes = run.notes.length ? el("div", { class: "note", role: "note" }, el("b", {}, "What is missing or was left out"),
    el("ul", {}, run.notes.map((note) => el("li", {}, note)))) : null;
  return el("section", { id: "summary", "aria-labelledby": "summary-title" }, picker,
    el("h1", { id: "summary-title" }, run.name), el("p", { class: "lead" }, run.title),
    el("div", { class: "tiles" }, tiles), el("p", { class: "words" }, run.summary.join(" ")), notes);
}

function configSection(run) {
  const facts = el("table", { class: "facts wide" }, el("tbody", {}, run.facts.map((fact) => el("tr", {},
    el("th", { scope: "row" }, fact.name), el("td", {}, fact.value)))));
  return section("configuration", "Configuration", run.config ? null : "There is no configuration to show.", facts,
    run.config ? el("details", { open: true }, el("summary", {}, "config.toml"), el("pre", { class: "text", tabindex: "0" }, run.config)) : null);
}

function start() {
  const data = block("data");
  reasonTable = data.reasons;
  const main = document.getElementById("main");
  const sections = document.getElementById("sections");
  const button = document.getElementById("theme");
  let repaint = () => {};

  function show(number) {
    const run = data.runs[number];
    cursor.step = null;
    const scope = { pick: () => {} };
    const pick = (step) => scope.pick(step);
    const slot = el("div", { class: "slot", id: "microscope-slot" });
    replaceContent(main, summarySection(data, run, show), data.groups.length ? compareSection(data) : "",
      curvesSection(data, run, pick), alarmsSection(run, pick), planesSection(run), othersSection(run), slot, configSection(run),
      el("footer", {}, "Made by trimtab. This file holds everything it shows, and asks nothing of the network."));
    const titles = [...main.querySelectorAll("section")].filter((node) => node.id !== "summary");
    const links = titles.map((node) => [node.id, node.querySelector("h2").textContent]);
    links.splice(-1, 0, ["microscope-slot", "Microscope"]);
    sections.replaceChildren(...links.map(([id, title]) => el("a", { href: `#${id}` }, title)));
    // The responses stand last in the file: they are looked at once all of it is there.
    whenWhole(() => {
      Object.assign(scope, microscopeSection(data, run));
      slot.replaceChildren(scope.node);
      repaint = scope.repaint || repaint;
    });
  }

  function name() {
    button.textContent = theme() === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to the ${theme() === "dark" ? "light" : "dark"} theme`);
  }

  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = theme() === "dark" ? "light" : "dark";
    name();
    repaint();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { name(); repaint(); });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") document.getElementById("tip").hidden = true;
  });
  name();
  show(0);
}

function whenWhole(act) {
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", () => setTimeout(act));
  else act();
}

start();
