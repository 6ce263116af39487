// The list of responses or tokens, filtered by step, verdict, reason, and why a response was selected.

const MOST_ROWS = 500;
const TOP_GRADIENTS = 100;

const PRESETS = [
  ["all", "All responses", { show: "responses", reason: "", sort: "step" }],
  ["silenced", "Silenced tokens", { show: "tokens", reason: "silenced", sort: "step" }],
  ["top", `${TOP_GRADIENTS} largest gradients`, { show: "tokens", reason: "", sort: "gradient" }],
  ["clipped", "Clipped tokens", { show: "tokens", reason: "clipped", sort: "step" }],
];

const SORTS = {
  step: ["step", (a, b) => a.step - b.step || a.response - b.response || a.start - b.start],
  gradient: ["largest gradient norm", (a, b) => b.gradient - a.gradient],
  silenced: ["most silenced", (a, b) => b.silenced - a.silenced],
  length: ["longest", (a, b) => b.length - a.length],
};

const cleanFilter = () => ({ show: "responses", step: "", verdict: "", selected: "", reason: "", sort: "step" });

function entryPasses(entry, filter) {
  return (filter.step === "" || entry.step === Number(filter.step)) && (!filter.verdict || entry.verdict === filter.verdict) &&
    (!filter.selected || entry.selected_for.includes(filter.selected));
}

function tokenTest(reason) {
  if (reason === "") return () => true;
  if (reason === "clipped") return (effects, n) => effects.clipped[n] !== 0;
  const { bit } = reasonTable.find((entry) => entry.name === reason);
  return (effects, n) => hasReason(effects.reason[n], bit);
}

function responsesFor(run, filter) {
  const test = tokenTest(filter.reason);
  const anyToken = (entry) => {
    const effects = readResponse(entry.block).recorded;
    return effects.reason.some((_, n) => test(effects, n));
  };
  return run.responses.filter((entry) => entryPasses(entry, filter) && (filter.reason === "" || anyToken(entry)))
    .sort(SORTS[filter.sort][1]);
}

// Tokens {entry, n, gradient} that pass; sorted by gradient, only the largest.
// Excerpts of one response may overlap: a token in both counts once.
function tokensFor(run, filter) {
  const test = tokenTest(filter.reason);
  const found = [];
  const seen = new Set();
  for (const entry of run.responses.filter((one) => entryPasses(one, filter))) {
    const held = readResponse(entry.block);
    for (let n = 0; n < held.pieces.length; n += 1) {
      if (!test(held.recorded, n)) continue;
      const id = `${entry.step}/${entry.response}/${entry.start + n}`;
      if (seen.has(id)) continue;
      seen.add(id);
      found.push({ entry, n, gradient: COLORS.gradient.value(held, held.recorded, n) });
    }
  }
  if (filter.sort !== "gradient") return found;
  return found.sort((a, b) => (b.gradient || 0) - (a.gradient || 0)).slice(0, TOP_GRADIENTS);
}

// Why the list is empty, and for a step that is not in the report the nearest ones that are.
function emptyListText(run, filter) {
  const steps = [...new Set(run.responses.map((entry) => entry.step))];
  if (filter.step !== "" && !steps.includes(Number(filter.step))) {
    const near = steps.sort((a, b) => Math.abs(a - filter.step) - Math.abs(b - filter.step)).slice(0, 4).sort((a, b) => a - b);
    return `Step ${filter.step} is not in this report. The nearest are ${near.join(", ")}; ` +
      `trimtab report RUN --step ${filter.step} adds it, if it is recorded.`;
  }
  return "Nothing matches these filters.";
}

const VERDICTS = { correct: "✓", wrong: "✗", no_answer: "∅", crashed: "!" };
const verdictMark = (verdict) => `${VERDICTS[verdict] || "?"} ${verdict.replace("_", " ")}`;

function responseRow(entry, selectionReasons) {
  const range = entry.tokens < entry.length ? `tokens ${count(entry.start)}–${count(entry.start + entry.tokens - 1)} of ` : "";
  return [el("span", { class: "row-head" }, el("b", {}, `step ${count(entry.step)}`), el("span", {}, `response ${entry.response}`),
    el("span", { class: `verdict v-${VERDICTS[entry.verdict] ? entry.verdict : "other"}` }, verdictMark(entry.verdict))),
  el("bdi", { class: "context preview" }, tokenText(entry.text).replace(/\n/g, "")),
  el("span", { class: "row-more" }, `${range}${plural(entry.length, "token")}`,
    entry.silenced ? el("span", { class: "badge" }, `${count(entry.silenced)} silenced`) : null,
    entry.clipped ? el("span", { class: "badge" }, `${count(entry.clipped)} clipped`) : null,
    entry.calls ? el("span", {}, plural(entry.calls, "call")) : null,
    entry.failed_calls ? el("span", { class: "badge" }, `${count(entry.failed_calls)} failed`) : null,
    el("span", { class: "selected-for" }, entry.selected_for.map((key) => selectionReasons[key]).join(", ")))];
}

function tokenRow({ entry, n, gradient }) {
  const { pieces } = readResponse(entry.block);
  const context = (from, to) => tokenText(pieces.slice(Math.max(from, 0), to).join("")).replace(/\n/g, "");
  return [el("span", { class: "row-head" }, el("b", {}, `step ${count(entry.step)}`), el("span", {}, `token ${count(entry.start + n)}`),
    el("span", {}, Number.isNaN(gradient) ? "" : `gradient ${formatNumber(gradient)}`)),
  el("bdi", { class: "context" }, context(n - 6, n), el("mark", {}, context(n, n + 1)), context(n + 1, n + 7))];
}
