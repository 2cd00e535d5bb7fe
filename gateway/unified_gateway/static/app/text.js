// The one way from data to the page: `html` makes elements, and every text in them is shown as it is.
import { h, htm } from "../vendor/vendor.js";

// control characters but tab and newline, and what turns the direction of text or is not seen at all
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;
const CODES = { "\r": "\\r", "\u001b": "\\e" };

/**
 * Return a text with characters that cannot be seen, or that reorder others, as escapes.
 * @param {string} text
 */
export function visible(text) {
  return text.replace(HIDDEN, (found) => {
    const code = found.charCodeAt(0);
    return CODES[found] ?? (code < 256 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`);
  });
}

function shown(child) {
  if (typeof child === "string") return visible(child);
  return Array.isArray(child) ? child.map(shown) : child;
}

/** Make an element. Markup in a text stays text, since nothing here writes HTML; see `visible` for the rest. */
function element(type, props, ...children) {
  if (props?.title) props.title = visible(String(props.title));
  return h(type, props, ...children.map(shown));
}

export const html = htm.bind(element);
