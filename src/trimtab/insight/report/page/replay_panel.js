// What other objectives would have done to the same tokens: the tables of `trimtab replay`.

function replaySection(run) {
  const replay = run.replay;
  const title = "Other objectives (replay)";
  if (!replay) return section("replay", title, "There is nothing to show: no tokens that could be replayed are recorded.");
  const head = (names) => el("thead", {}, el("tr", {}, names.map((name) => el("th", { scope: "col" }, name))));
  const row = (name, cells) => el("tr", {}, el("th", { scope: "row" }, visible(name)), cells.map((cell) => el("td", {}, cell)));
  const effects = el("table", { class: "numbers", id: "replay-effects" }, head(["objective", ...replay.reasons, "entropy change"]),
    el("tbody", {}, replay.rows.map((one) => row(one.name, [...one.cells, one.entropy]))));
  const overlaps = el("table", { class: "numbers", id: "replay-overlaps" },
    el("caption", {}, `Tokens that both ${visible(replay.rows[0].name)} and another objective change (silence, boost, clip, ...):`),
    head(["objective", "overlap (Jaccard)", "of these, for the same reason"]),
    el("tbody", {}, replay.pairs.map((pair) => row(pair.names[1], [pair.jaccard, pair.agreement]))));
  const sample = replay.steps < replay.recorded_steps ? `${count(replay.steps)} evenly spaced of the ` : "";
  return section("replay", title, `What each objective would have done to the same tokens of ${sample}` +
    `${plural(replay.recorded_steps, "recorded step")}. ${replay.legend}`,
  el("div", { class: "scroll" }, effects), el("div", { class: "scroll" }, overlaps),
  replay.notes.length ? el("p", { class: "note" }, replay.notes.join("; ")) : null);
}
