// Numbers and times as people read them. Pure.

/** `0.4 s`, `12 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`. @param {number} seconds */
export function duration(seconds) {
  if (seconds < 10) return `${Math.max(seconds, 0).toFixed(1)} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

/** The larger unit of `duration` alone: `3 min`. @param {number} seconds */
export function roughly(seconds) {
  return seconds < 10 ? `${Math.max(Math.round(seconds), 0)} s` : duration(seconds).split(" ").slice(0, 2).join(" ");
}

/** Time of day, with the date if it is another day. @param {number} at seconds since 1970 */
export function clock(at) {
  const time = new Date(at * 1000);
  const text = time.toLocaleTimeString("en-GB");
  return time.toDateString() === new Date().toDateString() ? text : `${day(time)} ${text}`;
}

/** Date and time to a tenth of a second. @param {number} at seconds since 1970 */
export function stamp(at) {
  const time = new Date(at * 1000);
  return `${day(time)} ${time.toLocaleTimeString("en-GB")}.${Math.floor(time.getMilliseconds() / 100)}`;
}

const day = (time) => `${time.getFullYear()}-${pad(time.getMonth() + 1)}-${pad(time.getDate())}`;
const pad = (number) => String(number).padStart(2, "0");

/** A metric: four significant digits of a fraction, a whole number as it is. @param {number|string|null} value */
export function number(value) {
  if (typeof value !== "number") return value ?? "-";
  const size = Math.abs(value);
  if (Number.isInteger(value) || (size >= 1e4 && size < 1e12)) return Math.round(value).toLocaleString("en").replaceAll(",", "\u202f");
  return size !== 0 && (size < 1e-3 || size >= 1e12) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

/** `512 bytes`, `95 MB`. @param {number} count */
export function bytes(count) {
  for (const [unit, size] of Object.entries({ TB: 1e12, GB: 1e9, MB: 1e6, kB: 1e3 })) {
    if (count >= size) return `${Number((count / size).toPrecision(3))} ${unit}`;
  }
  return `${count} bytes`;
}

/** `1 worker`, `3 workers`. @param {number} count @param {string} noun */
export const count = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;

/** The pattern of `unified logs --grep` for lines with a text in any case, quoted for a shell. @param {string} text */
export const grepPattern = (text) => `'(?i)${text.replace(/[\\^$.*+?()[\]{}|]/g, "\\$&").replaceAll("'", "'\\''")}'`;

/** @param {string} text */
export const firstLine = (text) => (text ?? "").split("\n", 1)[0];
