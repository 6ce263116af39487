// Entropy control: is the entropy held, does the theory predict how it moves, and by which weights.

const CONTROL_CARDS = [
  { title: "Weight", meaning: "Factor on the tokens that move the entropy the way that is wanted; 1 when trim is off",
    lines: { "trim/weight": "trim", "stare/weight": "STARE, critical" } },
  { title: "Drive", meaning: "Change that trim asks for, as a share of what all tokens could do; leverage near 0: no weights could steer",
    lines: { "trim/drive": "drive", "trim/leverage": "leverage", "trim/saturated": "weight at its limit" } },
  { title: "R² of the prediction", meaning: "Squared correlation of predicted and measured changes of the entropy over the last 100 steps",
    lines: { "trim/r2": "R²" }, zero: true },
];

const controlLine = (n, name, line) => ({ name, color: PALETTE[n], dash: DASHES[n], ...line });

// The entropy with its target, and the band around it that counts as held.
function heldSpec(run) {
  if (!run.curves["trim/target"] || !run.curves["policy/entropy"]) return null;
  const target = readCurve(run, "trim/target");
  const [low, high] = run.control.band;
  return { title: "Entropy and its target", meaning: "Token-mean entropy of the policy, in nats, and the floor that trim holds it above",
    zero: true, format: formatNumber, series: [controlLine(0, "entropy", readCurve(run, "policy/entropy")), controlLine(1, "floor", target)],
    fan: [low, high].map((factor) => ({ steps: target.steps, values: target.values.map((value) => value * factor) })),
    aside: low < 1 ? "shaded: counts as held" : "shaded: from floor to ceiling" };
}

function outcomeSpec(run) {
  const { outcome } = run.control;
  if (!outcome) return null;
  const { r2, gain, drift, points } = outcome.fit;
  return { title: "Prediction and outcome", format: formatNumber,
    meaning: `Change of the entropy to the next step, over ${count(points)} steps: R² ${formatNumber(r2)}, ` +
      `gain ${formatNumber(gain)}, drift ${formatNumber(drift)} where no change is predicted`,
    series: [controlLine(0, "measured", decodeAll(outcome.measured)), controlLine(1, "prediction × gain + drift", decodeAll(outcome.explained))] };
}

function criticalSpec(run) {
  if (!run.control.critical) return null;
  const { steps, critical, in_use: inUse } = decodeAll(run.control.critical);
  return { title: "Critical weight", log: true, format: formatNumber,
    meaning: "Weight on STARE's boosted tokens at which an update leaves the entropy unchanged to first order, at recorded steps",
    series: [controlLine(0, "critical", { steps, values: critical }), controlLine(1, "in use", { steps, values: inUse })] };
}

function controlSection(run, openStep) {
  if (!run.control) return null;
  const specs = (axis, [owner]) => [heldSpec(owner), outcomeSpec(owner), criticalSpec(owner), ...CONTROL_CARDS.map((card) => runSpec(card, owner, openStep))]
    .filter(Boolean).map((spec) => onAxis({ ...spec, alarms: owner.alarms, openStep }, axis, owner));
  const node = section("control", "Entropy control", run.control.sentences.join(" ") || null, ...gridWithAxis([run], specs));
  growth.push(() => { if (run.control && node.querySelector(".lead")) node.querySelector(".lead").textContent = run.control.sentences.join(" "); });
  return node;
}
