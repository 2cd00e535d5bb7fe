// Colours of a terminal: SGR sequences become names of classes, all other sequences go. Pure.

// CSI (of which `m` alone counts), OSC up to its end, and any other escape of two characters
const SEQUENCE = /\u001b(?:\[([0-9;:]*)([ -/]*[@-~])|\][^\u0007\u001b]*(?:\u0007|\u001b\\)?|[ -~]?)/g;
const LEVELS = [0, 95, 135, 175, 215, 255];

/** @typedef {{fg: number|null, bg: number|null, bold: boolean, dim: boolean, italic: boolean, underline: boolean, inverse: boolean}} Style */
/** @returns {Style} */
export const plain = () => ({ fg: null, bg: null, bold: false, dim: false, italic: false, underline: false, inverse: false });

const FLAGS = { 1: ["bold", true], 2: ["dim", true], 3: ["italic", true], 4: ["underline", true], 7: ["inverse", true], 22: ["bold", false], 23: ["italic", false], 24: ["underline", false], 27: ["inverse", false] };

/**
 * Return the spans of a line, and the style in which the next one begins.
 * @param {string} line @param {Style} style
 * @returns {{spans: {text: string, name: string}[], style: Style}} names of classes, or an empty text
 */
export function parseLine(line, style = plain()) {
  const kept = lastState(line);
  const spans = [];
  const add = (text) => {
    if (!text) return;
    const name = classOf(style);
    if (spans.at(-1)?.name === name) spans.at(-1).text += text;
    else spans.push({ text, name });
  };
  let at = 0;
  for (const found of kept.matchAll(SEQUENCE)) {
    add(kept.slice(at, found.index));
    at = found.index + found[0].length;
    if (found[2] === "m") style = restyle(style, found[1]);
  }
  add(kept.slice(at));
  return { spans, style };
}

/** The text alone. @param {string} line */
export const stripped = (line) => (/[\u001b\r]/.test(line) ? lastState(line).replace(SEQUENCE, "") : line);

/** A progress bar writes its line again and again after a carriage return: the last state counts. */
function lastState(line) {
  if (!line.includes("\r")) return line;
  return line.split("\r").findLast((part) => part.replace(SEQUENCE, "")) ?? "";
}

function restyle(style, parameters) {
  const next = { ...style };
  const codes = parameters.split(/[;:]/).map(Number);
  for (let i = 0; i < codes.length; i++) {
    const code = codes[i];
    if (code === 0) Object.assign(next, plain());
    else if (code in FLAGS) {
      const [name, value] = FLAGS[code];
      next[name] = value;
      if (code === 22) next.dim = false;
    } else if (code === 38 || code === 48) {
      const field = code === 38 ? "fg" : "bg";
      if (codes[i + 1] === 5) next[field] = basic(codes[(i += 2)]);
      else if (codes[i + 1] === 2) next[field] = nearest(codes[(i += 4) - 2], codes[i - 1], codes[i]);
    } else if (code === 39) next.fg = null;
    else if (code === 49) next.bg = null;
    else if (code >= 30 && code <= 37) next.fg = code - 30;
    else if (code >= 90 && code <= 97) next.fg = code - 82;
    else if (code >= 40 && code <= 47) next.bg = code - 40;
    else if (code >= 100 && code <= 107) next.bg = code - 92;
  }
  return next;
}

/** One of 256 colours as one of 16. */
function basic(code) {
  if (!(code >= 0 && code < 256)) return null;
  if (code < 16) return code;
  if (code >= 232) return [0, 8, 7, 15][Math.floor((code - 232) / 6)];
  const cube = code - 16;
  return nearest(LEVELS[Math.floor(cube / 36)], LEVELS[Math.floor(cube / 6) % 6], LEVELS[cube % 6]);
}

/** Any colour as one of 16, which are readable in both schemes. */
function nearest(red, green, blue) {
  const top = Math.max(red, green, blue);
  if (!(top >= 64)) return Number.isNaN(top) ? null : 0;
  const bits = [red, green, blue].reduce((sum, value, bit) => sum | (value > top * 0.6 ? 1 << bit : 0), 0);
  return bits + (top > 200 ? 8 : 0);
}

function classOf(style) {
  const [fg, bg] = style.inverse ? [style.bg ?? "inverse", style.fg ?? "inverse"] : [style.fg, style.bg];
  const names = ["bold", "dim", "italic", "underline"].filter((name) => style[name]);
  if (fg != null) names.push(`fg-${fg}`);
  if (bg != null) names.push(`bg-${bg}`);
  return names.join(" ");
}
