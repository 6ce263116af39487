// The charts of a run, or of several: which metrics share a card, and their formats.

// A line of a `seldom` card is left out where it is 0 all the time.
const CARDS = [
  { title: "Reward", meaning: "Mean reward of the step's responses", lines: { "reward/mean": "reward" } },
  { title: "Score", meaning: "Mean number that the task's rule gave: in training, and with greedy decoding on held-out problems",
    lines: { "reward/score": "sampled", "eval/score": "held-out" }, dotted: "eval/score" },
  { title: "Accuracy", meaning: "Share of right answers: sampled in training, and greedy decoding on held-out problems",
    lines: { "reward/accuracy": "sampled", "eval/accuracy": "held-out" }, share: true, dotted: "eval/accuracy" },
  { title: "Entropy", meaning: "Token-mean entropy of the policy, in nats", lines: { "policy/entropy": "mean" },
    zero: true, entropy: true },
  { title: "Reweighted tokens", meaning: "Share of tokens whose weight the objective changed", share: true, zero: true,
    lines: { "tokens/silenced_share": "silenced", "tokens/boosted_share": "boosted", "tokens/damped_share": "damped",
      "tokens/masked_share": "masked", "tokens/dropped_share": "dropped", "tokens/penalized_share": "penalized" } },
  { title: "Clipped tokens", meaning: "Share of tokens whose gradient is cut by clipping", share: true, zero: true,
    lines: { "update/clip_share": "clipped" } },
  { title: "Gradient norm", meaning: "Global gradient norm of the update, before gradient clipping", lines: { "update/grad_norm": "norm" },
    zero: true, log: true },
  { title: "Response length", meaning: "Tokens per response", lines: { "response/length_mean": "tokens" }, zero: true },
  { title: "Conversations", meaning: "Share of conversations with a successful call; with a message that has neither call nor answer; cut at their last turn",
    share: true, zero: true, lines: { "conversation/called_share": "successful call", "conversation/void_share": "void turn",
      "conversation/out_of_turns_share": "out of turns", "eval/called_share": "held-out, successful call" }, dotted: "eval/called_share" },
  { title: "Turns", meaning: "Messages of the policy per conversation", zero: true,
    lines: { "conversation/turns_mean": "sampled", "eval/turns_mean": "held-out" }, dotted: "eval/turns_mean" },
  { title: "Calls of tools", meaning: "Calls of the step, and how many of them succeeded", zero: true,
    lines: { "tools/calls": "calls", "tools/ok": "successful" } },
  { title: "Failed calls", meaning: "Calls of the step that failed, by what came of them", zero: true, seldom: true,
    lines: { "tools/exception": "exception", "tools/timeout": "timeout", "tools/memory": "memory", "tools/output": "output",
      "tools/killed": "killed", "tools/malformed": "malformed", "tools/unknown_tool": "unknown tool", "tools/bad_arguments": "bad arguments" } },
  { title: "Observed tokens", meaning: "Tokens per conversation that tools wrote, which are not trained on", zero: true,
    lines: { "conversation/observed_tokens_mean": "tokens" } },
  { title: "Difficulty pools", meaning: "Problems by the mean reward of their latest group: the next prompts come from these pools by shares",
    zero: true, lines: { "curriculum/pool_hard": "hard", "curriculum/pool_normal": "normal", "curriculum/pool_easy": "easy",
      "curriculum/pool_solved": "solved" } },
  { title: "Groups and gates", meaning: "Share of the sampled groups that the gates admit; share of solved problems that are solved again",
    share: true, zero: true, lines: { "curriculum/admitted_share": "admitted", "curriculum/still_solved_share": "still solved" } },
  { title: "Seconds of a step", meaning: "Seconds that each part of a step took; evaluations and checkpoints where there were any", zero: true,
    lines: { "time/sampling": "sampling", "time/tools": "waiting for tools", "time/grading": "grading", "time/scoring": "scoring",
      "time/update": "updates", "time/evaluation": "evaluation", "time/checkpoint": "checkpoint" } },
  { title: "Seconds of a call", meaning: "Mean seconds that a call of a tool took", zero: true, log: true, lines: { "time/tool_call": "seconds" } },
  { title: "Waiting for tools", meaning: "Share of the sampling time in which nothing was decoded, waiting for tools",
    share: true, zero: true, lines: { "time/tools_wait_share": "waiting" } },
];

