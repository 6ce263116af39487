// Two heat maps over all tokens: probability and entropy, and surprisal and advantage.

const BOX = { left: 50, right: 12, top: 12, bottom: 40, height: 300 };

// A grid of counts as an image; empty cells are transparent, and the colour is the logarithm of the count.
function heatImage(counts, columns, rows) {
  const most = counts.reduce((a, b) => Math.max(a, b), 0);
  const canvas = el("canvas", { width: columns, height: rows });
  const context = canvas.getContext("2d");
  const image = context.createImageData(columns, rows);
  for (let n = 0; n < counts.length; n += 1) {
    if (!counts[n]) continue;
    const [x, y] = [n % columns, rows - 1 - Math.floor(n / columns)];
    image.data.set([...heat(most > 1 ? Math.log(counts[n]) / Math.log(most) : 1), 255], 4 * (y * columns + x));
  }
  context.putImageData(image, 0, 0);
  return { url: canvas.toDataURL(), most };
}

function heatLegend(most) {
  const stops = HEAT.map((color, n) => `${color} ${(100 * n) / (HEAT.length - 1)}%`).join(",");
  return el("div", { class: "ramp-legend" }, el("span", {}, "1 token"),
    el("span", { class: "ramp", style: `background:linear-gradient(90deg,${stops})` }), el("span", {}, `${count(most)} in a cell`));
}

// spec: title, meaning, description (for screen readers), tool, x and y {low, high, bins, label, ticks [[value, text]],
// describe(low, high)}, counts, overlay(scale): more SVG.
function heatMap(spec) {
  const picture = svg("svg", { class: "heat-map", role: "img", tabindex: "0", height: BOX.height,
    "aria-label": `${spec.title}. ${spec.description} Arrow keys move through the cells.` });
  const readout = el("p", { class: "meaning readout", "aria-live": "polite" }, "Point at a cell to read it.");
  const { url, most } = heatImage(spec.counts, spec.x.bins, spec.y.bins);
  const total = spec.counts.reduce((a, b) => a + b, 0);
  const card = el("figure", { class: "card" }, spec.tool, el("h3", {}, spec.title), el("p", { class: "meaning" }, spec.meaning),
    picture, heatLegend(most), readout);
  let scale = null;
  let frame = null;
  let cell = null;
  let drawnWidth = null;

  function draw() {
    const width = Math.max(picture.clientWidth, 220);
    if (width === drawnWidth) return;
    drawnWidth = width;
    const [w, h] = [width - BOX.left - BOX.right, BOX.height - BOX.top - BOX.bottom];
    const fraction = (axis, v) => (v - axis.low) / (axis.high - axis.low);
    scale = { x: (v) => BOX.left + fraction(spec.x, v) * w, y: (v) => BOX.top + (1 - fraction(spec.y, v)) * h, w, h };
    frame = svg("rect", { class: "cell", visibility: "hidden" });
    const xTicks = width < 330 ? spec.x.ticks.filter((_, n) => n % 2 === 0) : spec.x.ticks;
    picture.setAttribute("viewBox", `0 0 ${width} ${BOX.height}`);
    picture.replaceChildren(
      svg("rect", { x: BOX.left, y: BOX.top, width: w, height: h, class: "ground" }),
      svg("image", { href: url, x: BOX.left, y: BOX.top, width: w, height: h, preserveAspectRatio: "none" }),
      ...xTicks.map(([value, text]) => svg("text", { x: scale.x(value), y: BOX.height - 24, class: "tick middle" }, text)),
      ...spec.y.ticks.map(([value, text]) => svg("text", { x: BOX.left - 6, y: scale.y(value) + 4, class: "tick end" }, text)),
      svg("text", { x: BOX.left + w / 2, y: BOX.height - 6, class: "axis middle" }, spec.x.label),
      svg("text", { x: 12, y: BOX.top + h / 2, class: "axis middle", transform: `rotate(-90 12 ${BOX.top + h / 2})` }, spec.y.label),
      ...spec.overlay(scale), frame);
    if (cell) showCell(...cell);
  }

  function showCell(column, row) {
    cell = [Math.min(Math.max(column, 0), spec.x.bins - 1), Math.min(Math.max(row, 0), spec.y.bins - 1)];
    const [dx, dy] = [(spec.x.high - spec.x.low) / spec.x.bins, (spec.y.high - spec.y.low) / spec.y.bins];
    const [x, y] = [spec.x.low + cell[0] * dx, spec.y.low + cell[1] * dy];
    for (const [key, value] of Object.entries({ x: scale.x(x), y: scale.y(y + dy), width: scale.w / spec.x.bins,
      height: scale.h / spec.y.bins, visibility: "visible" })) frame.setAttribute(key, value);
    const tokens = spec.counts[cell[1] * spec.x.bins + cell[0]];
    readout.textContent = `${spec.x.describe(x, x + dx)}, ${spec.y.describe(y, y + dy)}: ${plural(tokens, "token")}` +
      (tokens ? ` (${percent(tokens / total)})` : "");
  }

  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const [x, y] = [(event.clientX - box.left - BOX.left) / scale.w, (event.clientY - box.top - BOX.top) / scale.h];
    if (x >= 0 && x < 1 && y >= 0 && y < 1) showCell(Math.floor(x * spec.x.bins), Math.floor((1 - y) * spec.y.bins));
  });
  picture.addEventListener("keydown", (event) => {
    const [column, row] = cell || [spec.x.bins - 1, 0];
    const goal = { ArrowLeft: [column - 1, row], ArrowRight: [column + 1, row], ArrowUp: [column, row + 1],
      ArrowDown: [column, row - 1] }[event.key];
    if (!goal) return;
    showCell(...goal);
    event.preventDefault();
  });
  figures.set(card, { draw });
  return card;
}

