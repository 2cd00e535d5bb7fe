// The live connection: one EventSource a tab, closed while the tab is hidden, and back by itself.
import { signal } from "../vendor/vendor.js";
import { Mirror } from "./mirror.js";
import { call, session } from "./session.js";
import { stageOf } from "./states.js";

const MAX_DELAY_S = 8;
const SILENT_S = 10;

/** The cluster, and the job that is looked at; a new object with each change. */
export const cluster = signal({ mirror: new Mirror(), id: "" });
export const job = signal({ mirror: new Mirror(), id: "" });
/** `state`: connecting, live or lost. */
export const link = signal({ state: "connecting", since: Date.now() / 1000 });
export const master = signal({ up: true, since: 0, reason: "" });
/** The master's clock, which ticks each second. */
export const now = signal(Date.now() / 1000);
/** @param {any} job */
export const stageNow = (job) => stageOf(job, now.value);

let source = null;
let watched = "";
let retry = 0;
let silence = 0;
let delay_s = 1;
let clockOffset = 0;
let polls = false; // a proxy on the way holds answers back until they end: each ends once it has told something

/** Watch the cluster, or one job. @param {string} id the job's id; empty for the cluster */
export function watch(id) {
  if (source && id === watched) return;
  watched = id;
  if (id && job.peek().id !== id) job.value = { mirror: new Mirror(), id };
  connect();
}

export function endStream() {
  clearTimeout(retry);
  clearTimeout(silence);
  source?.close();
  source = null;
}

function connect() {
  endStream();
  if (document.hidden || !session.peek()) return;
  const opened = new EventSource(`/page/stream?${new URLSearchParams({ job: watched, poll: polls ? "1" : "" })}`);
  source = opened;
  const id = watched;
  silence = setTimeout(() => {
    polls = true;
    connect();
  }, SILENT_S * 1000);
  let isDown = false; // a new stream tells of a master that is down before all else, and nothing of one that is up
  opened.addEventListener("whole", (event) => {
    if (!isDown) master.value = { up: true, since: 0, reason: "" };
    take(id, JSON.parse(event.data), true);
  });
  opened.addEventListener("changes", (event) => take(id, JSON.parse(event.data), false));
  opened.addEventListener("master", (event) => {
    clearTimeout(silence);
    setLink("live");
    const told = JSON.parse(event.data);
    isDown = !told.up;
    master.value = { up: told.up, since: told.since ?? 0, reason: told.reason ?? "" };
  });
  opened.onopen = () => setLink("live");
  opened.onerror = () => {
    isDown = false;
    clearTimeout(silence);
    setLink("lost");
    // a refused connection is tried again by the browser, a refusal in words by nobody
    if (opened.readyState === EventSource.CLOSED) tryLater();
  };
}

async function tryLater() {
  endStream();
  await call("/session").catch(() => {}); // a session that is over leads to the page that says so
  if (!session.value) return;
  retry = setTimeout(connect, delay_s * 1000);
  delay_s = Math.min(delay_s * 2, MAX_DELAY_S);
}

function setLink(state) {
  if (state === "live") delay_s = 1;
  if (link.peek().state !== state) link.value = { state, since: now.peek() };
}

function take(id, body, isWhole) {
  clearTimeout(silence);
  setLink("live");
  clockOffset = body.at - Date.now() / 1000;
  const target = id ? job : cluster;
  if (id && job.value.id !== id) return;
  const { mirror } = target.value;
  mirror.apply(body, isWhole);
  target.value = { mirror, id };
}

/** The tab is hidden: no connection. It is seen again: a new one, which is told what has changed. */
export function followVisibility() {
  document.addEventListener("visibilitychange", () => (document.hidden ? endStream() : connect()));
  addEventListener("pagehide", endStream);
  addEventListener("pageshow", (event) => event.persisted && connect());
  setInterval(() => {
    if (!document.hidden) now.value = Date.now() / 1000 + clockOffset;
  }, 1000);
}

/** Call `ask` at once and then each `period_s` while the tab is seen; returns the function that ends it. */
export function poll(ask, period_s) {
  let timer = 0;
  let isOver = false;
  const step = async () => {
    if (!document.hidden) await ask();
    if (!isOver) timer = setTimeout(step, period_s * 1000);
  };
  step();
  return () => {
    isOver = true;
    clearTimeout(timer);
  };
}