// The cards of these curves: several rewards have names of the recipe's own.
function cardsOf(curves) {
  const rewards = Object.keys(curves).filter((name) => name.startsWith("rewards/"));
  const card = (title, meaning, names) => ({ title, meaning,
    lines: Object.fromEntries(names.slice(0, PALETTE.length).map((name) => [name, name.slice(8).replace(/_spread$/, "")])) });
  const isSpread = (name) => name.endsWith("_spread");
  const several = !rewards.length ? [] : [
    card("Rewards", "Mean of each reward by itself, before its weight", rewards.filter((name) => !isSpread(name))),
    card("What each reward teaches", "Standard deviation within groups of each reward times its weight, mean over groups", rewards.filter(isSpread)),
  ];
  return [CARDS[0], ...several, ...CARDS.slice(1)];
}

const isShare = (name) => /_share$|accuracy($|\/)/.test(name);

// What the horizontal axis can show: the step, or what had been spent by then.
const AXIS_NAMES = { step: "steps", tokens: "response tokens", time: "time" };
const formatDuration = (seconds) => (seconds >= 7200 ? `${formatNumber(seconds / 3600)} h`
  : seconds >= 120 ? `${formatNumber(seconds / 60)} min` : `${formatNumber(seconds)} s`);
const AXIS_FORMATS = { tokens: (n) => `${formatNumber(n)} tokens`, time: formatDuration };

// The index of the last step that is not after `step`.
function indexBefore(steps, step) {
  let [low, high] = [0, steps.length - 1];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (steps[middle] <= step) low = middle; else high = middle - 1;
  }
  return low;
}

function nearestIndex(steps, step) {
  const at = indexBefore(steps, step);
  return at + 1 < steps.length && steps[at + 1] - step < step - steps[at] ? at + 1 : at;
}

// The value at `x` of the line through points with rising `xs`; it goes on level at both ends.
function lineValue(xs, ys, x) {
  const at = indexBefore(xs, x);
  if (at + 1 >= xs.length || x <= xs[at]) return ys[at];
  const width = xs[at + 1] - xs[at];
  return width > 0 ? ys[at] + ((x - xs[at]) / width) * (ys[at + 1] - ys[at]) : ys[at];
}

// A chart's spec over another axis of its source, a run; lines of several groups each have a source of their own.
function onAxis(spec, name, source, sources = null) {
  if (!spec || name === "step") return spec;
  const spent = memoize((owner) => decodeCurve(owner.axes[name]));
  const of = (step, owner = source) => lineValue(spent(owner).steps, spent(owner).values, step);
  const moved = (line, owner = source) => ({ ...line, steps: Float64Array.from(line.steps, (step) => of(step, owner)) });
  const format = AXIS_FORMATS[name];
  const stepAt = (x) => Math.round(lineValue(spent(source).values, spent(source).steps, x));
  return {
    ...spec,
    series: spec.series.map((line, n) => moved(line, sources ? sources[n] : source)),
    fan: spec.fan && spec.fan.map((line) => moved(line)),
    axis: { of, stepAt, tick: name === "time" ? formatDuration : formatNumber,
      at: (x) => (sources ? format(x) : `${format(x)}, step ${count(stepAt(x))}`) },
  };
}