function sum(...arrays) {
  return arrays[0].map((_, n) => arrays.reduce((total, array) => total + array[n], 0));
}

function axis([low, high, bins], label, name, tickCount) {
  return { low, high, bins, label, describe: (a, b) => `${name} ${formatNumber(a)} to ${formatNumber(b)}`,
    ticks: ticks(low, high, tickCount).map((v) => [v, formatNumber(v)]) };
}

function probabilityAxis([low, high, bins]) {
  const probability = (exponent) => formatNumber(Number((10 ** exponent).toPrecision(2)));
  const labels = ["10⁻⁶", "10⁻⁵", "10⁻⁴", "0.001", "0.01", "0.1", "1"];
  return { low, high, bins, label: "probability of the token",
    describe: (a, b) => `probability ${probability(a)} to ${probability(b)}`,
    ticks: labels.map((text, n) => [n - 6, text]) };
}

const TOKEN_SETS = [["all", "all tokens"], ["rewarded", "rewarded (advantage above 0)"],
  ["punished", "punished (advantage below 0)"], ["neutral", "without signal (advantage 0)"],
  ["silenced", "silenced, masked or dropped"]];

// The region in which S2T (STAPO) silences rewarded tokens: below its thresholds of probability and entropy. Without
// candidates there is no threshold of the entropy, and no region.
function spuriousRegion(region, plane, scale) {
  const [left, right] = [plane.x[0], Math.min(Math.log10(region.tau_p), plane.x[1])];
  const top = Math.min(region.tau_h, plane.y[1]);
  return [
    svg("rect", { x: scale.x(left), y: scale.y(top), width: Math.max(scale.x(right) - scale.x(left), 0),
      height: Math.max(scale.y(0) - scale.y(top), 0), class: "region" }),
    svg("text", { x: scale.x(left) + 6, y: Math.max(scale.y(top) - 6, BOX.top + 12), class: "region-label" }, "silenced if rewarded"),
  ];
}

function regionText(region) {
  if (!region) return "";
  const rare = formatNumber(region.tau_p);
  if (region.tau_h === null) {
    return ` No threshold of the entropy is known: there were no rewarded tokens with a probability below ${rare}, so none was ` +
      "silenced, or the metric was not logged.";
  }
  return ` Rewarded tokens in the dashed corner are silenced: probability below ${rare} and entropy below the threshold (median ` +
    `${formatNumber(region.tau_h)} nats, ${formatNumber(region.low)} to ${formatNumber(region.high)} over the run).`;
}

