// Line charts in SVG, drawn for the width they have. All charts share one cursor: the step under the pointer, or the one
// that the arrow keys have reached.

const CHART_HEIGHT = 190;
const SMOOTHED_FROM = 120; // points from which on a running mean is drawn over the curve
const MARGIN = { left: 46, right: 14, top: 16, bottom: 26 };

// Every figure that depends on its width: its drawing function and, for line charts, what follows the cursor.
const figures = new Map();
const resizes = new ResizeObserver((entries) => entries.forEach(({ target }) => figures.get(target)?.draw()));

// Charts that grow out of view are drawn when they come into view.
const views = new IntersectionObserver((entries) => entries.forEach(({ target, isIntersecting }) => {
  const figure = figures.get(target);
  if (!figure) return;
  figure.hidden = !isIntersecting;
  if (isIntersecting && figure.stale) figure.refresh();
}), { rootMargin: "200px 0px" });

const cursor = {
  step: null,
  set(step) {
    this.step = step;
    figures.forEach(({ showStep }) => showStep?.(step));
  },
};

// Replace the children of `parent`, draw the figures that came in, and forget those that went out.
// A ResizeObserver first reports in a later frame: without drawing here, a new chart would be empty until then.
function replaceContent(parent, ...children) {
  parent.replaceChildren(...children);
  for (const [node, figure] of figures) {
    if (node.isConnected && !figure.observed) {
      figure.observed = true;
      figure.draw();
      resizes.observe(node);
    } else if (!node.isConnected && figure.observed) { // one that was never observed is still to be put in
      resizes.unobserve(node);
      views.unobserve(node);
      figures.delete(node);
    }
  }
}

function ticks(low, high, wanted) {
  const span = high - low || Math.abs(high) || 1;
  const rough = span / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const unit = [1, 2, 2.5, 5, 10].find((n) => n * power >= rough) * power;
  const out = [];
  for (let n = Math.ceil(low / unit - 1e-9); n * unit <= high + unit * 1e-9; n += 1) out.push(n * unit + 0); // + 0: no "-0"
  return out;
}

function decades(low, high) {
  const out = [];
  const stride = Math.max(1, Math.ceil((Math.log10(high) - Math.log10(low)) / 4));
  for (let n = Math.ceil(Math.log10(low)); 10 ** n <= high * 1.0001; n += stride) out.push(10 ** n);
  return out.length > 1 ? out : [low, high];
}

// The lower (sign -1) or upper (sign 1) edge of a line's spread; it ends where values do: no share is below 0 or above 1.
function spreadAt(line, n, sign) {
  const [least, most] = line.bounds || [-Infinity, Infinity];
  const edge = Math.min(Math.max(line.values[n] + sign * (line.spread ? line.spread[n] : 0), least), most);
  return sign < 0 ? Math.min(edge, line.values[n]) : Math.max(edge, line.values[n]);
}

function extent(series, extra) {
  let [low, high] = [Infinity, -Infinity];
  for (const line of series) {
    for (let n = 0; n < line.values.length; n += 1) {
      if (!Number.isFinite(line.values[n])) continue;
      low = Math.min(low, spreadAt(line, n, -1));
      high = Math.max(high, spreadAt(line, n, 1));
    }
  }
  for (const value of extra) if (Number.isFinite(value)) [low, high] = [Math.min(low, value), Math.max(high, value)];
  return low <= high ? [low, high] : null;
}

// The functions from steps and values to pixels; null if there is no finite value.
function chartScales(spec, width) {
  const lines = [...spec.series, ...(spec.fan || []), ...(spec.thin || [])];
  const range = extent(lines, spec.include || []);
  if (!range) return null;
  let [low, high] = range;
  const log = spec.log && low > 0 && high / low > 50;
  if (!log) {
    if (spec.zero && low > 0) low = 0;
    const padding = (high - low || Math.abs(high) || 1) * 0.06;
    high += padding;
    if (!(spec.zero && low === 0)) low = spec.share ? Math.max(low - padding, 0) : low - padding;
  }
  const span = spec.span || [];
  const first = Math.min(...lines.map((line) => line.steps[0]), ...span);
  const last = Math.max(...lines.map((line) => line.steps[line.steps.length - 1]), ...span, first + 1);
  const innerWidth = width - MARGIN.left - MARGIN.right;
  const innerHeight = CHART_HEIGHT - MARGIN.top - MARGIN.bottom;
  const fraction = (v) => (log ? Math.log(Math.max(v, low) / low) / Math.log(high / low) : (v - low) / (high - low));
  return {
    low, high, log, first, last,
    x: (step) => MARGIN.left + ((step - first) / (last - first)) * innerWidth,
    y: (value) => MARGIN.top + (1 - fraction(value)) * innerHeight,
    step: (x) => first + ((x - MARGIN.left) / innerWidth) * (last - first),
  };
}