// A grid of charts with a choice of the axis above it. `specsOf(axis, owners)` are the charts of the owners of the curves, which
// are cut to a part of the run while one looks at a part; `picker`, if any, is a `metricPicker`.
function gridWithAxis(owners, specsOf, picker = null) {
  const state = { axis: "step", owners };
  const grid = el("div", { class: "grid" });
  const range = el("span", { class: "range" });
  const axes = () => Object.keys(AXIS_NAMES).filter((name) => name === "step" || owners.every((owner) => name in (owner.axes || {})));
  let charts = [];
  let known = axes();

  const zoomable = (spec) => (spec && state.axis === "step" ? { ...spec, zoom: setRange } : spec);
  const specs = () => specsOf(state.axis, state.owners).filter(Boolean).map(zoomable);
  const specOf = (name) => zoomable(picker.specOf(name, state.axis, state.owners));

  let nameCount = 0;

  function build() {
    nameCount = picker ? Object.keys(state.owners[0].curves).length : 0;
    charts = specs().map((spec) => [spec.title, lineChart(spec)]);
    const more = picker ? metricPicker(state.owners[0], specOf, picker) : null;
    replaceContent(grid, ...charts.map(([, card]) => card), ...(more ? [more] : []));
  }

  function update() {
    if (axes().length !== known.length) {
      known = axes();
      choice.replaceChildren(...choiceNodes());
    }
    if (state.owners !== owners) return; // a part of the run stays as it is
    const now = specs();
    const names = picker ? Object.keys(owners[0].curves).length : 0;
    if (names === nameCount && now.length === charts.length && now.every((spec, n) => spec.title === charts[n][0])) {
      now.forEach((spec, n) => figures.get(charts[n][1])?.update(spec));
      picker?.update?.(specOf);
    } else build();
  }

  async function setRange(given) {
    const steps = given && wholeRange(given);
    state.owners = !steps ? owners : source ? await source.zoom(owners, steps) : owners.map((owner) => cutCurves(owner, steps));
    cursor.set(null);
    build();
    range.replaceChildren(...(steps ? [el("span", {}, `steps ${count(steps[0])} to ${count(steps[1])}`),
      el("button", { type: "button", class: "quiet", on: { click: () => setRange(null) } }, "Whole run")] : []));
  }

  const choiceNodes = () => [...(known.length < 2 ? [] : [select("Horizontal axis", known.map((name) => [name, AXIS_NAMES[name]]), state.axis, (name) => {
    cursor.set(null);
    state.axis = name;
    build();
  }).node]), range];
  const choice = el("div", { class: "axis-choice" }, choiceNodes());
  build();
  growth.push(update);
  return [choice, grid];
}

// One run: a card's metrics as lines.
function runSpec(card, run, openStep) {
  const names = Object.keys(card.lines).filter((name) => name in run.curves && (!card.seldom || readCurve(run, name).values.some(Boolean)));
  if (!names.length) return null;
  const series = names.map((name, n) => ({
    name: card.lines[name], color: PALETTE[n], dash: DASHES[n], dots: name === card.dotted, ...readCurve(run, name),
  }));
  const spec = { ...card, series, format: card.share ? percent : formatNumber, alarms: run.alarms, openStep };
  if (card.entropy) {
    const quantiles = run.token_statistics && run.token_statistics.entropy_quantiles;
    if (quantiles && quantiles.steps.n > 1) {
      const steps = decodeArray(quantiles.steps);
      spec.fan = quantiles.values.map((values) => ({ steps, values: decodeArray(values) }));
      spec.aside = "shaded: 25-75 % and 10-90 % of the tokens; dotted: median";
    }
    if (run.entropy_target) {
      const { low, high, value } = run.entropy_target;
      spec.band = run.entropy_target;
      spec.include = [low, high];
      spec.aside = `${spec.aside ? spec.aside + "; " : ""}dashed: target ${formatNumber(value)}, band ` +
        `${formatNumber(low)}–${formatNumber(high)}`;
    }
  }
  return spec;
}

// Several runs: one metric, with a line and a band for every objective.
function groupSpec(title, meaning, name, groups, extra) {
  const measured = groups.filter((group) => name in group.curves);
  if (!measured.length) return null;
  const series = measured.map((group) => {
    const n = groups.indexOf(group) % PALETTE.length;
    const line = readCurve(group, name);
    return { name: `${group.label} (${plural(group.runs.length, "run")})`, color: PALETTE[n], dash: DASHES[n],
      ...line, spread: group.runs.length > 1 ? line.std : null, bounds: [extra.zero || extra.share ? 0 : -Infinity, extra.share ? 1 : Infinity] };
  });
  return { ...extra, title, meaning, series, format: isShare(name) ? percent : formatNumber };
}

function compareSection(data) {
  const specs = (axis, groups) => {
    const made = [];
    for (const card of [...cardsOf(Object.assign({}, ...groups.map((group) => group.curves))), ...CONTROL_CARDS]) {
      for (const [name, label] of Object.entries(card.lines)) {
        const title = Object.keys(card.lines).length > 1 ? `${card.title}: ${label}` : card.title;
        const spec = groupSpec(title, data.metric_descriptions[name] || card.meaning, name, groups,
          { zero: card.zero, log: card.log, share: card.share });
        const measured = groups.filter((group) => name in group.curves);
        if (spec && !(card.seldom && spec.series.every((line) => !line.values.some(Boolean)))) made.push(onAxis(spec, axis, measured[0], measured));
      }
    }
    return made;
  };
  const table = el("div", {}, compareTable(data));
  growth.push(() => table.replaceChildren(compareTable(data)));
  return section("compare", "Comparison",
    "Runs of one objective are one line: the mean over their seeds, with a band of one standard deviation.",
    table, ...gridWithAxis(data.groups, specs));
}

