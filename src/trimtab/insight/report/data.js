// The data of the page: parsed when it is asked for, arrays as typed arrays.

const KINDS = { f4: Float32Array, i4: Int32Array, i2: Int16Array, u1: Uint8Array };

function block(id) {
  return JSON.parse(document.getElementById(id).textContent);
}

function bytes(base64) {
  const text = atob(base64);
  const out = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i += 1) out[i] = text.charCodeAt(i);
  return out.buffer;
}

// What `pack` wrote: all values, or the commonest and those that differ.
function unpack(packed) {
  const Kind = KINDS[packed.t];
  if ("b" in packed) return new Kind(bytes(packed.b));
  const values = new Kind(packed.n).fill(packed.c === null ? NaN : Number(packed.c));
  if ("i" in packed) {
    const rest = new Kind(bytes(packed.v));
    new Int32Array(bytes(packed.i)).forEach((where, n) => { values[where] = rest[n]; });
  }
  return values;
}

const unpackAll = (table) => Object.fromEntries(Object.entries(table).map(([k, v]) => [k, unpack(v)]));

function once(make) {
  const made = new Map();
  return (key) => {
    if (!made.has(key)) made.set(key, make(key));
    return made.get(key);
  };
}

// A response with its numbers, by the number of its block.
const response = once((number) => {
  const raw = block(`response-${number}`);
  return {
    ...raw,
    arrays: unpackAll(raw.arrays),
    recorded: unpackAll(raw.recorded),
    others: raw.others.map((other) => (other ? unpackAll(other) : null)),
  };
});

// The curve of a metric: steps and values, and for several seeds the spread.
function curve(holder, name) {
  const packed = holder.curves[name];
  return packed ? unpackAll(packed) : null;
}
