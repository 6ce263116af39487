// Responses of a run while it happens: some of the newest step side by side, and a table of all that are recorded.

const TABLE_SORTS = [["newest", "newest"], ["oldest", "oldest"], ["reward", "highest reward"], ["lowest", "lowest reward"],
  ["longest", "longest"], ["shortest", "shortest"], ["failed", "most failed calls"]];
const TYPING_PAUSE = 350; // milliseconds after the last key before the table is asked for

const isRewarded = (row, rows) => rows.length > 1 && row.reward === Math.max(...rows.map((one) => one.reward)) &&
  rows.some((one) => one.reward < row.reward);

function sampleCard(row, rows, open) {
  return el("article", { class: `card sample${isRewarded(row, rows) ? " best" : ""}` },
    el("p", { class: "sample-head" }, el("b", {}, `reward ${formatNumber(row.reward)}`),
      el("span", { class: `verdict v-${VERDICTS[row.verdict] ? row.verdict : "other"}` }, verdictMark(row.verdict)),
      el("span", { class: "at" }, plural(row.length, "token"))),
    el("pre", { class: "text" }, row.text || "(empty)"),
    el("button", { type: "button", class: "quiet", on: { click: () => open(row.step, row.response) } }, "Show its tokens"));
}

// Responses of the newest step to the same prompt side by side.
function samplesPart(number, open) {
  const node = el("div", { class: "samples" });
  let asked = 0;
  return {
    node,
    async refresh() {
      asked += 1;
      const mine = asked;
      const found = await askJson(`runs/${number}/samples`).catch(() => null);
      if (!found || mine !== asked) return;
      node.replaceChildren(found.step === null ? el("p", { class: "lead" }, "No step is recorded yet.")
        : el("h3", {}, `Step ${count(found.step)}, the newest recorded`),
      found.note ? el("p", { class: "note" }, found.note) : "",
      ...found.groups.map(({ size, rows }) => el("div", { class: "group" },
        el("p", { class: "meaning" }, `${plural(rows.length, "response")}${rows.length < size ? ` of ${count(size)}` : ""} to this prompt`,
          rows[0].answer ? `; right answer: ${rows[0].answer}` : ""),
        el("details", { open: rows[0].prompt.length < 300 }, el("summary", {}, "Prompt"), el("pre", { class: "text" }, rows[0].prompt)),
        el("div", { class: "side-by-side" }, rows.map((row) => sampleCard(row, rows, open))))));
    },
  };
}

function field(name, title, change, props = {}) {
  const box = el("input", { name, ...props, on: { input: change } });
  return { node: el("label", { class: `field${props.type === "number" ? " narrow" : ""}` }, el("span", {}, title), box), box };
}

// The table with its filters. It shows the newest responses, and follows the run while nothing is filtered.
function tablePart(number, open) {
  let timer = null;
  let asked = 0;
  let next = null;
  let extended = false; // whether earlier steps are shown too, which a refresh would take away
  const later = () => { clearTimeout(timer); timer = setTimeout(() => load(), TYPING_PAUSE); };
  const whole = { type: "number", inputmode: "decimal", step: "any", placeholder: "any" };
  const choice = (name, title) => select(title, [["", "any"]], "", () => load());
  const fields = {
    first: field("first", "From step", later, { ...whole, min: "0" }), last: field("last", "to step", later, { ...whole, min: "0" }),
    min_reward: field("min_reward", "Reward from", later, whole), max_reward: field("max_reward", "to reward", later, whole),
    min_length: field("min_length", "Tokens from", later, whole), max_length: field("max_length", "to tokens", later, whole),
    verdict: choice("verdict", "Verdict"), outcome: choice("outcome", "Tool outcome"),
    text: field("text", "Text", later, { type: "search", placeholder: "in response or prompt" }),
    sort: select("Sort by", TABLE_SORTS, "newest", () => load()),
  };
  const status = el("p", { class: "meaning", role: "status" });
  const body = el("tbody", {});
  const more = el("button", { type: "button", class: "quiet", hidden: true, on: { click: () => load(next) } }, "Search earlier steps");
  const save = el("button", { type: "button", class: "quiet", on: { click: () => exportRows() } }, "Export as JSON lines");

  const query = () => Object.entries(fields).filter(([, { box }]) => box.value !== "").map(([name, { box }]) => [name, box.value]);
  const isPlain = () => query().every(([name, value]) => name === "sort" && value === "newest");

  function offer(name, values) {
    const { box } = fields[name];
    const known = new Set([...box.options].map((option) => option.value));
    values.filter((value) => !known.has(value)).forEach((value) => box.append(el("option", { value }, value.replace(/_/g, " "))));
  }

  function rowOf(row) {
    return el("tr", {}, el("th", { scope: "row" }, el("a", { href: `#run=${number}&step=${row.step}&response=${row.response}&token=0`,
      on: { click: (event) => { event.preventDefault(); open(row.step, row.response); } } }, `${count(row.step)} / ${row.response}`)),
    el("td", {}, formatNumber(row.reward)), el("td", {}, el("span", { class: `verdict v-${VERDICTS[row.verdict] ? row.verdict : "other"}` }, verdictMark(row.verdict))),
    el("td", {}, `${count(row.length)}${row.finished ? "" : " …"}`), el("td", {}, row.calls ? `${row.calls}: ${row.outcomes.join(", ")}` : "–"),
    el("td", { class: "clamped" }, el("div", {}, row.prompt)), el("td", { class: "clamped" }, el("div", {}, row.text)));
  }

  async function load(before = null) {
    asked += 1;
    const mine = asked;
    try {
      const found = await askJson(`runs/${number}/responses?${new URLSearchParams(before === null ? query() : [...query(), ["before", before]])}`);
      if (mine !== asked) return;
      extended = before !== null;
      if (!extended) body.replaceChildren();
      body.append(...found.rows.map(rowOf));
      offer("verdict", found.verdicts);
      offer("outcome", found.outcomes);
      next = found.before;
      more.hidden = next === null;
      const [low, high, steps] = found.read || [];
      status.textContent = !found.read ? "No recorded step matches." :
        `${plural(body.childElementCount, "response")} shown; ${before === null ? "" : "last, "}${plural(steps, "step")} searched, ` +
        `${count(low)} to ${count(high)} of ${count(found.recorded)} recorded${found.notes.length ? `; ${found.notes.join("; ")}` : ""}.`;
    } catch (error) {
      if (mine === asked) status.textContent = String(error.message);
    }
  }

  async function exportRows() {
    save.disabled = true;
    try {
      const kept = query().filter(([name]) => name !== "sort");
      const blob = await (await ask(`runs/${number}/export?${new URLSearchParams(kept)}`)).blob();
      const link = el("a", { href: URL.createObjectURL(blob), download: "responses.jsonl" });
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
    } catch (error) {
      status.textContent = String(error.message);
    }
    save.disabled = false;
  }

  const heads = ["step / response", "reward", "verdict", "tokens", "calls", "prompt", "response"];
  return {
    load,
    refresh: async () => { if (isPlain() && !body.contains(document.activeElement) && !extended) await load(); },
    node: el("div", { class: "response-table" }, el("h3", {}, "All recorded responses"),
      el("div", { class: "controls" }, el("div", { class: "fields" }, Object.values(fields).map((one) => one.node))),
      el("div", { class: "table-head" }, status, save),
      el("div", { class: "scroll tall", tabindex: "0", role: "group", "aria-label": "Recorded responses" }, el("table", { class: "numbers responses" }, el("thead", {}, el("tr", {}, heads.map((t) => el("th", { scope: "col" }, t)))), body)), more),
  };
}
