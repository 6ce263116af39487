// A line chart in SVG, drawn for the width it has. All charts share one cursor: the step under the pointer, or the one
// that the arrow keys have reached.

const HEIGHT = 190;
const BUSY = 120; // points from which on a running mean is drawn over the curve
const EDGE = { left: 46, right: 14, top: 16, bottom: 26 };

const cursor = {
  step: null,
  watchers: new Set(),
  set(step) {
    this.step = step;
    this.watchers.forEach((watch) => watch(step));
  },
};

function ticks(low, high, wanted) {
  const span = high - low || Math.abs(high) || 1;
  const rough = span / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const unit = [1, 2, 2.5, 5, 10].find((n) => n * power >= rough) * power;
  const out = [];
  for (let n = Math.ceil(low / unit - 1e-9); n * unit <= high + unit * 1e-9; n += 1) out.push(n * unit + 0); // not minus nought
  return out;
}

function decades(low, high) {
  const out = [];
  const stride = Math.max(1, Math.ceil((Math.log10(high) - Math.log10(low)) / 4));
  for (let n = Math.ceil(Math.log10(low)); 10 ** n <= high * 1.0001; n += stride) out.push(10 ** n);
  return out.length > 1 ? out : [low, high];
}

function extent(series, extra) {
  let [low, high] = [Infinity, -Infinity];
  for (const line of series) {
    for (let n = 0; n < line.values.length; n += 1) {
      const spread = line.spread ? line.spread[n] : 0;
      if (!Number.isFinite(line.values[n])) continue;
      low = Math.min(low, line.values[n] - spread);
      high = Math.max(high, line.values[n] + spread);
    }
  }
  for (const value of extra) if (Number.isFinite(value)) [low, high] = [Math.min(low, value), Math.max(high, value)];
  return low <= high ? [low, high] : null;
}

// The place of the last step that is not after the one asked for.
function placeOf(steps, step) {
  let [low, high] = [0, steps.length - 1];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (steps[middle] <= step) low = middle; else high = middle - 1;
  }
  return low;
}

function nearest(steps, step) {
  const at = placeOf(steps, step);
  return at + 1 < steps.length && steps[at + 1] - step < step - steps[at] ? at + 1 : at;
}

function scales(spec, width) {
  const plain = [...spec.series, ...(spec.fan || [])];
  const found = extent(plain, spec.include || []);
  if (!found) return null;
  let [low, high] = found;
  const log = spec.log && low > 0 && high / low > 50;
  if (!log) {
    if (spec.zero && low > 0) low = 0;
    const air = (high - low || Math.abs(high) || 1) * 0.06;
    high += air;
    if (!(spec.zero && low === 0)) low = spec.share ? Math.max(low - air, 0) : low - air;
  }
  const first = Math.min(...plain.map((line) => line.steps[0]));
  const last = Math.max(...plain.map((line) => line.steps[line.steps.length - 1]), first + 1);
  const inner = width - EDGE.left - EDGE.right;
  const tall = HEIGHT - EDGE.top - EDGE.bottom;
  const share = (v) => (log ? Math.log(Math.max(v, low) / low) / Math.log(high / low) : (v - low) / (high - low));
  return {
    low, high, log, first, last,
    x: (step) => EDGE.left + ((step - first) / (last - first)) * inner,
    y: (value) => EDGE.top + (1 - share(value)) * tall,
    step: (x) => first + ((x - EDGE.left) / inner) * (last - first),
  };
}

function path(line, to, shift = 0) {
  let out = "";
  let pen = "M";
  for (let n = 0; n < line.values.length; n += 1) {
    const value = line.values[n] + shift * (line.spread ? line.spread[n] : 0);
    if (!Number.isFinite(value)) { pen = "M"; continue; }
    out += `${pen}${to.x(line.steps[n]).toFixed(1)} ${to.y(value).toFixed(1)}`;
    pen = "L";
  }
  return out;
}

// A running mean, for curves with more points than an eye can follow.
function calm(line) {
  const reach = Math.max(2, Math.round(line.values.length / 60));
  const sums = new Float64Array(line.values.length + 1);
  line.values.forEach((value, n) => { sums[n + 1] = sums[n] + value; });
  const values = line.values.map((_, n) => {
    const [first, last] = [Math.max(0, n - reach), Math.min(line.values.length, n + reach + 1)];
    return (sums[last] - sums[first]) / (last - first);
  });
  return { steps: line.steps, values };
}

