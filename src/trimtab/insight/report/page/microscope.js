// The token microscope: a list on the left, and a response on the right, optionally beside what another objective would
// have done.

// How many tokens of a response an objective silenced, boosted, clipped, ...
function countReasons(name, effects) {
  if (!effects) return `${name} cannot be planned over these records.`;
  const counts = new Map();
  effects.reason.forEach((code) => reasonsOf(code).forEach(({ name: reason }) => counts.set(reason, (counts.get(reason) || 0) + 1)));
  const clipped = effects.clipped.reduce((a, b) => a + b, 0);
  const texts = [...counts].map(([reason, n]) => `${count(n)} ${reason.replace("_", " ")}`);
  if (clipped) texts.push(`${count(clipped)} clipped`);
  return `${name}: ${texts.length ? texts.join(", ") : "every token kept"}.`;
}

function microscopeSection(data, run) {
  if (!run.responses.length) {
    return { node: section("microscope", "Token microscope", "There are no responses to show: none is recorded."), openStep: () => {},
      openToken: () => false };
  }
  const state = { filter: cleanFilter(), color: "probability", compared: "", entry: null, token: 0, panes: [], rows: [], folds: new Map() };
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
    card.replaceChildren(...tokenCard(held, shownEffects(held), shownNames(), state.token, state.entry.start),
      el("p", { class: "meaning" }, el("a", { href: tokenLink(data.runs.indexOf(run), state.entry, state.token) }, "Link to this token")));
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
    placeTip(tip, node);
  }

  const leave = () => { tip.hidden = true; };

  // What is open is the same in both panes, so that they scroll together, and stays so when a chunk is rendered again.
  const folds = {
    isOpen: (key, usually) => (state.folds.has(key) ? state.folds.get(key) : usually),
    toggled(key, isOpen) {
      state.folds.set(key, isOpen);
      view.querySelectorAll("details[data-fold]").forEach((node) => { if (node.dataset.fold === key) node.open = isOpen; });
    },
  };

  function open(entry, token = 0) {
    if (state.entry !== entry) state.folds = new Map();
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
    }), { hover, leave, go, folds, current: () => state.token });
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

  function showList() {
    const tokens = state.filter.show === "tokens";
    const found = tokens ? tokensFor(run, state.filter) : responsesFor(run, state.filter).map((entry) => ({ entry }));
    state.rows = found.slice(0, MOST_ROWS);
    status.textContent = !found.length ? emptyListText(run, state.filter) : `${found.length === run.responses.length && !tokens
      ? "All " : ""}${plural(found.length, tokens ? "token" : "response")}${found.length > state.rows.length ? `, the first ${MOST_ROWS} listed` : ""}`;
    list.replaceChildren(...state.rows.map((row, n) => el("button", { type: "button", class: "row", role: "option",
      "aria-selected": "false", tabindex: n === 0 ? "0" : "-1", on: { click: () => open(row.entry, row.n || 0) } },
    tokens ? tokenRow(row) : responseRow(row.entry, data.selection_reasons))));
    if (found.length) open(found[0].entry, found[0].n || 0);
  }

  listenToList(list);
  const controls = microscopeControls(data, run, state, { showList, reopen: () => open(state.entry, state.token) });
  const node = section("microscope", "Token microscope", `${plural(run.responses.length, "response")} of ` +
    `${source ? `step ${count(run.responses[0].step)}. ` : `${plural(new Set(run.responses.map((entry) => entry.step)).size, "step")}: ` +
      "the most unusual ones and a random sample. "}` +
    "Point at a token, or move through them with the arrow keys, to see its numbers.",
  controls.node, el("div", { class: "scope" }, el("div", { class: "side" }, status, list), el("div", {}, view, card)));
  showList();

  return {
    node,
    repaint: () => open(state.entry, state.token),
    openToken(step, response, token) {
      const held = (entry) => entry.step === step && entry.response === response && token >= entry.start && token < entry.start + entry.tokens;
      const entry = run.responses.find(held);
      if (!entry) return false;
      controls.set({ ...cleanFilter(), step: String(step) });
      open(entry, token - entry.start);
      view.scrollIntoView({ block: "start" });
      return true;
    },
    openStep(step) {
      const steps = [...new Set(run.responses.map((entry) => entry.step))];
      const near = steps.reduce((a, b) => (Math.abs(b - step) < Math.abs(a - step) ? b : a));
      controls.set({ ...cleanFilter(), step: String(near) });
      node.scrollIntoView({ block: "start" });
    },
  };
}

// Put the tool tip below a token, or above it if there is no room below.
function placeTip(tip, node) {
  const [at, size] = [node.getBoundingClientRect(), tip.getBoundingClientRect()];
  tip.style.left = `${Math.max(8, Math.min(at.left, innerWidth - size.width - 12))}px`;
  tip.style.top = `${at.bottom + size.height + 14 < innerHeight ? at.bottom + 8 : Math.max(8, at.top - size.height - 8)}px`;
}

// Arrow keys move through the rows, and open the one they reach.
function listenToList(list) {
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
}

// Each of several rewards, before its weight.
function rewardTexts(held) {
  const texts = Object.entries(held.rewards || {}).map(([name, value]) => `${visible(name)} ${formatNumber(value)}`);
  return texts.length ? ` (${texts.join(", ")})` : "";
}

// Which branch of an agent's rollout it is; its prompt is then all that the model had read before.
function rolloutText(held) {
  if (!held.rollout || held.rollout.branch === undefined) return "";
  const { prompt, sample, branch, branches } = held.rollout;
  return `. Branch ${branch} of ${branches} of rollout ${sample} of prompt ${prompt}`;
}

function promptBox(held, entry) {
  return el("div", { class: "prompt" },
    el("p", { class: "meaning" }, `step ${count(entry.step)}, response ${entry.response}: ${verdictMark(entry.verdict)}, ` +
      `reward ${formatNumber(entry.reward)}${rewardTexts(held)}` +
      `${held.finished ? "" : ", truncated"}${held.answer ? `. Right answer: ${held.answer}` : ""}${held.extracted ? `, extracted: ${held.extracted}` : ""}` +
      `${held.source ? ` (${held.source})` : ""}${rolloutText(held)}`),
    conversationText(entry, held) ? el("p", { class: "meaning" }, conversationText(entry, held)) : null,
    el("details", { open: held.prompt.length < 400 }, el("summary", {}, rolloutText(held) ? "Context" : "Prompt"), el("pre", { class: "text" }, held.prompt)));
}

function microscopeControls(data, run, state, act) {
  const verdicts = [...new Set(run.responses.map((entry) => entry.verdict))].sort();
  const selected = [...new Set(run.responses.flatMap((entry) => entry.selected_for))];
  const reasons = reasonTable.filter((entry) => entry.bit).map((entry) => [entry.name, entry.name.replace("_", " ")]);
  const change = (key) => (value) => { state.filter[key] = value; act.showList(); };
  const step = el("input", { type: "number", min: "0", inputmode: "numeric", placeholder: "any",
    on: { change: () => (source && step.value !== "" ? source.openStep(Number(step.value)) : change("step")(step.value)) } });
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
    act.showList();
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
