// Keeps the page of a run up to date: new metrics are added to the curves, and what has grown is drawn anew.

const POINTS = 2000; // of a curve that has grown; with twice as many it is thinned, as the server thins
const FIRST_REDRAW = 250; // milliseconds between two times that the page is drawn, at least
const REDRAW_SHARE = 0.2; // of the time that drawing may take, as long as it is not later than LAST_REDRAW
const LAST_REDRAW = 1200;
const OVERVIEW_PAUSE = 5000; // milliseconds between two times that the sentences are asked for
const GROUPS_PAUSE = 1000;
const RESPONSES_PAUSE = 2000;
const SERVER_SHARE = 0.002; // of a core that each of what is asked for again and again may take
const AXIS_SUMS = { time: ["time/rollout", "time/update"], tokens: ["tokens/count"] };
const KIND_MARKS = { good: "✓", bad: "✗", warn: "!", plain: "·" };

const page = { data: null, view: null, context: null, connected: null, ended: false, parts: {} };

// Curves that grow are plain arrays.
function growingCurve(owner, name) {
  const curve = owner[name];
  if (!curve) owner[name] = { steps: [], values: [] };
  else if (curve.steps.t) owner[name] = Object.fromEntries(Object.entries(decodeAll(curve)).map(([key, values]) => [key, Array.from(values)]));
  return owner[name];
}

// First, last, and the lowest and highest value of every stretch.
function thinCurve({ steps, values }) {
  const kept = new Set([0, values.length - 1]);
  const buckets = (POINTS - 2) / 2;
  for (let n = 0; n < buckets; n += 1) {
    const [from, to] = [Math.floor((n * values.length) / buckets), Math.floor(((n + 1) * values.length) / buckets)];
    let [low, high] = [from, from];
    for (let at = from; at < to; at += 1) {
      if (values[at] < values[low]) low = at;
      if (values[at] > values[high]) high = at;
    }
    kept.add(low).add(high);
  }
  const order = [...kept].sort((a, b) => a - b);
  return { steps: order.map((n) => steps[n]), values: order.map((n) => values[n]) };
}

function addPoint(owner, name, step, value) {
  const curve = growingCurve(owner, name);
  const last = curve.steps.length - 1;
  if (last < 0 || step > curve.steps[last]) {
    curve.steps.push(step);
    curve.values.push(value);
  } else { // a step that a run took again: the last value counts
    const at = indexBefore(curve.steps, step);
    if (curve.steps[at] === step) curve.values[at] = value;
    else {
      const place = curve.steps[at] < step ? at + 1 : at;
      curve.steps.splice(place, 0, step);
      curve.values.splice(place, 0, value);
    }
  }
  if (curve.steps.length > 2 * POINTS) owner[name] = thinCurve(curve);
}

function addLine(run, line) {
  for (const [name, value] of Object.entries(line)) if (name !== "step") addPoint(run.curves, name, line.step, value);
  for (const [axis, names] of Object.entries(AXIS_SUMS)) {
    const spent = names.filter((name) => name in line).reduce((sum, name) => sum + Math.max(line[name], 0), 0);
    if (!names.some((name) => name in line)) continue;
    if (!run.axes[axis]) run.axes[axis] = { steps: [0], values: [0] };
    const { values } = growingCurve(run.axes, axis);
    addPoint(run.axes, axis, line.step, values[values.length - 1] + spent);
  }
}

