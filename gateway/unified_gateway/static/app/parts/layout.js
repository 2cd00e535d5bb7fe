// What surrounds each page: navigation, the state of the connection, the scheme.
import { computed, signal, useEffect } from "../../vendor/vendor.js";
import { clock, duration } from "../format.js";
import { place } from "../router.js";
import { cluster, job, link, master, now } from "../stream.js";
import { html } from "../text.js";
import { Dialogs } from "./dialog.js";

const PAGES = [["overview", "/", "Overview"], ["jobs", "/jobs", "Jobs"], ["nodes", "/nodes", "Nodes"], ["datasets", "/datasets", "Datasets"], ["tasks", "/tasks", "Tasks"], ["logs", "/logs", "Logs"], ["about", "/about", "About"]];
const OWNER = { job: "jobs", node: "nodes" };
const LOST_S = 4;

const urgent = computed(() => cluster.value.mirror.attention.urgent);

export const scheme = signal(localStorage.getItem("scheme") ?? "auto");

/** Colours of the canvases come from the style sheet: this changes when they do. */
export const look = signal(0);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => look.value++);

export function applyScheme() {
  const { dataset } = document.documentElement;
  if (scheme.value === "auto") delete dataset.scheme;
  else dataset.scheme = scheme.value;
  look.value++;
}

function switchScheme() {
  scheme.value = { auto: "light", light: "dark", dark: "auto" }[scheme.value];
  localStorage.setItem("scheme", scheme.value);
  applyScheme();
}

const probes = new Map();

/** The colour of a variable of the style sheet, as a canvas takes it. @param {string} name without dashes */
export function colour(name) {
  const key = `${look.value} ${name}`;
  if (!probes.has(key)) {
    const probe = document.createElement("i");
    probe.style.color = `var(--${name})`;
    document.body.append(probe);
    probes.set(key, getComputedStyle(probe).color);
    probe.remove();
  }
  return probes.get(key);
}

function Connection() {
  const { mirror } = place.value.page === "job" ? job.value : cluster.value;
  const isLive = link.value.state === "live" && master.value.up;
  const title = mirror.version < 0 ? "nothing was told yet" : `state of ${clock(mirror.at)}`;
  return html`<span class="connection tone-${isLive ? "good" : "warn"}" title=${title}>${isLive ? "live" : link.value.state === "live" ? "master down" : link.value.state}</span>`;
}

function Banner() {
  const { mirror } = place.value.page === "job" ? job.value : cluster.value;
  const told = mirror.version < 0 ? "" : ` You see the state of ${clock(mirror.at)}.`;
  if (!master.value.up) {
    return html`<div class="banner tone-bad" role="alert"><b>The master is down</b> since ${clock(master.value.since)}, for ${duration(now.value - master.value.since)}.${told} <span class="muted">${master.value.reason}</span></div>`;
  }
  const silent = now.value - link.value.since;
  if (link.value.state === "lost" && silent > LOST_S) {
    return html`<div class="banner tone-warn" role="alert"><b>No connection to the gateway</b> for ${duration(silent)}.${told} The page connects again by itself.</div>`;
  }
  return null;
}

export function Layout({ children }) {
  const current = OWNER[place.value.page] ?? place.value.page;
  useEffect(() => document.querySelector(".top nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" }), [current, urgent.value > 0]);
  return html`
    <a class="skip" href="#content">Skip to the content</a>
    <header class="top">
      <a class="brand" href="/" aria-label="Unified, overview"><svg viewBox="0 0 16 16" aria-hidden="true"><rect width="16" height="16" rx="3" /><path d="M4.5 4v4.5a3.5 3.5 0 0 0 7 0V4" /></svg>Unified</a>
      <nav aria-label="Pages">${PAGES.map(([page, url, title]) => html`<a key=${page} href=${url} aria-current=${page === current ? "page" : undefined}>${title}${page === "overview" && urgent.value > 0 && html`<b class="urgent" title="${urgent.value} need attention">${urgent.value}</b>`}</a>`)}</nav>
      <div class="top-end"><${Connection} />
        <button type="button" class="quiet" aria-label="colour scheme: ${scheme.value}" title="colour scheme: ${scheme.value}" onClick=${switchScheme}>${{ auto: "◐", light: "☀", dark: "☾" }[scheme.value]}</button></div>
    </header>
    <${Banner} />
    <main id="content" tabindex="-1">${children}</main>
    <${Dialogs} />`;
}
