// The token microscope: a list on the left, and a response on the right, optionally beside what another objective would
// have done. Long responses are rendered in chunks, which hold elements only while they are near the viewport.

const CHUNK = 250; // tokens

// One pane of tokens. `style(n)` is {color, mark, off} of a token; `hooks` are what the microscope does on hover, leave,
// click or arrow keys (`go`), and the current token.
function tokenPane(held, start, label, style, hooks) {
  const box = el("div", { class: "pane", tabindex: "-1", role: "group", "aria-label": label });
  const chunks = [];
  const length = held.pieces.length;
  for (let first = 0; first < length; first += CHUNK) {
    chunks.push({ first, last: Math.min(first + CHUNK, length), node: el("div", { class: "chunk" }), rendered: false });
  }
  // An empty chunk reserves about the height it will have, so that the scroll bar does not jump.
  const estimatedHeight = (chunk) => `${Math.ceil((held.pieces.slice(chunk.first, chunk.last).join("").length * 8.6) / 560 + 1) * 26}px`;
  chunks.forEach((chunk) => { chunk.node.style.minHeight = chunks.length > 1 ? estimatedHeight(chunk) : ""; });

  function paint(node, n) {
    const { color, mark, off } = style(n);
    node.style.background = color ? css(color) : "";
    node.style.color = color ? textColor(color) : "";
    if (mark) node.dataset.mark = mark; else delete node.dataset.mark;
    node.classList.toggle("off", off);
  }

  function render(chunk) {
    if (chunk.rendered) return;
    chunk.rendered = true;
    const nodes = [];
    for (let n = chunk.first; n < chunk.last; n += 1) {
      const cut = n > 0 && held.arrays.segment && held.arrays.segment[n] !== held.arrays.segment[n - 1];
      const node = el("span", { class: `tok${cut ? " cut" : ""}${held.arrays.special[n] ? " special" : ""}`, "data-n": n,
        tabindex: n === hooks.current() ? "0" : "-1", role: "button", "aria-label": `token ${start + n}: ${tokenText(held.pieces[n])}` },
      tokenText(held.pieces[n]));
      paint(node, n);
      nodes.push(node);
    }
    chunk.node.replaceChildren(...nodes);
    chunk.node.style.minHeight = "";
  }

  function clear(chunk) {
    if (!chunk.rendered || chunk.node.contains(document.activeElement)) return;
    chunk.node.style.minHeight = `${chunk.node.offsetHeight}px`;
    chunk.node.replaceChildren();
    chunk.rendered = false;
  }

  const observer = new IntersectionObserver((entries) => entries.forEach((entry) => {
    const chunk = chunks.find((one) => one.node === entry.target);
    if (entry.isIntersecting) render(chunk); else clear(chunk);
  }), { root: box, rootMargin: "800px 0px" });
  box.append(...chunks.map((chunk) => chunk.node));
  if (chunks.length === 1) render(chunks[0]); else chunks.forEach((chunk) => observer.observe(chunk.node));

  const nodeOf = (n) => {
    const chunk = chunks[Math.floor(n / CHUNK)];
    render(chunk);
    return chunk.node.children[n - chunk.first];
  };
  const tokenAt = (event) => {
    const node = event.target.closest(".tok");
    return node ? Number(node.dataset.n) : null;
  };
  box.addEventListener("pointerover", (event) => { if (tokenAt(event) !== null) hooks.hover(tokenAt(event), event.target.closest(".tok")); });
  box.addEventListener("pointerleave", () => hooks.leave());
  box.addEventListener("click", (event) => { if (tokenAt(event) !== null) hooks.go(tokenAt(event)); });
  box.addEventListener("focusin", (event) => { if (tokenAt(event) !== null && tokenAt(event) !== hooks.current()) hooks.go(tokenAt(event)); });
  box.addEventListener("keydown", (event) => {
    const n = hooks.current();
    const goal = { ArrowRight: n + 1, ArrowLeft: n - 1, ArrowDown: n + 10, ArrowUp: n - 10, PageDown: n + CHUNK,
      PageUp: n - CHUNK, Home: 0, End: length - 1 }[event.key];
    if (goal === undefined) return;
    hooks.go(Math.min(Math.max(goal, 0), length - 1));
    event.preventDefault();
  });

  return {
    box,
    repaint() {
      chunks.filter((chunk) => chunk.rendered).forEach((chunk) => [...chunk.node.children].forEach((node, n) => paint(node, chunk.first + n)));
    },
    mark(n, before) {
      const old = chunks[Math.floor(before / CHUNK)];
      if (old && old.rendered) {
        old.node.children[before - old.first].classList.remove("here");
        old.node.children[before - old.first].tabIndex = -1;
      }
      const node = nodeOf(n);
      node.classList.add("here");
      node.tabIndex = 0;
      return node;
    },
    close() { observer.disconnect(); },
  };
}