// The line in words, time left, and figures of speed and memory.
function statusSection(run) {
  const node = el("section", { id: "status", "aria-labelledby": "status-title" });
  const others = page.data.runs.filter((one) => one !== run);
  function draw() {
    const { status } = run.live;
    const share = status.steps ? Math.min(status.step / status.steps, 1) : null;
    const link = page.ended ? "The server of this page has ended. `trimtab watch` opens the run again."
      : page.connected === false ? "The server does not answer. This page goes on when it does." : "";
    node.replaceChildren(el("h2", { id: "status-title" }, "Now"), el("div", { class: `card status ${status.kind}` },
      el("p", { class: "status-head", role: "status" }, el("b", {}, others.length ? `${visible(run.name)}: ${status.headline}` : status.headline)),
      share === null ? "" : el("div", { class: "progress", role: "progressbar", "aria-label": "Steps", "aria-valuemin": "0",
        "aria-valuemax": String(status.steps), "aria-valuenow": String(status.step) }, el("span", { style: `width:${100 * share}%` })),
      el("p", { class: "status-words" }, el("span", { class: "status-mark", "aria-hidden": "true" }, KIND_MARKS[status.kind] || "·"), " ", withCode(status.words)),
      el("dl", { class: "figures" }, status.figures.map(({ name, value }) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
      ...others.map((one) => el("p", { class: "meaning other-run" }, el("b", {}, one.name), ` ${one.live.status.headline}. `, withCode(one.live.status.words))),
      link ? el("p", { class: "note connection", role: "alert" }, withCode(link)) : ""));
    document.title = `${status.ended ? "" : "● "}step ${count(status.step)} · ${visible(run.name)} · trimtab watch`;
  }
  draw();
  growth.push(draw);
  page.parts.status = draw;
  return node;
}

function responsesSection(run, number) {
  const open = (step, response) => openToken(step, response, 0);
  const [samples, table] = [samplesPart(number, open), tablePart(number, open)];
  const refresh = throttled(async () => { await samples.refresh(); await table.refresh(); }, RESPONSES_PAUSE, SERVER_SHARE);
  let recorded = `${run.recorded_steps} ${run.last_recorded_step}`;
  growth.push(() => {
    const now = `${run.recorded_steps} ${run.last_recorded_step}`;
    if (now === recorded) return;
    recorded = now;
    refresh();
    if (!run.responses.length && page.parts.offered) page.parts.offered();
  });
  samples.refresh();
  table.load();
  return section("responses", "Responses", null, samples.node, table.node);
}

// Heat maps and replay read hundreds of recorded steps, so only who asks for them waits for them.
function tokensSection(run) {
  const number = page.data.runs.indexOf(run);
  const node = section("heat-maps", "All tokens", run.recorded_steps || !run.live.status.ended
    ? "Heat maps over all tokens, and what other objectives would have done to them, from evenly spaced recorded steps." : "There is nothing to show: no tokens are recorded.");
  const button = el("button", { type: "button", class: "quiet", on: { click: read } }, "Read the recorded tokens");
  async function read() {
    button.disabled = true;
    button.textContent = "Reading …";
    try {
      const { notes, ...found } = await askJson(`runs/${number}/tokens`);
      Object.assign(run, found);
      run.notes = [...new Set([...run.notes, ...notes])];
      const slot = el("div", {});
      node.replaceWith(slot);
      replaceContent(slot, heatMapsSection(run), replaySection(run));
      page.view.linkSections();
      scheduleRedraw();
    } catch (error) {
      button.disabled = false;
      button.textContent = String(error.message);
    }
  }
  node.append(button);
  return node;
}

// The microscope holds one step at a time, which is loaded when it is opened.
async function loadStep(step, response = null) {
  const { run, number, fillMicroscope } = page.context;
  const wanted = page.context;
  const found = await askJson(`runs/${number}/steps/${step}${response === null ? "" : `/${response}`}`);
  if (wanted !== page.context) return null;
  if (response === null) {
    loaded.clear();
    readResponse.forget();
    run.responses = found.entries;
  } else run.responses = [...run.responses.filter((entry) => entry.response !== response || entry.step !== found.step), ...found.entries];
  for (const [name, block] of Object.entries(found.blocks)) loaded.set(`response-${name}`, block);
  if (found.entries.length) fillMicroscope();
  sayInMicroscope(found.notes.join(" "));
  return found.step;
}

function sayInMicroscope(text) {
  const { slot } = page.context;
  slot.querySelector(".microscope-note")?.remove();
  if (text) slot.querySelector("section")?.append(el("p", { class: "note microscope-note", role: "status" }, text));
}

async function openStep(step) {
  try {
    const found = await loadStep(step);
    if (found !== null) page.context.slot.scrollIntoView({ block: "start" });
  } catch (error) {
    sayInMicroscope(String(error.message));
  }
}

async function openToken(step, response, token) {
  try {
    const { run, microscope } = page.context;
    let found = run.responses.length ? run.responses[0].step : null;
    if (found !== step) found = await loadStep(step);
    if (microscope.openToken(found, response, token) || found === null) return;
    await loadStep(found, response);
    if (!microscope.openToken(found, response, token)) sayInMicroscope(`Step ${found} has no token ${token} of response ${response}.`);
  } catch (error) {
    sayInMicroscope(String(error.message));
  }
}

// Until a step is opened, the place of the microscope offers the newest one.
function offerMicroscope({ run, slot }) {
  const draw = () => {
    const node = section("microscope", "Token microscope", run.recorded_steps
      ? `${plural(run.recorded_steps, "step")} recorded, ${count(run.last_recorded_step)} the newest.` : "No step is recorded yet.");
    if (run.recorded_steps) {
      const box = el("input", { type: "number", min: "0", inputmode: "numeric", value: String(run.last_recorded_step) });
      node.append(el("div", { class: "fields offered" }, el("label", { class: "field narrow" }, el("span", {}, "Step to open"), box),
        el("button", { type: "button", class: "quiet", on: { click: () => openStep(Number(box.value)) } }, "Open the microscope")));
    }
    if (!slot.contains(document.activeElement) || document.activeElement === document.body) slot.replaceChildren(node);
  };
  draw();
  page.parts.offered = draw;
}

// Draw what has grown: soon, and not so often that drawing would take the time that reading needs.
let redrawTimer = null;
let redrawCost = 0;
function scheduleRedraw() {
  if (redrawTimer !== null) return;
  redrawTimer = setTimeout(() => {
    redrawTimer = null;
    const began = performance.now();
    growth.forEach((draw) => draw());
    redrawCost = performance.now() - began;
  }, Math.min(Math.max(FIRST_REDRAW, redrawCost / REDRAW_SHARE), LAST_REDRAW));
}

// Call an action soon, but not more often than every so many milliseconds, and so that the server, which may share its cores
// with the run, is busy with it for `share` of the time at most. A call while the action runs is not lost.
function throttled(action, pause, share) {
  let [timer, next, again] = [null, 0, false];
  const start = () => {
    timer = setTimeout(async () => {
      const before = serverTime;
      again = false;
      await action().catch(() => {});
      [timer, next] = [null, performance.now() + Math.max(pause, (serverTime - before) / share)];
      if (again) start();
    }, Math.max(0, next - performance.now()));
  };
  return () => {
    if (timer === null) start();
    else again = true;
  };
}

const refreshOverview = throttled(async () => {
  const { run, number } = page.context;
  const before = JSON.stringify([run.title, run.label, run.config, Boolean(run.control), run.compared_objectives]);
  const { control, ...found } = await askJson(`runs/${number}/overview`);
  Object.assign(run, found, { control: control && { ...control, critical: run.control?.critical || null } });
  const after = JSON.stringify([run.title, run.label, run.config, Boolean(run.control), run.compared_objectives]);
  if (before === after) scheduleRedraw(); else showAgain();
}, OVERVIEW_PAUSE, SERVER_SHARE);

const refreshGroups = throttled(async () => {
  const { groups } = await askJson("groups");
  groups.forEach((group, n) => { if (page.data.groups[n]) Object.assign(page.data.groups[n], group); });
  scheduleRedraw();
}, GROUPS_PAUSE, 10 * SERVER_SHARE);

// Show the run anew, as when its configuration has come; the place on the page stays.
function showAgain() {
  const place = scrollY;
  const open = page.context.run.responses.length > 0;
  page.view.showRun(page.view.shown());
  if (open) page.context.fillMicroscope();
  scrollTo(0, place);
}

async function applyGrowth(grown) {
  const run = page.data.runs[grown.run];
  if (grown.reset) {
    const fresh = await askJson("data");
    Object.keys(page.data).forEach((key) => delete page.data[key]);
    Object.assign(page.data, fresh);
    showAgain();
    return;
  }
  const ended = run.live.status.ended;
  run.live = { ...run.live, status: grown.status, position: grown.position };
  for (const key of ["tiles", "recorded_steps", "last_recorded_step"]) run[key] = grown[key];
  (grown.lines || []).forEach((line) => addLine(run, line));
  if (grown.alarms) run.alarms = grown.alarms;
  page.parts.status(); // at once; the charts of a long run take longer
  scheduleRedraw();
  if (grown.lines || grown.alarms || ended !== grown.status.ended) {
    if (grown.run === page.view.shown()) refreshOverview();
    if (page.data.groups.length) refreshGroups();
  }
}

source = {
  footer: "Made by trimtab watch. This page reads the run's folder, on this machine only, and changes nothing in it.",
  statusSection,
  responsesSection,
  tokensSection,
  openStep,
  openToken,
  async zoom(owners, [first, last]) {
    const part = `first=${first}&last=${last}`;
    if (owners === page.data.groups) return (await askJson(`groups?${part}`)).groups.map((group) => withCurves(group, group.curves));
    const { curves } = await askJson(`runs/${page.view.shown()}/curves?${part}`);
    return owners.map((owner) => withCurves(owner, curves));
  },
  shown(context) {
    page.context = context;
    offerMicroscope(context);
  },
  start(data, view) {
    page.view = view;
    view.openLink();
    followEvents(() => page.data.runs.map((run) => run.live.position), {
      growth: applyGrowth,
      connected(is) {
        page.connected = is;
        page.parts.status();
      },
    }).then(() => {
      page.ended = true;
      page.parts.status();
    });
  },
};
page.data = parseBlock("data");
loaded.set("data", page.data); // the same object for both
