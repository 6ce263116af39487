// Two pictures of all tokens at once: how probable and how certain, and how rewarded and how surprising.

const BOX = { left: 50, right: 12, top: 12, bottom: 40, height: 300 };

// A grid of counts as an image; a cell without tokens is left out, and the colour is the logarithm of the count.
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

// spec: title, meaning, x and y {low, high, bins, label, ticks [[value, text]], say}, counts, over(to): more SVG.
function heatMap(spec) {
  const picture = svg("svg", { class: "plane", role: "img", tabindex: "0", height: BOX.height,
    "aria-label": `${spec.title}. ${spec.saying} Arrow keys move through the cells.` });
  const reading = el("p", { class: "meaning reading", "aria-live": "polite" }, spec.hint);
  const { url, most } = heatImage(spec.counts, spec.x.bins, spec.y.bins);
  const total = spec.counts.reduce((a, b) => a + b, 0);
  const card = el("figure", { class: "card" }, spec.tool, el("h3", {}, spec.title), el("p", { class: "meaning" }, spec.meaning),
    picture, heatLegend(most), reading);
  let to = null;
  let frame = null;
  let cell = null;
  let drawnWidth = null;

  function draw() {
    const width = Math.max(picture.clientWidth, 220);
    if (width === drawnWidth) return;
    drawnWidth = width;
    const [w, h] = [width - BOX.left - BOX.right, BOX.height - BOX.top - BOX.bottom];
    const share = (axis, v) => (v - axis.low) / (axis.high - axis.low);
    to = { x: (v) => BOX.left + share(spec.x, v) * w, y: (v) => BOX.top + (1 - share(spec.y, v)) * h, w, h };
    frame = svg("rect", { class: "cell", visibility: "hidden" });
    const few = width < 330 ? spec.x.ticks.filter((_, n) => n % 2 === 0) : spec.x.ticks;
    picture.setAttribute("viewBox", `0 0 ${width} ${BOX.height}`);
    picture.replaceChildren(
      svg("rect", { x: BOX.left, y: BOX.top, width: w, height: h, class: "ground" }),
      svg("image", { href: url, x: BOX.left, y: BOX.top, width: w, height: h, preserveAspectRatio: "none" }),
      ...few.map(([value, text]) => svg("text", { x: to.x(value), y: BOX.height - 24, class: "tick middle" }, text)),
      ...spec.y.ticks.map(([value, text]) => svg("text", { x: BOX.left - 6, y: to.y(value) + 4, class: "tick end" }, text)),
      svg("text", { x: BOX.left + w / 2, y: BOX.height - 6, class: "axis middle" }, spec.x.label),
      svg("text", { x: 12, y: BOX.top + h / 2, class: "axis middle", transform: `rotate(-90 12 ${BOX.top + h / 2})` }, spec.y.label),
      ...spec.over(to), frame);
    if (cell) point(...cell);
  }

  function point(column, row) {
    cell = [Math.min(Math.max(column, 0), spec.x.bins - 1), Math.min(Math.max(row, 0), spec.y.bins - 1)];
    const [dx, dy] = [(spec.x.high - spec.x.low) / spec.x.bins, (spec.y.high - spec.y.low) / spec.y.bins];
    const [x, y] = [spec.x.low + cell[0] * dx, spec.y.low + cell[1] * dy];
    for (const [key, value] of Object.entries({ x: to.x(x), y: to.y(y + dy), width: to.w / spec.x.bins,
      height: to.h / spec.y.bins, visibility: "visible" })) frame.setAttribute(key, value);
    const held = spec.counts[cell[1] * spec.x.bins + cell[0]];
    reading.textContent = `${spec.x.say(x, x + dx)}, ${spec.y.say(y, y + dy)}: ${plural(held, "token")}` +
      (held ? ` (${percent(held / total)})` : "");
  }

  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const [x, y] = [(event.clientX - box.left - BOX.left) / to.w, (event.clientY - box.top - BOX.top) / to.h];
    if (x >= 0 && x < 1 && y >= 0 && y < 1) point(Math.floor(x * spec.x.bins), Math.floor((1 - y) * spec.y.bins));
  });
  picture.addEventListener("keydown", (event) => {
    const [column, row] = cell || [spec.x.bins - 1, 0];
    const goal = { ArrowLeft: [column - 1, row], ArrowRight: [column + 1, row], ArrowUp: [column, row + 1],
      ArrowDown: [column, row - 1] }[event.key];
    if (!goal) return;
    point(...goal);
    event.preventDefault();
  });
  figures.set(card, { draw });
  return card;
}

function sum(...arrays) {
  return arrays[0].map((_, n) => arrays.reduce((total, array) => total + array[n], 0));
}

const probability = (exponent) => write(Number((10 ** exponent).toPrecision(2)));

