// Lines of the logs of one or more workers: in the order of time, folded, filtered, and laid out in rows of equal height. Pure.
import { parseLine, plain, stripped } from "./ansi.js";

const MAX_LINES = 20000;
const MAX_OPEN = 16384;
const NEAR = 64;
let versions = 0; // no two logs have a version in common
const TROUBLE = /traceback \(most recent|(?:^|[\s[(])[\w.]*(?:error|exception)\b(?!=)|\bfatal\b|segmentation fault/i;

/**
 * @typedef {object} Line
 * @property {number} id @property {string} who worker that wrote it first @property {boolean} isErr
 * @property {string} text without colours @property {{text: string, name: string}[]} spans
 * @property {number} at its place in the order of time @property {number} time seconds since 1970 at which it was written, or 0
 * @property {number} times how often it was written, by any worker
 * @property {Set<string>} by
 */

export class LogLines {
  constructor() {
    /** @type {Line[]} */
    this.lines = [];
    this.version = ++versions;
    this.nextId = 0;
    this.styles = new Map();
    this.open = new Map();
    this.newest = new Map();
  }

  /**
   * Add what a worker wrote; a last line without its end is kept until the rest comes, unless it is very long.
   * @param {{title: string, isErr?: boolean}} source a stream of a worker @param {string} text
   * @param {[number, number][]} times numbers of lines of the text, and the time of these and the following lines
   */
  add(source, text, times = []) {
    if (!text) return;
    const parts = ((this.open.get(source)?.text ?? "") + text).split("\n");
    this.open.set(source, { text: parts.at(-1).length > MAX_OPEN ? "" : parts.pop(), time: times.at(-1)?.[1] });
    if (!parts.length) return;
    let [run, time] = [0, 0];
    parts.forEach((part, number) => {
      while (run < times.length && times[run][0] <= number) time = times[run++][1];
      this.addLine(source, part, time);
    });
    this.version = ++versions;
  }

  /** Add the last line of a stream that has ended. */
  finish(source) {
    const open = this.open.get(source);
    if (open?.text) this.add(source, "\n", [[0, open.time]]);
  }

  addLine(source, raw, time) {
    const at = Math.max(this.newest.get(source) ?? 0, time ?? 0); // a stream keeps its order if the clock was set back
    this.newest.set(source, at);
    const { spans, style } = parseLine(raw, this.styles.get(source) ?? plain());
    this.styles.set(source, style);
    const text = stripped(raw).replaceAll("\t", "    ");
    this.lines.push({ id: this.nextId++, who: source.title, isErr: !!source.isErr, text, spans, at, time, times: 1, by: null });
  }

  /**
   * Return the lines to show, of the newest `MAX_LINES`.
   * @param {{find?: string, isFolded?: boolean}} options lines that have `find` in them; equal lines near each other as one
   */
  shown({ find = "", isFolded = true }) {
    this.lines.sort((one, other) => one.at - other.at);
    this.lines.splice(0, this.lines.length - MAX_LINES);
    const wanted = find.toLowerCase();
    const shown = [];
    const recent = new Map();
    const last = new Map();
    for (const line of this.lines) {
      if (wanted && !line.text.toLowerCase().includes(wanted)) continue;
      const place = recent.get(line.text);
      if (isFolded && line.text.trim() && place !== undefined && shown.length - place <= NEAR) {
        const first = shown[place];
        // of one worker only lines that follow each other, so that the order of what it printed is kept
        if (last.get(line.who) === place || !(first.by?.has(line.who) ?? first.who === line.who)) {
          shown[place] = { ...first, times: first.times + 1, by: new Set([...(first.by ?? [first.who]), line.who]) };
          last.set(line.who, place);
          continue;
        }
      }
      recent.set(line.text, shown.length);
      last.set(line.who, shown.length);
      shown.push(line);
    }
    return shown;
  }
}

/** The place of the first line that tells of trouble, or -1. @param {Line[]} lines */
export const firstTrouble = (lines) => lines.findIndex((line) => TROUBLE.test(line.text));

/**
 * Return the first row of each line, and the number of rows behind the last one, where a line is as many rows as it
 * needs at this number of columns.
 * @param {Line[]} lines @param {number} columns 0: lines are not wrapped
 */
export function rowsOf(lines, columns) {
  const rows = new Float64Array(lines.length + 1);
  for (let i = 0; i < lines.length; i++) rows[i + 1] = rows[i] + (columns ? Math.max(1, Math.ceil(widthOf(lines[i].text) / columns)) : 1);
  return rows;
}

/** Columns of a text in a terminal, with two for a wide character. */
const widthOf = (text) => text.length + (text.match(/[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60]/g)?.length ?? 0);

/** The last line that begins at or above a row. @param {Float64Array} rows @param {number} row */
export function lineAt(rows, row) {
  let [low, high] = [0, rows.length - 1];
  while (low < high - 1) {
    const middle = (low + high) >> 1;
    if (rows[middle] <= row) low = middle;
    else high = middle;
  }
  return low;
}
