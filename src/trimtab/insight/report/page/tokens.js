// A token's numbers, colour, and reasons.

let reasonTable = [];

const hasReason = (code, bit) => (bit === 0 ? code === 0 : (code & bit) !== 0);
const reasonsOf = (code) => reasonTable.filter((reason) => reason.bit !== 0 && (code & reason.bit) !== 0);

// Why token n has the gradient it has. `reasonText` is the text of reasons that mean something else under the objective,
// by bit. A clip is no reason of the plan: it follows from how far the policy has moved.
function reasonOf({ reason: codes, clipped, reasonText }, n) {
  const found = reasonsOf(codes[n]);
  const reasons = found.length || clipped[n] ? found : reasonTable.filter((reason) => reason.bit === 0);
  const texts = reasons.map((reason) => reasonText[reason.bit] || reason.text);
  return [...texts, ...(clipped[n] ? ["clipped: the ratio is outside its range"] : [])].join("; ");
}

// The ways to colour: `value` of token n from the response `r` and the effects `e` of an objective; `kind` says how the
// value becomes a colour; `neutral` is the value that gets the background colour.
const COLORS = {
  probability: { title: "probability", value: (r, e, n) => Math.exp(r.arrays.logp[n]), kind: "falling" },
  surprisal: { title: "surprisal (nats)", value: (r, e, n) => -r.arrays.logp[n], kind: "rising" },
  entropy: { title: "entropy (nats)", value: (r, e, n) => r.arrays.entropy[n], kind: "rising" },
  advantage: { title: "advantage", value: (r, e, n) => e.advantage[n], kind: "diverging" },
  weight: { title: "weight", value: (r, e, n) => e.weight[n], kind: "diverging", neutral: 1 },
  reason: { title: "reason", value: (r, e, n) => e.reason[n], kind: "reason" },
  clip: { title: "clipped", value: (r, e, n) => e.clipped[n], kind: "flag" },
  ratio: { title: "ratio new / old", value: (r, e, n) => Math.exp(r.arrays.log_ratio[n]), kind: "diverging", neutral: 1 },
  gradient: { title: "gradient norm", value: (r, e, n) => Math.abs(e.coefficient[n]) * r.arrays.logp_grad_norm[n], kind: "rising" },
  change: { title: "predicted entropy change", value: (r, e, n) => -e.coefficient[n] * r.arrays.phi[n], kind: "diverging" },
};

// The range of values that the colours of one response cover.
function colorScale(coloring, held, allEffects) {
  if (coloring.kind === "falling") return { low: 0, high: 1 };
  const neutral = coloring.neutral || 0;
  let most = 0;
  for (const effects of allEffects) {
    for (let n = 0; n < held.pieces.length; n += 1) {
      const distance = Math.abs(coloring.value(held, effects, n) - neutral);
      if (Number.isFinite(distance) && distance > most) most = distance;
    }
  }
  return { low: coloring.kind === "diverging" ? neutral - most : 0, high: neutral + most, most: most || 1 };
}

function colorOf(coloring, scale, value) {
  if (Number.isNaN(value)) return null;
  if (coloring.kind === "falling") return ramp(1 - value);
  if (coloring.kind === "rising") return ramp(value / scale.most);
  if (coloring.kind === "diverging") return diverging((value - (coloring.neutral || 0)) / scale.most);
  if (coloring.kind === "flag") return value ? channels("#e69f00") : null;
  const found = reasonsOf(value);
  const color = found.length ? REASONS[found[0].name].color : null;
  return color ? channels(color) : null;
}

function markOf(coloring, value) {
  if (coloring.kind === "reason") return reasonsOf(value).map((reason) => REASONS[reason.name].mark).join("");
  return coloring.kind === "flag" && value ? "✂" : "";
}

// Line breaks and tabs as symbols; a token without characters of its own (part of a byte sequence) as a dot.
function tokenText(piece) {
  if (piece === "") return "·";
  return visible(piece.replace(/\r\n|\n/g, "⏎\n").replace(/\t/g, "⇥"));
}

function colorLegend(coloring, scale) {
  if (coloring.kind === "reason") {
    return el("div", { class: "legend" }, reasonTable.filter((reason) => reason.bit).map(({ name }) => el("span", { class: "key" },
      el("span", { class: "swatch", style: `background:${REASONS[name].color};color:${textColor(channels(REASONS[name].color))}` },
        REASONS[name].mark), name.replace("_", " "))));
  }
  if (coloring.kind === "flag") {
    return el("div", { class: "legend" }, el("span", { class: "key" },
      el("span", { class: "swatch", style: "background:#e69f00;color:#10151b" }, "✂"), "clipping cuts its gradient"));
  }
  const stops = Array.from({ length: 11 }, (_, n) => scale.low + (n / 10) * (scale.high - scale.low))
    .map((value) => css(colorOf(coloring, scale, value))).join(",");
  return el("div", { class: "ramp-legend" }, el("span", {}, formatNumber(scale.low)), el("span", { class: "ramp",
    style: `background:linear-gradient(90deg,${stops})` }), el("span", {}, formatNumber(scale.high)), coloring.kind === "diverging"
    ? el("span", { class: "aside" }, `no colour: ${formatNumber(coloring.neutral || 0)}`) : null);
}

// Rows of a token's card: a name, and the value under each objective (one value if it is the same under all).
function tokenFacts(held, allEffects, n) {
  const each = (text) => allEffects.map((effects) => (effects ? text(effects) : "not planned"));
  const { arrays } = held;
  return [
    ["probability", [formatNumber(Math.exp(arrays.logp[n]))]],
    ["surprisal", [`${formatNumber(-arrays.logp[n])} nats`]],
    ["entropy", [Number.isNaN(arrays.entropy[n]) ? "not recorded" : `${formatNumber(arrays.entropy[n])} nats`]],
    ["ratio new / old", [formatNumber(Math.exp(arrays.log_ratio[n]))]],
    ["advantage", each((e) => formatNumber(e.advantage[n]))],
    ["weight", each((e) => formatNumber(e.weight[n]))],
    ["clip range of the ratio", each((e) => `1 − ${formatNumber(e.clip_low[n])} to 1 + ${formatNumber(e.clip_high[n])}`)],
    ["clipped", each((e) => (e.clipped[n] ? "yes: no gradient" : "no"))],
    ["gradient norm", each((e) => formatNumber(COLORS.gradient.value(held, e, n)))],
    ["predicted entropy change", each((e) => formatNumber(COLORS.change.value(held, e, n)))],
    ["reason", each((e) => reasonOf(e, n))],
  ];
}

function tokenCard(held, allEffects, names, n, start) {
  const rows = tokenFacts(held, allEffects, n).map(([name, values]) => el("tr", {}, el("th", { scope: "row" }, name),
    values.map((value) => el("td", { colspan: values.length === 1 ? allEffects.length : 1 }, value))));
  const head = allEffects.length > 1
    ? el("thead", {}, el("tr", {}, el("td", {}), names.map((name) => el("th", { scope: "col" }, name)))) : null;
  return [el("p", { class: "token-head" }, el("bdi", { class: "piece" }, tokenText(held.pieces[n])),
    el("span", { class: "at" }, `token ${count(start + n)}${held.arrays.special[n] ? ", special" : ""}`)),
  el("table", { class: "facts" }, head, el("tbody", {}, rows))];
}
