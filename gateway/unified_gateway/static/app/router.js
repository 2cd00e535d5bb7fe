// Paths to pages, and what is chosen on a page in the query, so that a URL shows to others what one sees.
import { signal } from "../vendor/vendor.js";

const PAGES = { "": "overview", jobs: "jobs", nodes: "nodes", datasets: "datasets", tasks: "tasks", logs: "logs", about: "about" };

/** @param {string} path @returns {{page: string, id: string, tab: string}} */
export function match(path) {
  const [first = "", id = "", tab = ""] = path.split("/").slice(1).map(decoded);
  if (!id) return { page: PAGES[first] ?? "unknown", id, tab };
  if (first === "jobs") return { page: "job", id, tab: tab || "summary" };
  return { page: first === "nodes" && !tab ? "node" : "unknown", id, tab };
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/** Where we are: page, id, tab and the query. */
export const place = signal({ page: "overview", id: "", tab: "", query: new URLSearchParams() });

export function readPlace() {
  place.value = { ...match(location.pathname), query: new URLSearchParams(location.search) };
}

/** Go to a URL of the page. @param {string} url */
export function go(url) {
  history.pushState(null, "", url);
  readPlace();
  scrollTo(0, 0);
  document.getElementById("content")?.focus({ preventScroll: true });
}

/** Change the query in place; empty values go. @param {Object<string, string>} changes */
export function setQuery(changes) {
  const query = new URLSearchParams(location.search);
  for (const [name, value] of Object.entries(changes)) value ? query.set(name, value) : query.delete(name);
  history.replaceState(null, "", location.pathname + (query.size ? `?${query}` : ""));
  readPlace();
}

/** @param {string} id @param {string} tab @param {Object<string, string>} query */
export function jobUrl(id, tab = "", query = {}) {
  const search = new URLSearchParams(Object.entries(query).filter(([, value]) => value)).toString();
  return `/jobs/${encodeURIComponent(id)}${tab ? `/${tab}` : ""}${search ? `?${search}` : ""}`;
}

/** @param {string} name */
export const nodeUrl = (name) => `/nodes/${encodeURIComponent(name)}`;

/** Let links of the page change the place without a load, unless the user wants another tab. */
export function followLinks() {
  addEventListener("popstate", readPlace);
  document.addEventListener("click", (event) => {
    /** @type {HTMLAnchorElement | null} */
    const link = event.target instanceof Element && event.target.closest("a[href]");
    const isPlain = !event.defaultPrevented && event.button === 0 && !(event.ctrlKey || event.metaKey || event.shiftKey || event.altKey);
    const isOurs = link && link.origin === location.origin && !link.target && !link.download && !link.hash;
    if (!isPlain || !isOurs || link.pathname.startsWith("/static/")) return;
    event.preventDefault();
    go(link.pathname + link.search);
  });
  readPlace();
}
