// What other objectives would have done: the tables of a replay.

function othersSection(run) {
  const replay = run.replay;
  if (!replay) return section("others", "Other objectives", "There is nothing to show: no tokens that could be replayed are recorded.");
  const head = (names) => el("thead", {}, el("tr", {}, names.map((name) => el("th", { scope: "col" }, name))));
  const row = (name, cells) => el("tr", {}, el("th", { scope: "row" }, visible(name)), cells.map((cell) => el("td", {}, cell)));
  const done = el("table", { class: "numbers", id: "replay" }, head(["objective", ...replay.reasons, "entropy"]),
    el("tbody", {}, replay.rows.map((one) => row(one.name, [...one.cells, one.entropy]))));
  const agree = el("table", { class: "numbers", id: "overlaps" },
    el("caption", {}, `Tokens that are set apart by ${visible(replay.rows[0].name)} and by another:`),
    head(["objective", "by both, of those by either", "for the same reason"]),
    el("tbody", {}, replay.pairs.map((pair) => row(pair.names[1], [pair.jaccard, pair.agreement]))));
  const some = replay.steps < replay.of ? `${count(replay.steps)} evenly spaced of the ` : "";
  return section("others", "Other objectives", `What each would have done to the same tokens of ${some}` +
    `${plural(replay.of, "recorded step")}. ${replay.legend}`,
  el("div", { class: "scroll" }, done), el("div", { class: "scroll" }, agree),
  replay.notes.length ? el("p", { class: "note" }, replay.notes.join("; ")) : null);
}
