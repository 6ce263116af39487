// Colours for colour-blind readers: a ramp in lightness, one from blue to orange, and Okabe and Ito's eight. A neutral
// value has the colour of the background, so that only unusual tokens stand out.

const PALETTE = Array.from({ length: 8 }, (_, n) => `var(--line-${n})`); // in the style, light and dark
const DASHES = ["", "7 4", "2 3", "9 3 2 3", "4 2", "1 3", "12 4", "3 6"];
const RAMPS = {
  light: ["#ffffff", "#dbe9f4", "#a9cde3", "#5ea3cb", "#2870a8", "#123f75"],
  dark: ["#151a21", "#1d3750", "#27618c", "#4596bd", "#8fcbd8", "#f2f6c9"],
};
const DIVERGING = {
  light: ["#1f5fa8", "#7fb0d8", "#ffffff", "#f2b06b", "#b35806"],
  dark: ["#7cc0ff", "#2b66a0", "#151a21", "#a5601c", "#ffb35c"],
};
const HEAT = ["#00224e", "#213b6e", "#4c556c", "#6c6e72", "#8e8978", "#b2a570", "#d9c55c", "#fee838"];

function theme() {
  const set = document.documentElement.dataset.theme;
  if (set) return set;
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

function interpolate(ramp, share) {
  const position = Math.min(Math.max(share, 0), 1) * (ramp.length - 1);
  const at = Math.min(Math.floor(position), ramp.length - 2);
  const [low, high] = [channels(ramp[at]), channels(ramp[at + 1])];
  return low.map((value, n) => Math.round(value + (high[n] - value) * (position - at)));
}

const css = ([r, g, b]) => `rgb(${r} ${g} ${b})`;

// Black or white, whichever has more contrast on a colour.
function textColor([r, g, b]) {
  const [x, y, z] = [r, g, b].map((c) => (c / 255 <= 0.04045 ? c / 3294.6 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * x + 0.7152 * y + 0.0722 * z > 0.179 ? "#000000" : "#ffffff";
}

const ramp = (share) => interpolate(RAMPS[theme()], share);
const diverging = (share) => interpolate(DIVERGING[theme()], (share + 1) / 2);
const heat = (share) => interpolate(HEAT, share);

// Every reason has a colour and a letter before the token, so that colour alone never carries the information.
const REASONS = {
  kept: { color: null, mark: "" },
  no_signal: { color: "#9aa0a6", mark: "0" },
  silenced: { color: "#d55e00", mark: "S" },
  boosted: { color: "#009e73", mark: "B" },
  damped: { color: "#56b4e9", mark: "D" },
  masked: { color: "#8a8a8a", mark: "M" },
  dropped: { color: "#cc79a7", mark: "X" },
  penalized: { color: "#e69f00", mark: "P" },
  corrected: { color: "#0072b2", mark: "C" },
  reshaped: { color: "#f0e442", mark: "R" },
  widened: { color: "#7a6ff0", mark: "W" },
  narrowed: { color: "#b8a1d9", mark: "N" },
};