// How many tokens of a response an objective silenced, boosted, clipped, ...
function countReasons(name, effects) {
  if (!effects) return `${name} cannot be planned over these records.`;
  const counts = new Map();
  effects.reason.forEach((code) => reasonsOf(code).forEach(({ name: reason }) => counts.set(reason, (counts.get(reason) || 0) + 1)));
  const clipped = effects.clipped.reduce((a, b) => a + b, 0);
  const parts = [...counts].map(([reason, n]) => `${count(n)} ${reason.replace("_", " ")}`);
  if (clipped) parts.push(`${count(clipped)} clipped`);
  return `${name}: ${parts.length ? parts.join(", ") : "every token kept"}.`;
}

function microscopeSection(data, run) {
  if (!run.responses.length) {
    return { node: section("microscope", "Token microscope", "There are no responses to show: none is recorded."), openStep: () => {} };
  }
  const state = { filter: cleanFilter(), color: "probability", compared: "", entry: null, token: 0, panes: [], rows: [] };
  const list = el("div", { class: "list", role: "listbox", "aria-label": "Responses", tabindex: "-1" });
  const status = el("p", { class: "meaning", role: "status" });
  const view = el("div", { class: "view" });
  const card = el("div", { class: "card token-card", "aria-live": "polite" });
  const tip = document.getElementById("tip");

  // The recorded objective and, if one is chosen, the compared one.
  const effectsOf = (held, n) => {
    const effects = n === 0 ? held.recorded : held.compared[n - 1];
    return effects && { ...effects, reasonText: run.reason_text[n] };
  };
  const shownEffects = (held) => (state.compared === "" ? [0] : [0, Number(state.compared) + 1]).map((n) => effectsOf(held, n));
  const shownNames = () => (state.compared === "" ? [run.label] : [run.label, run.compared_objectives[Number(state.compared)]]);

  function showCard() {
    const held = readResponse(state.entry.block);
    card.replaceChildren(...tokenCard(held, shownEffects(held), shownNames(), state.token, state.entry.start));
  }

  function go(n, focus = true) {
    const before = state.token;
    state.token = n;
    state.panes.forEach((pane, at) => {
      const node = pane.mark(n, before);
      if (at === 0 && focus) node.focus({ preventScroll: true });
      const [top, bottom] = [node.offsetTop - 40, node.offsetTop + 60 - pane.box.clientHeight];
      if (pane.box.scrollTop > top) pane.box.scrollTop = Math.max(top, 0);
      else if (pane.box.scrollTop < bottom) pane.box.scrollTop = bottom;
    });
    showCard();
  }

  function hover(n, node) {
    const held = readResponse(state.entry.block);
    tip.replaceChildren(...tokenCard(held, shownEffects(held), shownNames(), n, state.entry.start));
    tip.hidden = false;
    const [at, size] = [node.getBoundingClientRect(), tip.getBoundingClientRect()];
    tip.style.left = `${Math.max(8, Math.min(at.left, innerWidth - size.width - 12))}px`;
    tip.style.top = `${at.bottom + size.height + 14 < innerHeight ? at.bottom + 8 : Math.max(8, at.top - size.height - 8)}px`;
  }

  const leave = () => { tip.hidden = true; };

  function open(entry, token = 0) {
    Object.assign(state, { entry, token });
    state.panes.forEach((pane) => pane.close());
    leave();
    const held = readResponse(entry.block);
    const coloring = COLORS[state.color];
    const allEffects = shownEffects(held);
    const scale = colorScale(coloring, held, allEffects.filter(Boolean));
    const names = shownNames();
    const pane = (effects, name) => tokenPane(held, entry.start, `Tokens under ${visible(name)}`, (n) => ({
      color: effects ? colorOf(coloring, scale, coloring.value(held, effects, n)) : null,
      mark: effects ? markOf(coloring, coloring.value(held, effects, n)) : "",
      off: Boolean(effects) && effects.weight[n] === 0,
    }), { hover, leave, go, current: () => state.token });
    state.panes = allEffects.map((effects, n) => pane(effects, names[n]));
    const first = state.panes[0].box;
    if (state.panes.length > 1) {
      first.addEventListener("scroll", () => { state.panes[1].box.scrollTop = first.scrollTop; });
    }
    view.replaceChildren(promptBox(held, entry),
      el("div", { class: "legend-line" }, el("span", { class: "legend-title" }, coloring.title), colorLegend(coloring, scale)),
      el("div", { class: `panes n${allEffects.length}` }, state.panes.map((one, n) => el("div", { class: "pane-slot" },
        el("h4", {}, n === 0 ? names[0] : `${names[1]}, planned over the same mini-batch`), one.box,
        el("p", { class: "meaning" }, countReasons(n === 0 ? "Recorded" : names[1], allEffects[n]))))));
    go(token, false);
    list.querySelectorAll("[aria-selected=true]").forEach((row) => row.setAttribute("aria-selected", "false"));
    const row = state.rows.findIndex((one) => one.entry === entry && (one.n === undefined || one.n === token));
    if (row >= 0 && list.children[row]) list.children[row].setAttribute("aria-selected", "true");
  }

  function showList(openFirst) {
    const tokens = state.filter.show === "tokens";
    const found = tokens ? tokensFor(run, state.filter) : responsesFor(run, state.filter).map((entry) => ({ entry }));
    state.rows = found.slice(0, MOST_ROWS);
    status.textContent = !found.length ? emptyListText(run, state.filter) : `${found.length === run.responses.length && !tokens
      ? "All " : ""}${plural(found.length, tokens ? "token" : "response")}${found.length > state.rows.length ? `, the first ${MOST_ROWS} listed` : ""}`;
    list.replaceChildren(...state.rows.map((row, n) => el("button", { type: "button", class: "row", role: "option",
      "aria-selected": "false", tabindex: n === 0 ? "0" : "-1", on: { click: () => open(row.entry, row.n || 0) } },
    tokens ? tokenRow(row) : responseRow(row.entry, data.selection_reasons))));
    if (openFirst && found.length) open(found[0].entry, found[0].n || 0);
  }

  list.addEventListener("keydown", (event) => {
    const rows = [...list.children];
    const n = rows.indexOf(document.activeElement);
    const goal = { ArrowDown: n + 1, ArrowUp: n - 1, Home: 0, End: rows.length - 1 }[event.key];
    if (goal === undefined || !rows[goal]) return;
    rows.forEach((row, at) => { row.tabIndex = at === goal ? 0 : -1; });
    rows[goal].focus();
    rows[goal].click();
    rows[goal].focus();
    event.preventDefault();
  });

  const controls = microscopeControls(data, run, state, { showList, reopen: () => open(state.entry, state.token) });
  const node = section("microscope", "Token microscope", `${plural(run.responses.length, "response")} of ` +
    `${plural(new Set(run.responses.map((entry) => entry.step)).size, "step")}: the most unusual ones and a random sample. ` +
    "Point at a token, or move through them with the arrow keys, to see its numbers.",
  controls.node, el("div", { class: "scope" }, el("div", { class: "side" }, status, list), el("div", {}, view, card)));
  showList(true);

  return {
    node,
    repaint: () => open(state.entry, state.token),
    openStep(step) {
      const steps = [...new Set(run.responses.map((entry) => entry.step))];
      const near = steps.reduce((a, b) => (Math.abs(b - step) < Math.abs(a - step) ? b : a));
      controls.set({ ...cleanFilter(), step: String(near) });
      node.scrollIntoView({ block: "start" });
    },
  };
}