function probabilityEntropyMap(run) {
  const plane = run.token_statistics.probability_entropy;
  const counts = decodeAll(plane.counts);
  const tokenSets = { all: sum(counts.rewarded, counts.punished, counts.neutral), ...counts };
  const slot = el("div", { class: "token-set-slot" });
  const region = run.spurious_region;
  const known = region && region.tau_h !== null;
  const draw = (name) => replaceContent(slot, heatMap({
    title: "Probability and entropy", counts: tokenSets[name], tool: picker.node,
    meaning: `Where the tokens lie: rare tokens on the left, confident predictions at the bottom.${regionText(region)}`,
    description: `${count(tokenSets[name].reduce((a, b) => a + b, 0))} tokens.`,
    overlay: (scale) => (known ? spuriousRegion(region, plane, scale) : []),
    x: probabilityAxis(plane.x), y: axis(plane.y, "entropy (nats)", "entropy", 4),
  }));
  const picker = select("Tokens", TOKEN_SETS, "all", (name) => {
    draw(name);
    picker.box.focus(); // moving it into the new card took the focus away
  });
  draw("all");
  return slot;
}

const QUADRANTS = {
  rewarded_expected: ["rewarded, expected", "entropy falls", 0.02, 0.09],
  rewarded_surprising: ["rewarded, surprising", "entropy rises", 0.98, 0.09],
  punished_expected: ["punished, expected", "entropy rises", 0.02, 0.97],
  punished_surprising: ["punished, surprising", "entropy falls", 0.98, 0.97],
};

const arrow = (direction) => (direction.endsWith("rises") ? "↑" : "↓");

// The advantage-surprisal quadrants: in which direction each token changes the entropy.
function quadrantMap(run) {
  const plane = run.token_statistics.quadrants;
  const [low, high] = plane.x;
  const totals = [0, 1, 2].map((n) => Object.values(plane.sums).reduce((a, row) => a + Math.abs(row[n] || 0), 0));
  const overlay = (scale) => [
    svg("line", { x1: scale.x(0), x2: scale.x(0), y1: scale.y(plane.y[1]), y2: scale.y(plane.y[0]), class: "cross" }),
    svg("line", { x1: scale.x(low), x2: scale.x(high), y1: scale.y(0), y2: scale.y(0), class: "cross" }),
    ...Object.entries(QUADRANTS).map(([name, [, direction, x, y]]) => svg("text",
      { x: scale.x(low) + x * scale.w, y: BOX.top + y * scale.h, class: `quadrant ${x < 0.5 ? "" : "end"}` },
      `${scale.w > 380 ? direction : ""} ${arrow(direction)} ${percent(plane.sums[name][0] / totals[0])}`)),
  ];
  const map = heatMap({
    title: "Advantage and surprisal", counts: decodeArray(plane.counts), overlay,
    meaning: "Right of the vertical line a token's surprisal is above the critical one of its distribution, at which " +
      "its effect on the entropy changes sign (STARE).",
    description: `${count(totals[0])} tokens with an advantage.`,
    x: axis(plane.x, "surprisal minus critical surprisal (nats)", "excess surprisal", 6), y: axis(plane.y, "advantage", "advantage", 6),
  });
  const rows = Object.entries(QUADRANTS).map(([name, [title, direction]]) => {
    const [tokens, gradient, change] = plane.sums[name];
    return el("tr", {}, el("th", { scope: "row" }, title), el("td", {}, percent(tokens / totals[0])),
      el("td", {}, percent(gradient / totals[1])), el("td", {}, `${arrow(direction)} ${percent(Math.abs(change) / totals[2])}`));
  });
  map.append(el("div", { class: "scroll" }, el("table", { class: "numbers" }, el("thead", {}, el("tr", {},
    ["share of", "tokens", "gradient norm", "entropy change"].map((text) => el("th", { scope: "col" }, text)))),
  el("tbody", {}, rows))));
  return map;
}

function heatMapsSection(run) {
  const statistics = run.token_statistics;
  const steps = statistics ? statistics.entropy_quantiles.steps.n : 0;
  if (!steps) {
    return section("heat-maps", "All tokens", "There is nothing to show: no tokens with their entropy are recorded.");
  }
  const hasMoments = decodeArray(statistics.quadrants.counts).some((n) => n > 0);
  const sample = steps < run.recorded_steps ? `${count(steps)} evenly spaced of the ` : "";
  return section("heat-maps", "All tokens", `${plural(statistics.tokens, "token")} of ${sample}` +
    `${plural(run.recorded_steps, "recorded step")}. Brighter cells hold more tokens, on a logarithmic scale.`,
  el("div", { class: "grid wide" }, probabilityEntropyMap(run), hasMoments ? quadrantMap(run)
    : el("p", { class: "note" }, "The quadrants need the moments of the distributions (sum_p2, sum_p2_logp), which are not recorded.")));
}
