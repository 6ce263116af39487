// The alarms of a run, with what to try.

const FIRST_ALARMS = 9; // shown; the others are folded away

function alarmsSection(run, openStep) {
  let shown = run.alarms;
  let node = alarmsNode(run, openStep);
  growth.push(() => {
    if (run.alarms === shown) return;
    shown = run.alarms;
    const fresh = alarmsNode(run, openStep);
    node.replaceWith(fresh);
    node = fresh;
  });
  return node;
}

// Alarms on a timeline, and a card for each.
function alarmsNode(run, openStep) {
  if (!run.alarms.length) return section("alarms", "Alarms", "No alarm was raised.");
  const last = Math.max(...run.alarms.map((alarm) => alarm.step), run.last_recorded_step, 1);
  const line = el("div", { class: "timeline", role: "group", "aria-label": "Alarms over the steps of the run" },
    run.alarms.map((alarm) => el("button", { type: "button", class: "bell", style: `left:${(alarm.step / last) * 100}%`,
      "aria-label": `step ${alarm.step}: ${alarm.alarm}`, title: `step ${alarm.step}: ${visible(alarm.alarm)}`,
      on: { click: () => openStep(alarm.step) } }, "▼")),
    el("span", { class: "from" }, "step 0"), el("span", { class: "to" }, `step ${count(last)}`));
  const cards = run.alarms.map((alarm) => el("article", { class: "card alarm" },
    el("h3", {}, alarm.alarm, el("span", { class: "at" }, `step ${count(alarm.step)}`)),
    alarm.message ? el("p", {}, alarm.message) : null,
    alarm.evidence ? el("p", { class: "meaning" }, "Evidence: ", alarm.evidence) : null,
    alarm.suggestion ? el("p", {}, el("b", {}, "Advice: "), withCode(alarm.suggestion)) : null,
    alarm.action ? el("p", { class: "meaning" }, "Action: ", alarm.action) : null,
    el("button", { type: "button", class: "quiet", on: { click: () => openStep(alarm.step) } }, "Show this step's tokens")));
  const more = cards.splice(FIRST_ALARMS);
  return section("alarms", "Alarms", null, line, el("div", { class: "grid" }, cards), more.length
    ? el("details", { class: "more" }, el("summary", {}, `${plural(more.length, "more alarm")}`), el("div", { class: "grid" }, more)) : null);
}