// The area between two lines over the same steps.
function between(lower, upper, to) {
  const back = { steps: Array.from(lower.steps).reverse(), values: Array.from(lower.values).reverse() };
  return `${path(upper, to)}${path(back, to).replace("M", "L")}Z`;
}

function ends(line, sign) {
  return { steps: line.steps, values: line.values.map((v, n) => v + sign * line.spread[n]) };
}

function axes(spec, to, width) {
  const parts = [];
  for (const value of to.log ? decades(to.low, to.high) : ticks(to.low, to.high, 4)) {
    const y = to.y(value);
    parts.push(svg("line", { x1: EDGE.left, x2: width - EDGE.right, y1: y, y2: y, class: "rule" }));
    parts.push(svg("text", { x: EDGE.left - 6, y: y + 4, class: "tick end" }, spec.format(value)));
  }
  for (const step of ticks(to.first, to.last, Math.max(2, Math.floor(width / 110)))) {
    if (step !== Math.round(step)) continue;
    parts.push(svg("text", { x: to.x(step), y: HEIGHT - 8, class: "tick middle" }, count(step)));
  }
  return parts;
}

function alarmMarks(spec, to) {
  return (spec.marks || []).filter((mark) => mark.step >= to.first && mark.step <= to.last).map((mark) => {
    const x = to.x(mark.step);
    return svg("g", { class: "alarm-mark" },
      svg("title", {}, `step ${mark.step}: ${mark.alarm}`),
      svg("line", { x1: x, x2: x, y1: EDGE.top, y2: HEIGHT - EDGE.bottom }),
      svg("path", { d: `M${x - 5} ${EDGE.top - 9}h10l-5 8z` }));
  });
}

function drawing(spec, to, width) {
  const lines = axes(spec, to, width);
  if (spec.band) {
    const [top, bottom] = [to.y(Math.min(spec.band.high, to.high)), to.y(Math.max(spec.band.low, to.low))];
    lines.push(svg("rect", { x: EDGE.left, width: width - EDGE.left - EDGE.right, y: top, class: "target-band",
      height: Math.max(bottom - top, 0) }));
    const y = to.y(spec.band.value);
    lines.push(svg("line", { x1: EDGE.left, x2: width - EDGE.right, y1: y, y2: y, class: "target" }));
  }
  const fan = spec.fan || [];
  for (let n = 0; n < Math.floor(fan.length / 2); n += 1) {
    lines.push(svg("path", { d: between(fan[n], fan[fan.length - 1 - n], to), class: `fan fan-${n}` }));
  }
  if (fan.length % 2) lines.push(svg("path", { d: path(fan[(fan.length - 1) / 2], to), class: "fan-middle" }));
  spec.series.forEach((line) => {
    if (line.spread) {
      lines.push(svg("path", { d: between(ends(line, -1), ends(line, 1), to), fill: line.color, class: "spread" }));
    }
  });
  spec.series.forEach((line) => {
    const busy = line.values.length > BUSY && !line.spread;
    if (busy) lines.push(svg("path", { d: path(line, to), class: "raw", stroke: line.color }));
    lines.push(svg("path", { d: path(busy ? calm(line) : line, to), class: "line", stroke: line.color, "stroke-dasharray": line.dash }));
    if (line.dots || line.values.length === 1) {
      line.values.forEach((value, n) => lines.push(
        svg("circle", { cx: to.x(line.steps[n]), cy: to.y(value), r: 3.2, fill: line.color, class: "dot" })));
    }
  });
  return [...lines, ...alarmMarks(spec, to)];
}

function legend(spec) {
  const keys = spec.series.map((line) => el("span", { class: "key" },
    svg("svg", { width: 22, height: 8, "aria-hidden": "true" },
      svg("line", { x1: 1, x2: 21, y1: 4, y2: 4, stroke: line.color, class: "line", "stroke-dasharray": line.dash })),
    el("span", {}, line.name), el("b", { class: "read" }, "")));
  return el("div", { class: "legend" }, keys, spec.aside ? el("span", { class: "key aside" }, spec.aside) : null);
}

