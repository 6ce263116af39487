// The turns of a conversation among its tokens: where a message begins, its calls, and what came back, which is not
// trained on. What tools and models wrote is text here as everywhere.

const FOLDED_FROM = 500; // characters of a reply or of arguments; longer ones are folded

let callOutcomes = new Map(); // what each means; maps, since a record may name anything, "constructor" too
let conversationEnds = new Map();

// A fold with a text in it. `folds` remembers by key what the reader opened or closed, and hears of it.
function fold(title, text, key, folds) {
  const node = el("details", { open: folds.isOpen(key, text.length < FOLDED_FROM), "data-fold": key,
    on: { toggle: () => folds.toggled(key, node.open) } },
  el("summary", {}, title), el("pre", { class: "text" }, text));
  return node;
}

// Arguments by name, texts with their own line breaks; JSON that was cut stays as it is.
function argumentsText(json) {
  try {
    const named = Object.entries(JSON.parse(json));
    return named.map(([name, value]) => `${name}: ${typeof value === "string" ? value : JSON.stringify(value)}`).join("\n");
  } catch {
    return json;
  }
}

function callLine(call, key, folds) {
  const failed = call.outcome !== "ok";
  const given = argumentsText(call.arguments);
  return el("div", { class: "call" }, el("p", { class: "call-head" }, el("bdi", { class: "call-name" }, call.tool || "no name"),
    el("span", { class: `outcome${failed ? " failed" : ""}`, title: callOutcomes.get(call.outcome) },
      `${failed ? "✗" : "✓"} ${call.outcome.replace(/_/g, " ")}`),
    el("span", { class: "at" }, call.seconds < 1 ? `${formatNumber(1000 * call.seconds)} ms` : formatDuration(call.seconds))),
  given ? fold("arguments", given, key, folds) : null);
}

// The calls of a message and the reply to it; null if there are none.
function replyBlock(turn, folds) {
  const { calls, reply, number } = turn;
  if (!calls.length && !reply) return null;
  return el("div", { class: "observed", role: "group", "aria-label": `Calls and reply after message ${number}, not trained on` },
    calls.map((call, n) => callLine(call, `${number}/${n}`, folds)),
    reply ? fold([`reply, ${plural(reply.tokens, "token")} `, el("b", { class: "untrained" }, "not trained on")], reply.text,
      `${number}/reply`, folds)
      : el("p", { class: "meaning" }, "The model got no reply."));
}

// The nodes before token `n` (`n` = number of tokens: after the last): the reply to a message that ends here, and the
// head of the message that begins here.
function turnNodes(held, n, folds) {
  const nodes = [];
  for (const turn of held.turns) {
    if (turn.start === n && turn.end > n) {
      nodes.push(el("p", { class: "turn-head" }, `model, message ${turn.number}`));
    }
    if (turn.end === n) nodes.push(replyBlock(turn, folds));
  }
  // A message ends before the next one begins, which is their order in `turns` too.
  return nodes.filter(Boolean);
}

// How many messages and calls there are, and how the conversation ended.
function conversationText(entry, held) {
  if (entry.messages === undefined && !held.ended) return "";
  const calls = !entry.calls ? "" : `, ${plural(entry.calls, "call")}${entry.failed_calls ? ` (${count(entry.failed_calls)} failed)` : ""}`;
  const ended = held.ended ? `. Ended by ${held.ended}: ${conversationEnds.get(held.ended) || "unknown"}` : "";
  return `${plural(entry.messages || 1, "message")}${calls}${ended}.`;
}
