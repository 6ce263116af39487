// The page of a stress test: who survives what, curves side by side on the same scales, margins in words.

const VERDICT_MARKS = { all: "✓", most: "✓", few: "✕", none: "✕", missing: "" };
const VERDICT_LEGEND = [["all", "all seeds survive"], ["most", "at least two of three survive: it holds"],
  ["few", "fewer survive: it does not hold"], ["none", "no seed survives"], ["missing", "no result"]];

// Objectives down, values of the stress across; each cell says with a figure, a word and a colour how its seeds ended.
function survivalMap(axis, objectives) {
  const cell = (one) => el("td", { class: `verdict-cell verdict-${one.kind}${one.margin ? " margin-cell" : ""}`,
    title: one.seeds.map(visible).join("\n") },
  one.runs ? el("b", {}, `${one.survived}/${one.runs}`) : null,
  one.accuracy ? el("span", {}, `${one.accuracy} right`) : null,
  one.score ? el("span", {}, `score ${one.score}`) : null,
  el("span", { class: "word" }, `${VERDICT_MARKS[one.kind]} ${one.word}`.trim()),
  one.margin ? el("span", { class: "margin-mark" }, "margin") : null);
  const rows = objectives.map((name, n) => el("tr", {}, el("th", { scope: "row" }, name), axis.cells[n].map(cell)));
  const swatch = ([kind, text]) => el("span", { class: "key" },
    el("span", { class: `swatch verdict-${kind}`, "aria-hidden": "true" }, VERDICT_MARKS[kind] || "–"), el("span", {}, text));
  const used = new Set(axis.cells.flat().map((one) => one.kind));
  return el("figure", { class: "card" }, el("h3", {}, "Who survives what"),
    el("p", { class: "meaning" }, "Each cell: how many seeds survived, and how many held-out problems were right at the end. ",
      "A frame and the word margin mark the strongest stress that an objective holds."),
    el("div", { class: "scroll" }, el("table", { class: "survival" },
      el("thead", {}, el("tr", {}, el("td", {}), el("th", { scope: "colgroup", colspan: axis.values.length },
        axis.key, el("span", { class: "rising" }, "rising stress →"))),
      el("tr", {}, el("th", { scope: "col" }, "objective"), axis.values.map((value) => el("th", { scope: "col" }, value)))),
      el("tbody", {}, rows))),
    el("div", { class: "legend" }, VERDICT_LEGEND.filter(([kind]) => used.has(kind)).map(swatch)));
}

// One chart per value of the stress, with a line per objective; all charts of a metric share their scales.
function stressCharts(axis, metric, objectives) {
  const charts = axis.values.map((value, column) => {
    const spec = stressSpec(axis, metric, objectives, column);
    return spec ? lineChart({ ...spec, title: `${axis.key} = ${value}` }) : null;
  });
  return charts.some(Boolean) ? [el("h3", { class: "row-title" }, metric.title), el("p", { class: "meaning" }, metric.meaning),
    el("div", { class: "grid small" }, charts)] : [];
}

// Marks where a run collapsed.
function cross({ step, value, color, text }, scale) {
  return svg("g", { class: "cross-mark" }, svg("title", {}, text),
    svg("path", { d: `M${scale.x(step) - 5} ${scale.y(value) - 5}l10 10m0 -10l-10 10`, stroke: color }));
}

function stressSpec(axis, metric, objectives, column) {
  const share = isShare(metric.name);
  const [series, thin, marks] = [[], [], []];
  metric.charts[column].forEach((line, n) => {
    if (!line) return;
    const style = { color: PALETTE[n % PALETTE.length], dash: DASHES[n % DASHES.length] };
    const seeds = line.seeds.map((seed) => ({ ...seed, steps: decodeArray(seed.steps), values: decodeArray(seed.values) }));
    series.push({ name: objectives[n], ...style, ...decodeAll(line.mean) });
    if (seeds.length > 1) seeds.forEach((seed) => thin.push({ ...seed, ...style }));
    seeds.filter((seed) => seed.collapse !== null && seed.collapse <= metric.steps[1]).forEach((seed) => marks.push({
      step: seed.collapse, value: seed.values[nearestIndex(seed.steps, seed.collapse)], color: style.color,
      text: `${objectives[n]}, seed ${seed.seed}: ${seed.end}` }));
  });
  if (!series.length) return null;
  const ended = axis.cells.map((row, n) => [objectives[n], row[column]]).filter(([, cell]) => cell.runs)
    .map(([name, cell]) => `${name}: ${cell.survived}/${cell.runs}, ${cell.word}`);
  return { meaning: ended.join("; "), series, thin, share, zero: true, format: share ? percent : formatNumber,
    include: metric.range, span: metric.steps, overlay: (scale) => marks.map((mark) => cross(mark, scale)) };
}

function marginTable(axis) {
  const head = (text) => el("th", { scope: "col" }, text);
  const row = ([name, ...cells]) => el("tr", {}, el("th", { scope: "row" }, name), cells.map((text) => el("td", {}, text)));
  return el("div", { class: "card" }, el("h3", {}, "How far each objective holds"),
    el("ul", { class: "sentences" }, axis.sentences.map((text) => el("li", {}, text))),
    el("div", { class: "scroll" }, el("table", { class: "numbers margins" }, el("caption", {}, axis.legend),
      el("thead", {}, el("tr", {}, axis.heads.map(head))), el("tbody", {}, axis.rows.map(row)))));
}

function stressAxisSection(axis, number, objectives) {
  const charts = axis.metrics.flatMap((metric) => stressCharts(axis, metric, objectives));
  return section(`stress-${number}`, axis.key, axis.meaning, survivalMap(axis, objectives),
    charts.length ? el("p", { class: "lead curves-lead" }, "The strong line is the mean over seeds, up to the step at which the first of " +
      "them ended; thin lines are single seeds. ✕ marks the step from which a run had collapsed; collapsed runs are ended early.") : null,
    ...charts, marginTable(axis));
}

function stressRunsSection(stress) {
  const heads = ["objective", "stress", "seed", "how it ended", "held-out accuracy", "steps", "folder"];
  const table = el("table", { class: "numbers texts" },
    el("thead", {}, el("tr", {}, heads.map((text) => el("th", { scope: "col" }, text)))),
    el("tbody", {}, stress.runs.map((row) => el("tr", {}, row.map((text) => el("td", {}, text))))));
  return section("runs", "Runs", "trimtab report with the folder of a run shows that run alone.",
    el("details", {}, el("summary", {}, plural(stress.runs.length, "run")), el("div", { class: "scroll" }, table)));
}

function stressPage({ stress }) {
  const notes = stress.missing.length ? el("div", { class: "note", role: "note" }, el("b", {}, "Without a result"),
    el("ul", {}, stress.missing.map((note) => el("li", {}, note)))) : null;
  const words = el("dl", { class: "words" }, stress.words.map(([word, text]) => [el("dt", {}, word), el("dd", {}, text)]).flat());
  return [
    el("section", { id: "summary", "aria-labelledby": "summary-title" }, el("h1", { id: "summary-title" }, stress.title),
      el("p", { class: "lead" }, "The same training run under rising stress: how far can each objective be pushed before it breaks?"),
      stress.summary.map((text) => el("p", { class: "summary-text" }, text)), notes),
    stress.axes.map((axis, n) => stressAxisSection(axis, n, stress.objectives)),
    section("words", "What the words mean", null, words),
    stressRunsSection(stress),
    section("command", "Command", null, el("pre", { class: "text", tabindex: "0" }, stress.command)),
  ].flat();
}
