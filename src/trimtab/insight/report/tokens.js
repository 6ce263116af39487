// What can be said of a token: its numbers, its colour, its reasons in words.

let reasonTable = [];

const has = (reason, bit) => (bit === 0 ? reason === 0 : (reason & bit) !== 0);
const reasonsOf = (reason) => reasonTable.filter((entry) => entry.bit !== 0 && (reason & entry.bit) !== 0);

function reasonWords(reason) {
  const found = reasonsOf(reason);
  return (found.length ? found : reasonTable.filter((entry) => entry.bit === 0)).map((entry) => entry.words).join("; ");
}

// Each way to colour: a value per token from the response `r` and what an objective did, `t`; how it is written; and
// how it becomes a colour. `own` values belong to the policy, and are the same under every objective.
const COLORS = {
  probability: { title: "probability", own: true, value: (r, t, n) => Math.exp(r.arrays.logp[n]), kind: "falling" },
  surprisal: { title: "surprisal (nats)", own: true, value: (r, t, n) => -r.arrays.logp[n], kind: "rising" },
  entropy: { title: "entropy (nats)", own: true, value: (r, t, n) => r.arrays.entropy[n], kind: "rising" },
  advantage: { title: "advantage", value: (r, t, n) => t.advantage[n], kind: "two-way" },
  weight: { title: "weight", value: (r, t, n) => t.weight[n], kind: "two-way", middle: 1 },
  reason: { title: "reason", value: (r, t, n) => t.reason[n], kind: "reason" },
  clip: { title: "clip", value: (r, t, n) => t.clipped[n], kind: "flag" },
  ratio: { title: "ratio new / old", own: true, value: (r, t, n) => Math.exp(r.arrays.log_ratio[n]), kind: "two-way", middle: 1 },
  gradient: { title: "gradient norm", value: (r, t, n) => Math.abs(t.coefficient[n]) * r.arrays.norm[n], kind: "rising" },
  change: { title: "predicted entropy change", value: (r, t, n) => -t.coefficient[n] * r.arrays.phi[n], kind: "two-way" },
};

// The scale of a colour over one response: what its strongest colour stands for.
function scaleOf(way, held, sides) {
  if (way.kind === "falling") return { low: 0, high: 1 };
  let most = 0;
  for (const side of sides) {
    for (let n = 0; n < held.pieces.length; n += 1) {
      const size = Math.abs(way.value(held, side, n) - (way.middle || 0));
      if (Number.isFinite(size) && size > most) most = size;
    }
  }
  return { low: way.kind === "two-way" ? (way.middle || 0) - most : 0, high: (way.middle || 0) + most, most: most || 1 };
}

function paint(way, scale, value) {
  if (Number.isNaN(value)) return null;
  if (way.kind === "falling") return ramp(1 - value);
  if (way.kind === "rising") return ramp(value / scale.most);
  if (way.kind === "two-way") return twoWay((value - (way.middle || 0)) / scale.most);
  if (way.kind === "flag") return value ? channels("#e69f00") : null;
  const found = reasonsOf(value);
  const color = found.length ? REASONS[found[0].name].color : null;
  return color ? channels(color) : null;
}

function marksOf(way, value) {
  if (way.kind === "reason") return reasonsOf(value).map((entry) => REASONS[entry.name].mark).join("");
  return way.kind === "flag" && value ? "✂" : "";
}

// Line breaks and tabs as signs, everything else as it is; a token without a character of its own as a small dot.
function tokenText(piece) {
  if (piece === "") return "·";
  return visible(piece.replace(/\r\n|\n/g, "⏎\n").replace(/\t/g, "⇥"));
}

function legendOf(way, scale) {
  if (way.kind === "reason") {
    return el("div", { class: "legend" }, reasonTable.filter((entry) => entry.bit).map((entry) => el("span", { class: "key" },
      el("span", { class: "swatch", style: `background:${REASONS[entry.name].color};color:${ink(channels(REASONS[entry.name].color))}` },
        REASONS[entry.name].mark), entry.name.replace("_", " "))));
  }
  if (way.kind === "flag") {
    return el("div", { class: "legend" }, el("span", { class: "key" },
      el("span", { class: "swatch", style: "background:#e69f00;color:#10151b" }, "✂"), "a clip cuts its gradient"));
  }
  const shares = Array.from({ length: 11 }, (_, n) => n / 10);
  const value = (share) => scale.low + share * (scale.high - scale.low);
  const stops = shares.map((share) => css(paint(way, scale, value(share)))).join(",");
  const middle = way.kind === "two-way" ? el("span", {}, write(way.middle || 0)) : null;
  return el("div", { class: "ramp-legend" }, el("span", {}, write(scale.low)), el("span", { class: "ramp",
    style: `background:linear-gradient(90deg,${stops})` }), el("span", {}, write(scale.high)), middle
    ? el("span", { class: "aside" }, `the paper's colour is ${write(way.middle || 0)}`) : null);
}

// Rows of a token's card: name, then the value under each objective (one value where it does not depend on it).
function factsOf(held, sides, n) {
  const both = (say) => sides.map((side) => (side ? say(side) : "not planned"));
  const { arrays } = held;
  return [
    ["probability", [write(Math.exp(arrays.logp[n]))]],
    ["surprisal", [`${write(-arrays.logp[n])} nats`]],
    ["entropy", [Number.isNaN(arrays.entropy[n]) ? "not recorded" : `${write(arrays.entropy[n])} nats`]],
    ["ratio new / old", [write(Math.exp(arrays.log_ratio[n]))]],
    ["advantage", both((t) => write(t.advantage[n]))],
    ["weight", both((t) => write(t.weight[n]))],
    ["ratio may be", both((t) => `1 − ${write(t.clip_low[n])} to 1 + ${write(t.clip_high[n])}`)],
    ["clipped", both((t) => (t.clipped[n] ? "yes: no gradient" : "no"))],
    ["gradient norm", both((t) => write(COLORS.gradient.value(held, t, n)))],
    ["predicted entropy change", both((t) => write(COLORS.change.value(held, t, n)))],
    ["why", both((t) => reasonWords(t.reason[n]))],
  ];
}

function tokenCard(held, sides, names, n, start) {
  const rows = factsOf(held, sides, n).map(([name, values]) => el("tr", {}, el("th", { scope: "row" }, name),
    values.map((value) => el("td", { colspan: values.length === 1 ? sides.length : 1 }, value))));
  const head = sides.length > 1 ? el("thead", {}, el("tr", {}, el("td", {}), names.map((name) => el("th", { scope: "col" }, name)))) : null;
  return [el("p", { class: "token-head" }, el("bdi", { class: "piece" }, tokenText(held.pieces[n])),
    el("span", { class: "at" }, `token ${count(start + n)}${held.arrays.special[n] ? ", special" : ""}`)),
  el("table", { class: "facts" }, head, el("tbody", {}, rows))];
}
