// Which responses the list shows, and which tokens: by step, verdict, reason, and why they are in the report.

const MOST_TOKENS = 500;
const TOP = 100;

const PRESETS = [
  ["all", "All responses", { show: "responses", reason: "", sort: "step" }],
  ["silenced", "Silenced tokens", { show: "tokens", reason: "silenced", sort: "step" }],
  ["top", `${TOP} largest gradients`, { show: "tokens", reason: "", sort: "gradient" }],
  ["clipped", "Clipped tokens", { show: "tokens", reason: "clipped", sort: "step" }],
];

const SORTS = {
  step: ["step", (a, b) => a.step - b.step || a.response - b.response || a.start - b.start],
  gradient: ["largest gradient norm", (a, b) => b.gradient - a.gradient],
  silenced: ["most silenced", (a, b) => b.silenced - a.silenced],
  length: ["longest", (a, b) => b.length - a.length],
};

const cleanFilter = () => ({ show: "responses", step: "", verdict: "", kind: "", reason: "", sort: "step" });

function entryPasses(entry, filter) {
  return (filter.step === "" || entry.step === Number(filter.step)) && (!filter.verdict || entry.verdict === filter.verdict) &&
    (!filter.kind || entry.kinds.includes(filter.kind));
}

function tokenTest(reason) {
  if (reason === "") return () => true;
  if (reason === "clipped") return (side, n) => side.clipped[n] !== 0;
  const { bit } = reasonTable.find((entry) => entry.name === reason);
  return (side, n) => has(side.reason[n], bit);
}

function responsesFor(run, filter) {
  const test = tokenTest(filter.reason);
  const any = (entry) => {
    const side = response(entry.block).recorded;
    return side.reason.some((_, n) => test(side, n));
  };
  return run.responses.filter((entry) => entryPasses(entry, filter) && (filter.reason === "" || any(entry)))
    .sort(SORTS[filter.sort][1]);
}

// Tokens {entry, n, gradient} that pass; the largest gradients first where that is the order, and then only so many.
// A stretch of a response may be in the report twice: its tokens count once.
function tokensFor(run, filter) {
  const test = tokenTest(filter.reason);
  const found = [];
  const seen = new Set();
  for (const entry of run.responses.filter((one) => entryPasses(one, filter))) {
    const held = response(entry.block);
    for (let n = 0; n < held.pieces.length; n += 1) {
      if (!test(held.recorded, n)) continue;
      const name = `${entry.step}/${entry.response}/${entry.start + n}`;
      if (seen.has(name)) continue;
      seen.add(name);
      found.push({ entry, n, gradient: COLORS.gradient.value(held, held.recorded, n) });
    }
  }
  if (filter.sort !== "gradient") return found;
  return found.sort((a, b) => (b.gradient || 0) - (a.gradient || 0)).slice(0, TOP);
}

// Why a list is empty, or which steps one might have meant.
function emptyWords(run, filter) {
  const steps = [...new Set(run.responses.map((entry) => entry.step))];
  if (filter.step !== "" && !steps.includes(Number(filter.step))) {
    const near = steps.sort((a, b) => Math.abs(a - filter.step) - Math.abs(b - filter.step)).slice(0, 4).sort((a, b) => a - b);
    return `Step ${filter.step} is not among those of this report. The nearest are ${near.join(", ")}; ` +
      `trimtab report RUN --step ${filter.step} puts it in, if it is recorded.`;
  }
  return "Nothing passes these filters.";
}

const VERDICTS = { correct: "✓", wrong: "✗", no_answer: "∅", crashed: "!" };
const verdictMark = (verdict) => `${VERDICTS[verdict] || "?"} ${verdict.replace("_", " ")}`;

function responseRow(entry, kinds) {
  const part = entry.tokens < entry.length ? `tokens ${count(entry.start)}–${count(entry.start + entry.tokens - 1)} of ` : "";
  return [el("span", { class: "row-head" }, el("b", {}, `step ${count(entry.step)}`), el("span", {}, `response ${entry.response}`),
    el("span", { class: `verdict v-${VERDICTS[entry.verdict] ? entry.verdict : "other"}` }, verdictMark(entry.verdict))),
  el("bdi", { class: "context preview" }, tokenText(entry.text).replace(/\n/g, "")),
  el("span", { class: "row-more" }, `${part}${plural(entry.length, "token")}`,
    entry.silenced ? el("span", { class: "badge" }, `${count(entry.silenced)} silenced`) : null,
    entry.clipped ? el("span", { class: "badge" }, `${count(entry.clipped)} clipped`) : null,
    el("span", { class: "kinds" }, entry.kinds.map((kind) => kinds[kind]).join(", ")))];
}

function tokenRow({ entry, n, gradient }) {
  const { pieces } = response(entry.block);
  const near = (from, to) => tokenText(pieces.slice(Math.max(from, 0), to).join("")).replace(/\n/g, "");
  return [el("span", { class: "row-head" }, el("b", {}, `step ${count(entry.step)}`), el("span", {}, `token ${count(entry.start + n)}`),
    el("span", {}, Number.isNaN(gradient) ? "" : `gradient ${write(gradient)}`)),
  el("bdi", { class: "context" }, near(n - 6, n), el("mark", {}, near(n, n + 1)), near(n + 1, n + 7))];
}
