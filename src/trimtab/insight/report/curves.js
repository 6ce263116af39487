// The curves of a run, or of several: which metrics share a card, and how they are written.

const CARDS = [
  { title: "Reward", meaning: "Mean reward of the step's responses", lines: { "reward/mean": "reward" } },
  { title: "Accuracy", meaning: "Share of right answers: sampled in training, and greedy on held-out problems",
    lines: { "reward/accuracy": "sampled", "eval/accuracy": "held-out" }, share: true, dotted: "eval/accuracy" },
  { title: "Entropy", meaning: "Token-mean entropy of the policy, in nats", lines: { "policy/entropy": "mean" },
    zero: true, entropy: true },
  { title: "Set apart", meaning: "Share of tokens whose weight the objective changed", share: true, zero: true,
    lines: { "tokens/silenced_share": "silenced", "tokens/boosted_share": "boosted", "tokens/damped_share": "damped",
      "tokens/masked_share": "masked", "tokens/dropped_share": "dropped", "tokens/penalized_share": "penalized" } },
  { title: "Clipped", meaning: "Share of tokens whose gradient a clip cuts", share: true, zero: true,
    lines: { "update/clip_share": "clipped" } },
  { title: "Gradient norm", meaning: "Of the update, before it is clipped", lines: { "update/grad_norm": "norm" },
    zero: true, log: true },
  { title: "Response length", meaning: "Tokens per response", lines: { "response/length_mean": "tokens" }, zero: true },
];

const FIRST_ALARMS = 9; // that are shown at once

const isShare = (name) => /_share$|accuracy$/.test(name);

// One run: a card's metrics as lines.
function runSpec(card, run, pick) {
  const names = Object.keys(card.lines).filter((name) => name in run.curves);
  if (!names.length) return null;
  const series = names.map((name, n) => ({
    name: card.lines[name], color: PALETTE[n], dash: DASHES[n], dots: name === card.dotted, ...curve(run, name),
  }));
  const spec = { ...card, series, format: card.share ? percent : write, alarms: run.alarms, openStep: pick };
  if (card.entropy) {
    const quantiles = run.survey && run.survey.quantiles;
    if (quantiles && quantiles.steps.n > 1) {
      const steps = unpack(quantiles.steps);
      spec.fan = quantiles.values.map((values) => ({ steps, values: unpack(values) }));
      spec.aside = "shaded: quarter and tenth of the tokens to either side of the median";
    }
    if (run.target) {
      spec.band = run.target;
      spec.include = [run.target.low, run.target.high];
      spec.aside = `${spec.aside ? spec.aside + "; " : ""}hatched: target ${write(run.target.value)} and the band ` +
        `${write(run.target.low)}–${write(run.target.high)}`;
    }
  }
  return spec;
}

// Several runs: one metric, a line and a band for every objective.
function groupSpec(title, meaning, name, groups, extra) {
  const held = groups.filter((group) => name in group.curves);
  if (!held.length) return null;
  const series = held.map((group) => {
    const n = groups.indexOf(group) % PALETTE.length;
    const line = curve(group, name);
    return { name: `${group.label} (${plural(group.runs.length, "run")})`, color: PALETTE[n], dash: DASHES[n],
      ...line, spread: group.runs.length > 1 ? line.spread : null };
  });
  return { ...extra, title, meaning, series, format: isShare(name) ? percent : write };
}

function compareSection(data) {
  const cards = [];
  for (const card of CARDS) {
    for (const [name, word] of Object.entries(card.lines)) {
      const title = Object.keys(card.lines).length > 1 ? `${card.title}: ${word}` : card.title;
      const spec = groupSpec(title, data.meanings[name] || card.meaning, name, data.groups,
        { zero: card.zero, log: card.log, share: card.share });
      if (spec) cards.push(lineChart(spec));
    }
  }
  return section("compare", "Comparison",
    "Runs of one objective are one line: the mean over their seeds, and one standard deviation to either side.",
    compareTable(data), el("div", { class: "grid" }, cards));
}

