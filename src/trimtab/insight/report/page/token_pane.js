// The text of a response as one element per token. Long responses are rendered in chunks, which hold elements only while
// they are near the viewport, so that the page does not lay out 15,000 elements.

const CHUNK = 250; // tokens

// One pane of tokens. `style(n)` is {color, mark, off} of a token; `hooks` are what the microscope does on hover, leave,
// click or arrow keys (`go`), the current token, and which folds of turns are open (`folds`).
function tokenPane(held, start, label, style, hooks) {
  const box = el("div", { class: "pane", tabindex: "-1", role: "group", "aria-label": label });
  const chunks = [];
  const length = held.pieces.length;
  for (let first = 0; first < length; first += CHUNK) {
    chunks.push({ first, last: Math.min(first + CHUNK, length), node: el("div", { class: "chunk" }), tokens: null });
  }
  // An empty chunk reserves about the height it will have, so that the scroll bar does not jump.
  const turnsIn = (chunk) => held.turns.filter((turn) => turn.end >= chunk.first && turn.end < chunk.last).length;
  const estimatedHeight = (chunk) => `${Math.ceil((held.pieces.slice(chunk.first, chunk.last).join("").length * 8.6) / 560 + 1) * 26 +
    turnsIn(chunk) * 140}px`;
  chunks.forEach((chunk) => { chunk.node.style.minHeight = chunks.length > 1 ? estimatedHeight(chunk) : ""; });

  function paint(node, n) {
    const { color, mark, off } = style(n);
    node.style.background = color ? css(color) : "";
    node.style.color = color ? textColor(color) : "";
    if (mark) node.dataset.mark = mark; else delete node.dataset.mark;
    node.classList.toggle("off", off);
  }

  function render(chunk) {
    if (chunk.tokens) return;
    chunk.tokens = [];
    const nodes = [];
    for (let n = chunk.first; n < chunk.last; n += 1) {
      const turns = turnNodes(held, n, hooks.folds);
      nodes.push(...turns);
      const cut = n > 0 && held.arrays.segment && held.arrays.segment[n] !== held.arrays.segment[n - 1];
      const node = el("span", { class: `tok${cut ? " cut" : ""}${held.arrays.special[n] ? " special" : ""}`, "data-n": n,
        tabindex: n === hooks.current() ? "0" : "-1", role: "button", "aria-label": `token ${start + n}: ${tokenText(held.pieces[n])}` },
      tokenText(held.pieces[n]));
      paint(node, n);
      const gap = held.arrays.tool_tokens ? held.arrays.tool_tokens[n] : 0;
      if (gap && !turns.length) nodes.push(el("span", { class: "tool-gap" }, `[${plural(gap, "token")} of a tool's output, not recorded]`));
      chunk.tokens.push(node);
      nodes.push(node);
    }
    if (chunk.last === length) nodes.push(...turnNodes(held, length, hooks.folds));
    chunk.node.replaceChildren(...nodes);
    chunk.node.style.minHeight = "";
  }

  function clear(chunk) {
    if (!chunk.tokens || chunk.node.contains(document.activeElement)) return;
    chunk.node.style.minHeight = `${chunk.node.offsetHeight}px`;
    chunk.node.replaceChildren();
    chunk.tokens = null;
  }

  const observer = new IntersectionObserver((entries) => entries.forEach((entry) => {
    const chunk = chunks.find((one) => one.node === entry.target);
    if (entry.isIntersecting) render(chunk); else clear(chunk);
  }), { root: box, rootMargin: "800px 0px" });
  box.append(...chunks.map((chunk) => chunk.node));
  if (chunks.length === 1) render(chunks[0]); else chunks.forEach((chunk) => observer.observe(chunk.node));

  const nodeOf = (n) => {
    const chunk = chunks[Math.floor(n / CHUNK)];
    render(chunk);
    return chunk.tokens[n - chunk.first];
  };
  listenToTokens(box, length, hooks);
  return {
    box,
    mark(n, before) {
      const old = chunks[Math.floor(before / CHUNK)];
      if (old && old.tokens) {
        old.tokens[before - old.first].classList.remove("here");
        old.tokens[before - old.first].tabIndex = -1;
      }
      const node = nodeOf(n);
      node.classList.add("here");
      node.tabIndex = 0;
      return node;
    },
    close() { observer.disconnect(); },
  };
}

// Report the token under the pointer, and move by click, focus or arrow keys.
function listenToTokens(box, length, hooks) {
  const tokenAt = (event) => {
    const node = event.target.closest(".tok");
    return node ? Number(node.dataset.n) : null;
  };
  box.addEventListener("pointerover", (event) => { if (tokenAt(event) !== null) hooks.hover(tokenAt(event), event.target.closest(".tok")); });
  box.addEventListener("pointerleave", () => hooks.leave());
  box.addEventListener("click", (event) => { if (tokenAt(event) !== null) hooks.go(tokenAt(event)); });
  box.addEventListener("focusin", (event) => { if (tokenAt(event) !== null && tokenAt(event) !== hooks.current()) hooks.go(tokenAt(event)); });
  box.addEventListener("keydown", (event) => {
    const n = hooks.current();
    const goal = { ArrowRight: n + 1, ArrowLeft: n - 1, ArrowDown: n + 10, ArrowUp: n - 10, PageDown: n + CHUNK,
      PageUp: n - CHUNK, Home: 0, End: length - 1 }[event.key];
    if (goal === undefined) return;
    hooks.go(Math.min(Math.max(goal, 0), length - 1));
    event.preventDefault();
  });
}