// The final values of every objective: mean and standard deviation over its seeds.
function compareTable(data) {
  const columns = [["held-out accuracy", "eval/accuracy"], ["held-out score", "eval/score"], ["reward", "reward/mean"],
    ["entropy", "policy/entropy"], ["silenced", "tokens/silenced_share"], ["clipped", "update/clip_share"],
    ["successful call", "conversation/called_share"]]
    .filter(([, name]) => data.groups.some((group) => name in group.final_values));
  const cell = (group, name) => {
    if (!(name in group.final_values)) return "–";
    const [mean, spread] = group.final_values[name];
    const format = isShare(name) ? percent : formatNumber;
    return format(mean) + (group.runs.length > 1 ? ` ± ${rounded(spread, format)}` : "");
  };
  const rows = data.groups.map((group) => el("tr", {}, el("th", { scope: "row" }, group.label),
    el("td", {}, count(group.runs.length)), columns.map(([, name]) => el("td", {}, cell(group, name)))));
  return el("div", { class: "scroll" }, el("table", { class: "numbers" },
    el("caption", {}, `Accuracy and score at the last evaluation; reward, entropy and calls: mean over ${data.end_window}; shares of tokens over the whole run.`),
    el("thead", {}, el("tr", {}, ["objective", "runs", ...columns.map(([title]) => title)].map((t) => el("th", { scope: "col" }, t)))),
    el("tbody", {}, rows)));
}

// A chart of any metric, chosen by name; `chosen` keeps the name, and gets a function that draws what has grown.
function metricPicker(run, specOf, chosen) {
  const names = Object.keys(run.curves).sort();
  if (!names.length) return null;
  const slot = el("div", { class: "any-metric" });
  if (!names.includes(chosen.name)) chosen.name = names.includes("update/ratio_max") ? "update/ratio_max" : names[0];
  const picker = select("Any metric", names.map((name) => [name, name]), chosen.name, (name) => {
    choose(name);
    picker.box.focus(); // moving it into the new card took the focus away
  });
  const choose = (name) => {
    chosen.name = name;
    const card = lineChart({ ...specOf(name), tool: picker.node });
    chosen.update = (now) => figures.get(card)?.update({ ...now(chosen.name), tool: picker.node });
    replaceContent(slot, card);
  };
  choose(chosen.name);
  return slot;
}

function curvesSection(data, run, openStep) {
  const specs = (axis, [owner]) => [...cardsOf(owner.curves), ...sourceCards(owner)].map((card) => runSpec(card, owner, openStep))
    .filter(Boolean).map((spec) => onAxis(spec, axis, owner));
  const specOf = (name, axis, [owner]) => onAxis({
    title: name, meaning: data.metric_descriptions[name.replace(/(accuracy)\/.*/, "$1")] || "not a metric of trimtab",
    alarms: owner.alarms, openStep, log: true, format: isShare(name) ? percent : formatNumber,
    series: [{ name: "value", color: PALETTE[0], dash: "", ...readCurve(owner, name) }],
  }, axis, owner);
  return section("curves", "Curves", Object.keys(run.curves).length
    ? "Point at a chart, or focus it with the tab key and use the arrow keys: all charts show the same step. " +
      "A click or Enter opens that step in the microscope. In long runs the pale line is the raw value and the strong " +
      "one a running mean. Drag over a chart to look at a part of the run."
    : "There are no curves: no metrics were logged.", ...gridWithAxis([run], specs, { specOf }));
}

// Accuracy by data source, where the data has several: a card for held-out problems and one for training's.
function sourceCards(run) {
  const kinds = { "eval/accuracy/": ["Held-out accuracy by source", "greedy decoding on held-out problems"],
    "reward/accuracy/": ["Accuracy by source", "responses sampled in training"] };
  return Object.entries(kinds).map(([prefix, [title, what]]) => {
    const names = Object.keys(run.curves).filter((name) => name.startsWith(prefix)).sort();
    const more = names.length > PALETTE.length ? `, the first ${PALETTE.length} of ${names.length}; "Any metric" has the others` : "";
    return { title, meaning: `Share of right answers for each data_source: ${what}${more}`, share: true,
      lines: Object.fromEntries(names.slice(0, PALETTE.length).map((name) => [name, name.slice(prefix.length)])) };
  });
}