// The path of a line; a value that is not finite leaves a gap.
function linePath(line, scale) {
  let out = "";
  let command = "M";
  for (let n = 0; n < line.values.length; n += 1) {
    if (!Number.isFinite(line.values[n])) { command = "M"; continue; }
    out += `${command}${scale.x(line.steps[n]).toFixed(1)} ${scale.y(line.values[n]).toFixed(1)}`;
    command = "L";
  }
  return out;
}

// A running mean, for curves with more points than an eye can follow.
function smoothed(line) {
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
function areaPath(lower, upper, scale) {
  const back = { steps: Array.from(lower.steps).reverse(), values: Array.from(lower.values).reverse() };
  return `${linePath(upper, scale)}${linePath(back, scale).replace("M", "L")}Z`;
}

function spreadEdge(line, sign) {
  return { steps: line.steps, values: line.values.map((_, n) => spreadAt(line, n, sign)) };
}

function axes(spec, scale, width) {
  const nodes = [];
  for (const value of scale.log ? decades(scale.low, scale.high) : ticks(scale.low, scale.high, 4)) {
    const y = scale.y(value);
    nodes.push(svg("line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: y, y2: y, class: "gridline" }));
    nodes.push(svg("text", { x: MARGIN.left - 6, y: y + 4, class: "tick end" }, spec.format(value)));
  }
  const shown = spec.axis ? spec.axis.tick : count;
  const steps = ticks(scale.first, scale.last, Math.max(2, Math.floor(width / 110))).filter((step) => spec.axis || step === Math.round(step));
  nodes.push(...steps.map((step) => svg("text", { x: scale.x(step), y: CHART_HEIGHT - 8, class: "tick middle" }, shown(step))));
  return nodes;
}

function alarmMarks(spec, scale) {
  const at = (alarm) => (spec.axis ? spec.axis.of(alarm.step) : alarm.step);
  return (spec.alarms || []).filter((alarm) => at(alarm) >= scale.first && at(alarm) <= scale.last).map((alarm) => {
    const x = scale.x(at(alarm));
    return svg("g", { class: "alarm-mark" },
      svg("title", {}, `step ${alarm.step}: ${alarm.alarm}`),
      svg("line", { x1: x, x2: x, y1: MARGIN.top, y2: CHART_HEIGHT - MARGIN.bottom }),
      svg("path", { d: `M${x - 5} ${MARGIN.top - 9}h10l-5 8z` }));
  });
}

function targetBand(band, scale, width) {
  const [top, bottom] = [scale.y(Math.min(band.high, scale.high)), scale.y(Math.max(band.low, scale.low))];
  const y = scale.y(band.value);
  return [
    svg("rect", { x: MARGIN.left, width: width - MARGIN.left - MARGIN.right, y: top, class: "target-band",
      height: Math.max(bottom - top, 0) }),
    svg("line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: y, y2: y, class: "target" }),
  ];
}

function chartNodes(spec, scale, width) {
  const nodes = axes(spec, scale, width);
  if (spec.band) nodes.push(...targetBand(spec.band, scale, width));
  const fan = spec.fan || [];
  for (let n = 0; n < Math.floor(fan.length / 2); n += 1) {
    nodes.push(svg("path", { d: areaPath(fan[n], fan[fan.length - 1 - n], scale), class: `fan fan-${n}` }));
  }
  if (fan.length % 2) nodes.push(svg("path", { d: linePath(fan[(fan.length - 1) / 2], scale), class: "fan-middle" }));
  spec.series.filter((line) => line.spread).forEach((line) => nodes.push(
    svg("path", { d: areaPath(spreadEdge(line, -1), spreadEdge(line, 1), scale), fill: line.color, class: "spread" })));
  (spec.thin || []).forEach((line) => nodes.push(svg("path", { d: linePath(line, scale), class: "thin", stroke: line.color })));
  spec.series.forEach((line) => {
    const smooth = line.values.length > SMOOTHED_FROM && !line.spread && !spec.thin;
    if (smooth) nodes.push(svg("path", { d: linePath(line, scale), class: "raw", stroke: line.color }));
    nodes.push(svg("path", { d: linePath(smooth ? smoothed(line) : line, scale), class: "line", stroke: line.color,
      "stroke-dasharray": line.dash }));
    if (line.dots || line.values.length === 1) {
      line.values.forEach((value, n) => nodes.push(
        svg("circle", { cx: scale.x(line.steps[n]), cy: scale.y(value), r: 3.2, fill: line.color, class: "dot" })));
    }
  });
  return [...nodes, ...(spec.overlay?.(scale) || []), ...alarmMarks(spec, scale)];
}

function chartLegend(spec) {
  const keys = spec.series.map((line) => el("span", { class: "key" },
    svg("svg", { width: 22, height: 8, "aria-hidden": "true" },
      svg("line", { x1: 1, x2: 21, y1: 4, y2: 4, stroke: line.color, class: "line", "stroke-dasharray": line.dash })),
    el("span", {}, line.name), el("b", { class: "value" }, "")));
  return el("div", { class: "legend" }, keys, spec.aside ? el("span", { class: "key aside" }, spec.aside) : null);
}

// The chart as text, for screen readers.
function chartDescription(spec) {
  return spec.series.map((line) => {
    const finite = Array.from(line.values).filter(Number.isFinite);
    if (!finite.length) return `${line.name}: no values`;
    const [low, high] = [finite.reduce((a, b) => Math.min(a, b)), finite.reduce((a, b) => Math.max(a, b))];
    return `${line.name}: from ${spec.format(finite[0])} to ${spec.format(finite[finite.length - 1])}, ` +
      `lowest ${spec.format(low)}, highest ${spec.format(high)}`;
  }).join("; ");
}

// spec: title, meaning, format, series [{name, steps, values, color, dash, dots, spread, bounds}], and optionally fan (lines of
// quantiles), thin (lines behind the others), overlay(scale): more SVG, band {low, high, value}, alarms, log, zero,
// include and span (values and steps that must be in view), aside, tool (a node above the title), openStep (what a click does),
// zoom (called with the first and the last step of a part that is to be looked at, or null for the whole run),
// axis (from `onAxis`: the steps of all lines are then values of that axis).
function lineChart(given) {
  let spec = given;
  let legend = chartLegend(spec);
  let values = [...legend.querySelectorAll(".value")];
  const describe = () => `${spec.title}. ${chartDescription(spec)}. Arrow keys move through the steps${spec.zoom ? ", plus and minus zoom" : ""}.`;
  const picture = svg("svg", { class: "chart", role: "img", tabindex: "0", height: CHART_HEIGHT, "aria-label": describe() });
  const heading = el("h3", {}, spec.title, el("span", { class: "at" }, ""));
  const meaning = el("p", { class: "meaning" }, withCode(spec.meaning));
  const card = el("figure", { class: "card chart-card" }, spec.tool, heading, meaning, picture, legend);
  let scale = null;
  let crosshair = null;
  let drawnWidth = null;

  function showStep(step) {
    const pointed = step !== null && scale !== null;
    heading.lastChild.textContent = pointed ? (spec.axis ? spec.axis.at(step) : `step ${count(step)}`) : "";
    values.forEach((node, n) => {
      const line = spec.series[n];
      const at = pointed ? nearestIndex(line.steps, step) : line.values.length - 1;
      node.textContent = line.values.length ? spec.format(line.values[at]) +
        (line.spread && line.spread[at] ? ` ± ${rounded(line.spread[at], spec.format)}` : "") : "";
    });
    if (!crosshair) return;
    crosshair.setAttribute("visibility", pointed ? "visible" : "hidden");
    if (pointed) {
      const x = scale.x(Math.min(Math.max(step, scale.first), scale.last));
      crosshair.setAttribute("d", `M${x} ${MARGIN.top}V${CHART_HEIGHT - MARGIN.bottom}`);
    }
  }

  function draw() {
    const width = Math.max(picture.clientWidth || card.clientWidth - 32, 200);
    if (width === drawnWidth) return;
    drawnWidth = width;
    scale = chartScales(spec, width);
    picture.setAttribute("viewBox", `0 0 ${width} ${CHART_HEIGHT}`);
    if (!scale) {
      picture.replaceChildren(svg("text", { x: width / 2, y: CHART_HEIGHT / 2, class: "tick middle" }, "no values"));
      return;
    }
    crosshair = svg("path", { class: "crosshair", visibility: "hidden" });
    picture.replaceChildren(...chartNodes(spec, scale, width), crosshair);
    showStep(cursor.step);
  }

  // Draw what has grown; the cursor, the focus and the place of the card stay.
  const figure = {
    draw,
    showStep,
    update(next) {
      spec = next;
      figure.stale = true;
      if (figure.hidden === undefined) views.observe(card);
      if (!figure.hidden) figure.refresh();
    },
    refresh() {
      figure.stale = false;
      const fresh = chartLegend(spec);
      legend.replaceWith(fresh);
      legend = fresh;
      values = [...legend.querySelectorAll(".value")];
      refill(meaning, withCode(spec.meaning));
      picture.setAttribute("aria-label", describe());
      drawnWidth = null;
      draw();
    },
  };
  followPointerAndKeys(picture, () => spec, () => scale);
  figures.set(card, figure);
  return card;
}