function saying(spec) {
  return spec.series.map((line) => {
    const seen = Array.from(line.values).filter(Number.isFinite);
    if (!seen.length) return `${line.name}: no values`;
    const [low, high] = [seen.reduce((a, b) => Math.min(a, b)), seen.reduce((a, b) => Math.max(a, b))];
    return `${line.name}: from ${spec.format(seen[0])} to ${spec.format(seen[seen.length - 1])}, ` +
      `lowest ${spec.format(low)}, highest ${spec.format(high)}`;
  }).join("; ");
}

// spec: title, meaning, format, series [{name, steps, values, color, dash, dots, spread}], and optionally fan (lines of
// quantiles), band {low, high, value}, marks (alarms), log, zero, include (values that must be in view), aside, pick.
function lineChart(spec) {
  const keys = legend(spec);
  const reads = [...keys.querySelectorAll(".read")];
  const picture = svg("svg", { class: "chart", role: "img", tabindex: "0", height: HEIGHT,
    "aria-label": `${spec.title}. ${saying(spec)}. Arrow keys move through the steps.` });
  const head = el("h3", {}, spec.title, el("span", { class: "at" }, ""));
  const figure = el("figure", { class: "card chart-card" }, spec.tool, head, el("p", { class: "meaning" }, spec.meaning),
    picture, keys);
  let to = null;
  let hair = null;

  function show(step) {
    const found = step !== null && to !== null;
    head.lastChild.textContent = found ? `step ${count(step)}` : "";
    reads.forEach((node, n) => {
      const line = spec.series[n];
      const at = found ? nearest(line.steps, step) : line.values.length - 1;
      node.textContent = line.values.length ? spec.format(line.values[at]) +
        (line.spread && line.spread[at] ? ` ± ${rounded(line.spread[at], spec.format)}` : "") : "";
    });
    if (!hair) return;
    hair.setAttribute("visibility", found ? "visible" : "hidden");
    if (found) hair.setAttribute("d", `M${to.x(Math.min(Math.max(step, to.first), to.last))} ${EDGE.top}V${HEIGHT - EDGE.bottom}`);
  }

  function draw() {
    const width = Math.max(picture.clientWidth || figure.clientWidth - 32, 200);
    to = scales(spec, width);
    picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    if (!to) {
      picture.replaceChildren(svg("text", { x: width / 2, y: HEIGHT / 2, class: "tick middle" }, "no values"));
      return;
    }
    hair = svg("path", { class: "hair", visibility: "hidden" });
    picture.replaceChildren(...drawing(spec, to, width), hair);
    show(cursor.step);
  }

  const main = spec.series.reduce((a, b) => (b.steps.length > a.steps.length ? b : a), spec.series[0]);
  picture.addEventListener("pointermove", (event) => {
    if (!to) return;
    const box = picture.getBoundingClientRect();
    const step = Math.min(Math.max(to.step(event.clientX - box.left), to.first), to.last);
    cursor.set(main.steps[nearest(main.steps, step)]);
  });
  picture.addEventListener("pointerleave", () => cursor.set(null));
  picture.addEventListener("blur", () => cursor.set(null));
  picture.addEventListener("click", () => { if (spec.pick && cursor.step !== null) spec.pick(cursor.step); });
  picture.addEventListener("keydown", (event) => {
    const at = cursor.step === null ? main.steps.length : nearest(main.steps, cursor.step);
    const jump = event.shiftKey ? Math.ceil(main.steps.length / 20) : 1;
    const goal = { ArrowLeft: at - jump, ArrowRight: at + jump, Home: 0, End: main.steps.length - 1 }[event.key];
    if (goal !== undefined) cursor.set(main.steps[Math.min(Math.max(goal, 0), main.steps.length - 1)]);
    else if (event.key === "Enter" && spec.pick && cursor.step !== null) spec.pick(cursor.step);
    else if (event.key === "Escape") cursor.set(null);
    else return;
    event.preventDefault();
  });
  cursor.watchers.add(show);
  new ResizeObserver(draw).observe(figure);
  return figure;
}