function promptBox(held, entry) {
  return el("div", { class: "prompt" },
    el("p", { class: "meaning" }, `step ${count(entry.step)}, response ${entry.response}: ${verdictMark(entry.verdict)}, reward ${formatNumber(entry.reward)}` +
      `${held.finished ? "" : ", truncated"}${held.answer ? `. Right answer: ${held.answer}` : ""}${held.extracted ? `, extracted: ${held.extracted}` : ""}` +
      `${held.source ? ` (${held.source})` : ""}`),
    el("details", { open: held.prompt.length < 400 }, el("summary", {}, "Prompt"), el("pre", { class: "text" }, held.prompt)));
}

function microscopeControls(data, run, state, act) {
  const verdicts = [...new Set(run.responses.map((entry) => entry.verdict))].sort();
  const selected = [...new Set(run.responses.flatMap((entry) => entry.selected_for))];
  const reasons = reasonTable.filter((entry) => entry.bit).map((entry) => [entry.name, entry.name.replace("_", " ")]);
  const change = (key) => (value) => { state.filter[key] = value; act.showList(true); };
  const step = el("input", { type: "number", min: "0", inputmode: "numeric", placeholder: "any",
    on: { change: () => change("step")(step.value) } });
  const fields = {
    show: select("List", [["responses", "responses"], ["tokens", "tokens"]], "responses", change("show")),
    verdict: select("Verdict", [["", "any"], ...verdicts.map((v) => [v, v.replace("_", " ")])], "", change("verdict")),
    reason: select("Reason", [["", "any"], ...reasons, ["clipped", "clipped"]], "", change("reason")),
    selected: select("Selected for", [["", "any"], ...selected.map((key) => [key, data.selection_reasons[key]])], "", change("selected")),
    sort: select("Sort by", Object.entries(SORTS).map(([key, [title]]) => [key, title]), "step", change("sort")),
  };
  const set = (filter) => {
    Object.assign(state.filter, filter);
    step.value = state.filter.step;
    for (const [key, field] of Object.entries(fields)) field.box.value = state.filter[key];
    act.showList(true);
  };
  const color = select("Colour by", Object.entries(COLORS).map(([key, coloring]) => [key, coloring.title]), state.color,
    (value) => { state.color = value; act.reopen(); });
  const compared = select("Compare with", [["", "nothing"], ...run.compared_objectives.map((name, n) => [String(n), name])], "",
    (value) => { state.compared = value; act.reopen(); });
  const segments = el("input", { type: "checkbox", on: { change: () => document.body.classList.toggle("segments", segments.checked) } });
  const presets = PRESETS.map(([name, title, filter]) => el("button", { type: "button", class: "quiet", "data-preset": name,
    on: { click: () => set({ ...filter }) } }, title));
  return {
    set,
    node: el("div", { class: "controls" },
      el("div", { class: "presets", role: "group", "aria-label": "Preset filters" }, presets),
      el("div", { class: "fields" }, el("label", { class: "field narrow" }, el("span", {}, "Step"), step),
        Object.values(fields).map((field) => field.node)),
      el("div", { class: "fields look" }, color.node, compared.node,
        el("label", { class: "field check" }, segments, el("span", {}, "mark segments")))),
  };
}