// The probability-entropy plane, with the corner in which STAPO silences.
function probabilityPlane(run) {
  const plane = run.survey.plane;
  const counts = unpackAll(plane.counts);
  const populations = { all: sum(counts.rewarded, counts.punished, counts.neutral), ...counts };
  const place = el("div", { class: "plane-slot" });
  const [low, high, bins] = plane.x;
  const spurious = run.spurious;
  const over = (to) => {
    if (!spurious) return [];
    const right = Math.min(Math.log10(spurious.tau_p), high);
    const top = Math.min(Number.isFinite(spurious.tau_h) && spurious.tau_h !== null ? spurious.tau_h : plane.y[1], plane.y[1]);
    const label = { x: to.x(low) + 6, y: Math.max(to.y(top) - 6, BOX.top + 12), class: "region-label" };
    return [svg("rect", { x: to.x(low), y: to.y(top), width: Math.max(to.x(right) - to.x(low), 0),
      height: Math.max(to.y(0) - to.y(top), 0), class: "region" }), svg("text", label, "silenced if rewarded")];
  };
  const draw = (name) => replaceContent(place, heatMap({
    title: "Probability and entropy", counts: populations[name], over, tool: picker.node,
    meaning: "Where tokens lie: rare ones left, certain places below." + (spurious
      ? ` The dashed corner is where rewarded tokens are silenced: below ${write(spurious.tau_p)} and below the entropy ` +
        `threshold (${write(spurious.tau_h)} nats in the middle of the run, ${write(spurious.low)} to ${write(spurious.high)} over it).` : ""),
    saying: `${count(populations[name].reduce((a, b) => a + b, 0))} tokens.`,
    hint: "Point at a cell to read it.",
    x: { low, high, bins, label: "probability of the token", say: (a, b) => `probability ${probability(a)} to ${probability(b)}`,
      ticks: [-6, -5, -4, -3, -2, -1, 0].map((n) => [n, ["10⁻⁶", "10⁻⁵", "10⁻⁴", "0.001", "0.01", "0.1", "1"][n + 6]]) },
    y: { low: plane.y[0], high: plane.y[1], bins: plane.y[2], label: "entropy (nats)", say: (a, b) => `entropy ${write(a)} to ${write(b)}`,
      ticks: ticks(plane.y[0], plane.y[1], 4).map((v) => [v, write(v)]) },
  }));
  const words = [["all", "all tokens"], ["rewarded", "rewarded (advantage above 0)"], ["punished", "punished (advantage below 0)"],
    ["neutral", "without signal (advantage 0)"], ["silenced", "silenced, masked or dropped"]];
  const picker = select("Tokens", words, "all", (name) => {
    draw(name);
    picker.box.focus(); // it moved into the new card
  });
  draw("all");
  return place;
}

const QUADRANTS = {
  rewarded_expected: ["rewarded, expected", "entropy falls", 0.02, 0.09],
  rewarded_surprising: ["rewarded, surprising", "entropy rises", 0.98, 0.09],
  punished_expected: ["punished, expected", "entropy rises", 0.02, 0.97],
  punished_surprising: ["punished, surprising", "entropy falls", 0.98, 0.97],
};

const arrow = (way) => (way.endsWith("rises") ? "↑" : "↓");

// The advantage-surprisal quadrants: which way each token drives the entropy.
function quadrantPlane(run) {
  const plane = run.survey.quadrants;
  const [low, high, bins] = plane.x;
  const totals = [0, 1, 2].map((n) => Object.values(plane.sums).reduce((a, row) => a + Math.abs(row[n] || 0), 0));
  const over = (to) => [
    svg("line", { x1: to.x(0), x2: to.x(0), y1: to.y(plane.y[1]), y2: to.y(plane.y[0]), class: "cross" }),
    svg("line", { x1: to.x(low), x2: to.x(high), y1: to.y(0), y2: to.y(0), class: "cross" }),
    ...Object.entries(QUADRANTS).map(([name, [, way, x, y]]) => svg("text",
      { x: to.x(low) + x * to.w, y: BOX.top + y * to.h, class: `quadrant ${x < 0.5 ? "" : "end"}` },
      `${to.w > 380 ? way : ""} ${arrow(way)} ${percent(plane.sums[name][0] / totals[0])}`)),
  ];
  const map = heatMap({
    title: "Advantage and surprise", counts: unpack(plane.counts), over,
    meaning: "Right of the line a token surprises more than the critical surprisal of its place; there its push on the " +
      "entropy turns its sign.",
    saying: `${count(totals[0])} tokens with an advantage.`, hint: "Point at a cell to read it.",
    x: { low, high, bins, label: "surprisal beyond the critical one (nats)", say: (a, b) => `surprise ${write(a)} to ${write(b)}`,
      ticks: ticks(low, high, 6).map((v) => [v, write(v)]) },
    y: { low: plane.y[0], high: plane.y[1], bins: plane.y[2], label: "advantage", say: (a, b) => `advantage ${write(a)} to ${write(b)}`,
      ticks: ticks(plane.y[0], plane.y[1], 6).map((v) => [v, write(v)]) },
  });
  const rows = Object.entries(QUADRANTS).map(([name, [title, way]]) => {
    const [tokens, pull, change] = plane.sums[name];
    return el("tr", {}, el("th", { scope: "row" }, title), el("td", {}, percent(tokens / totals[0])),
      el("td", {}, percent(pull / totals[1])), el("td", {}, `${arrow(way)} ${percent(Math.abs(change) / totals[2])}`));
  });
  map.append(el("div", { class: "scroll" }, el("table", { class: "numbers" }, el("thead", {}, el("tr", {},
    ["share of", "tokens", "gradient", "push on the entropy"].map((text) => el("th", { scope: "col" }, text)))),
  el("tbody", {}, rows))));
  return map;
}

function planesSection(run) {
  if (!run.survey || !run.survey.quantiles.steps.n) {
    return section("planes", "All tokens at once", "There is nothing to show: no tokens with their entropy are recorded.");
  }
  const told = unpack(run.survey.quadrants.counts).some((n) => n > 0);
  return section("planes", "All tokens at once", `From ${plural(run.survey.tokens, "token")} of ` +
    `${run.survey.quantiles.steps.n < run.recorded_steps ? `${count(run.survey.quantiles.steps.n)} evenly spaced of the ` : ""}` +
    `${plural(run.recorded_steps, "recorded step")}. Brighter cells hold more tokens, on a logarithmic scale.`,
  el("div", { class: "grid wide" }, probabilityPlane(run), told ? quadrantPlane(run)
    : el("p", { class: "note" }, "The quadrants need the moments of the distributions, which are not recorded.")));
}
