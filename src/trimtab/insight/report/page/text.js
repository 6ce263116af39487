// Number formats, and elements whose children are text or nodes: nothing here takes markup.

const SVG = "http://www.w3.org/2000/svg";

// Invisible and bidirectional control characters are written out as escapes.
const INVISIBLE = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u180e\\u200b\\u200e\\u200f\\u2028-\\u202e" +
    "\\u2060-\\u206f\\ufeff\\ufff9-\\ufffb]|[\\ud800-\\udbff](?![\\udc00-\\udfff])|(?<![\\ud800-\\udbff])[\\udc00-\\udfff]" +
    "|\\udb40[\\udc00-\\udc7f]", "g");

function visible(text) {
  return String(text).replace(INVISIBLE, (c) => "\\u{" + c.codePointAt(0).toString(16) + "}");
}

function fill(node, props, children) {
  for (const [key, value] of Object.entries(props || {})) {
    if (key === "on") for (const [name, handler] of Object.entries(value)) node.addEventListener(name, handler);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(key, value);
  }
  for (const child of children.flat()) {
    if (child === null || child === undefined) continue;
    node.append(child instanceof Node ? child : document.createTextNode(visible(child)));
  }
  return node;
}

// Replace the children of an element, as `el` would have made them.
function refill(node, ...children) {
  node.replaceChildren();
  return fill(node, {}, children);
}

const el = (tag, props, ...children) => fill(document.createElement(tag), props, children);
const svg = (tag, props, ...children) => fill(document.createElementNS(SVG, tag), props, children);

// Text with `names` between backticks as elements; one backtick too many stays a character.
function withCode(text) {
  const parts = String(text).split("`");
  return parts.length % 2 ? parts.map((part, n) => (n % 2 ? el("code", {}, part) : part)) : [text];
}

function formatNumber(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e6 || size < 1e-3) return minus(value.toExponential(1).replace("e+", "e"));
  if (size >= 1000) return minus(Math.round(value).toLocaleString("en"));
  return minus(String(Number(value.toPrecision(3))));
}

// A standard deviation with two digits.
const rounded = (value, format) => format(Number(value.toPrecision(2)));

const minus = (text) => text.replace("-", "−");
const count = (value) => Math.round(value).toLocaleString("en");

// A share as a percentage; small ones keep two digits, since they may be one token in ten thousand.
function percent(share) {
  if (share === null || share === undefined || Number.isNaN(share)) return "–";
  const value = 100 * share;
  if (value === 0) return "0%";
  if (Math.abs(value) >= 10) return minus(String(Number(value.toPrecision(3)))) + "%";
  return minus(Number(value.toPrecision(2)).toString()) + "%";
}

const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;

function select(label, options, value, change) {
  const box = el("select", { on: { change: () => change(box.value) } },
    options.map(([key, text]) => el("option", { value: key, selected: key === value }, text)));
  return { node: el("label", { class: "field" }, el("span", {}, label), box), box };
}