// Where every objective ended: mean and spread over its seeds.
function compareTable(data) {
  const columns = [["held-out accuracy", "eval/accuracy"], ["reward", "reward/mean"], ["entropy", "policy/entropy"],
    ["silenced", "tokens/silenced_share"], ["clipped", "update/clip_share"]]
    .filter(([, name]) => data.groups.some((group) => name in group.ends));
  const cell = (group, name) => {
    if (!(name in group.ends)) return "–";
    const [mean, spread] = group.ends[name];
    const format = isShare(name) ? percent : write;
    return format(mean) + (group.runs.length > 1 ? ` ± ${rounded(spread, format)}` : "");
  };
  const rows = data.groups.map((group) => el("tr", {}, el("th", { scope: "row" }, group.label),
    el("td", {}, count(group.runs.length)), columns.map(([, name]) => el("td", {}, cell(group, name)))));
  return el("div", { class: "scroll" }, el("table", { class: "numbers" },
    el("caption", {}, "Accuracy when last tested, reward and entropy over the last steps, shares of tokens over the whole run."),
    el("thead", {}, el("tr", {}, ["objective", "runs", ...columns.map(([title]) => title)].map((t) => el("th", { scope: "col" }, t)))),
    el("tbody", {}, rows)));
}

// Any metric at all, by name.
function anyMetric(data, holder, draw) {
  const names = Object.keys(holder.curves).sort();
  if (!names.length) return null;
  const place = el("div", { class: "any" });
  const first = names.includes("update/ratio_max") ? "update/ratio_max" : names[0];
  const picker = select("Any metric", names.map((name) => [name, name]), first, (name) => {
    choose(name);
    picker.box.focus(); // it moved into the new card
  });
  const choose = (name) => replaceContent(place, lineChart({ ...draw(name), tool: picker.node }));
  choose(first);
  return place;
}

function curvesSection(data, run, pick) {
  const cards = CARDS.map((card) => runSpec(card, run, pick)).filter(Boolean).map(lineChart);
  const more = anyMetric(data, run, (name) => ({
    title: name, meaning: data.meanings[name] || "a metric that trimtab does not know", alarms: run.alarms, openStep: pick, log: true,
    format: isShare(name) ? percent : write, series: [{ name: "value", color: PALETTE[0], dash: "", ...curve(run, name) }],
  }));
  if (more) cards.push(more);
  return section("curves", "Curves", cards.length
    ? "Point at a chart, or reach it with the tab key and use the arrow keys: all charts show the same step. " +
      "A click or Enter looks at that step through the microscope. Where there are many steps, the pale line is each of " +
      "them and the strong one their running mean."
    : "There are no curves: nothing was measured.", el("div", { class: "grid" }, cards));
}

// Alarms on a time line, and each in words.
function alarmsSection(run, pick) {
  if (!run.alarms.length) return section("alarms", "Alarms", "No alarm was raised.");
  const last = Math.max(...run.alarms.map((alarm) => alarm.step), ...(run.recorded.slice(-1)), 1);
  const line = el("div", { class: "timeline", role: "group", "aria-label": "Alarms over the steps of the run" },
    run.alarms.map((alarm) => el("button", { type: "button", class: "bell", style: `left:${(alarm.step / last) * 100}%`,
      "aria-label": `step ${alarm.step}: ${alarm.alarm}`, title: `step ${alarm.step}: ${visible(alarm.alarm)}`,
      on: { click: () => pick(alarm.step) } }, "▼")),
    el("span", { class: "from" }, "step 0"), el("span", { class: "to" }, `step ${count(last)}`));
  const cards = run.alarms.map((alarm) => el("article", { class: "card alarm" },
    el("h3", {}, alarm.alarm, el("span", { class: "at" }, `step ${count(alarm.step)}`)),
    alarm.message ? el("p", {}, alarm.message) : null,
    alarm.evidence ? el("p", { class: "meaning" }, "Evidence: ", alarm.evidence) : null,
    alarm.suggestion ? el("p", {}, el("b", {}, "Try: "), alarm.suggestion) : null,
    alarm.action ? el("p", { class: "meaning" }, "What was done: ", alarm.action) : null,
    el("button", { type: "button", class: "quiet", on: { click: () => pick(alarm.step) } }, "Look at this step's tokens")));
  const more = cards.splice(FIRST_ALARMS);
  return section("alarms", "Alarms", null, line, el("div", { class: "grid" }, cards), more.length
    ? el("details", { class: "more" }, el("summary", {}, `${plural(more.length, "more alarm")}`), el("div", { class: "grid" }, more)) : null);
}
