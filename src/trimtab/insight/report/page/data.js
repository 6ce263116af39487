// The data of the page: JSON blocks, parsed on demand, and numeric arrays as typed arrays.

const ARRAY_TYPES = { f4: Float32Array, i4: Int32Array, i2: Int16Array, u1: Uint8Array };

// A report has all of its data in the file. The page of `trimtab watch` asks for more: `source` is where from, `loaded` holds
// blocks that came later than the page, by id, and `growth` what draws a part of the page anew when its run has grown.
let source = null;
const loaded = new Map();
const growth = [];

function parseBlock(id) {
  return loaded.has(id) ? loaded.get(id) : JSON.parse(document.getElementById(id).textContent);
}

function decodeBase64(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i += 1) bytes[i] = text.charCodeAt(i);
  return bytes.buffer;
}

// The inverse of Python's `encode_array`: all values, or the most common one and the exceptions.
function decodeArray(encoded) {
  const ArrayType = ARRAY_TYPES[encoded.t];
  if ("b" in encoded) return new ArrayType(decodeBase64(encoded.b));
  const values = new ArrayType(encoded.n).fill(encoded.c === null ? NaN : Number(encoded.c));
  if ("i" in encoded) {
    const exceptions = new ArrayType(decodeBase64(encoded.v));
    new Int32Array(decodeBase64(encoded.i)).forEach((index, n) => { values[index] = exceptions[n]; });
  }
  return values;
}

const decodeAll = (table) => Object.fromEntries(Object.entries(table).map(([k, v]) => [k, decodeArray(v)]));

function memoize(compute) {
  const results = new Map();
  const found = (key) => {
    if (!results.has(key)) results.set(key, compute(key));
    return results.get(key);
  };
  found.forget = () => results.clear();
  return found;
}

// A response with its arrays, by the number of its block.
const readResponse = memoize((number) => {
  const raw = parseBlock(`response-${number}`);
  return {
    ...raw,
    arrays: decodeAll(raw.arrays),
    recorded: decodeAll(raw.recorded),
    compared: raw.compared.map((effects) => (effects ? decodeAll(effects) : null)),
  };
});

// The curve of a metric: steps and values, and for several seeds their standard deviation.
function readCurve(owner, name) {
  return owner.curves[name] ? decodeCurve(owner.curves[name]) : null;
}

// A curve that has grown is decoded already.
const decodeCurve = (curve) => (curve.steps.t ? decodeAll(curve) : curve);
