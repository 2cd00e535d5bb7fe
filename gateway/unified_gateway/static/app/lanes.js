// Lanes of a timeline from the events of a job: incarnations, rounds, and what happened. Pure.
import { compareNames } from "./mirror.js";

const ENDS = /^worker-(failed|lost|left|exited|replaced|killed|finished)$/;
const MAX_MARKS = 400;

/**
 * @typedef {{start: number, end: number, tone: string, label: string}} Span
 * @typedef {{name: string, role: string, node: string, spans: Span[], marks: {at: number, event: string, text: string, tone: string}[]}} Lane
 * @param {any[]} events oldest first @param {number} end time at which what has not ended is cut
 * @param {string} by worker or node @param {(worker: string) => string} titleOf
 * @returns {{lanes: Lane[], start: number, end: number}} the job first, then roles, then workers or nodes
 */
export function lanesOf(events, end, by, titleOf = (name) => name) {
  const lanes = new Map();
  const lane = (kind, name, role = "", node = "") => {
    const key = `${kind} ${name}`;
    if (!lanes.has(key)) lanes.set(key, { kind, name: kind === "worker" ? titleOf(name) : name, role, node, spans: [], marks: [] });
    return lanes.get(key);
  };
  const close = (spans, at, tone) => {
    const open = spans.at(-1);
    if (open && open.end === Infinity) Object.assign(open, { end: at, ...(tone && { tone }) });
  };
  for (const event of events) {
    const { at, event: word, reason, role, worker, node } = event;
    const job = lane("job", "job");
    const tone = /failed|lost|diagnosed|excluded/.test(word) ? "bad" : /complete|sealed|running/.test(word) ? "good" : "warn";
    const mark = { at, event: word, text: reason, tone };
    if (worker && word === "worker-starts") {
      const owner = by === "node" ? lane("node", node) : lane("worker", worker, role, node);
      const started = { start: at, end: Infinity, tone: "run", label: `${worker} ${reason}`, worker };
      if (by === "node") owner.spans.push(started);
      else {
        close(owner.spans, at);
        owner.spans.push(started);
      }
      owner.node = node || owner.node;
    } else if (worker && ENDS.test(word)) {
      const owner = by === "node" ? lane("node", node) : lane("worker", worker, role, node);
      const open = by === "node" ? owner.spans.findLast((span) => span.worker === worker && span.end === Infinity) : owner.spans.at(-1);
      if (open?.end === Infinity) Object.assign(open, { end: at, tone: word === "worker-finished" ? "done" : "failed" });
      if (word !== "worker-exited") owner.marks.push(mark);
    } else if (word === "round-sealed") {
      const owner = lane("role", role);
      close(owner.spans, at);
      owner.spans.push({ start: at, end: Infinity, tone: "round", label: reason, short: reason.split(" of ")[0] });
    } else if (/^(job|role)-(restarts|placed|stops|suspended)$/.test(word)) {
      for (const each of lanes.values()) if (word !== "job-placed" && (each.kind === "role" || each.kind === "worker") && (!role || each.role === role || each.name === role)) close(each.spans, at);
      if (word !== "job-placed") close(job.spans, at);
      job.marks.push(mark);
    } else if (word === "job-running") {
      close(job.spans, at);
      job.spans.push({ start: at, end: Infinity, tone: "run", label: "running" });
    } else if (word === "job-stopped") {
      for (const each of lanes.values()) for (const span of each.spans) if (span.end === Infinity) span.end = at;
      job.marks.push(mark);
    } else if (!/^(store-|round-changes|job-ready|worker-)/.test(word)) job.marks.push(mark);
  }
  const all = [...lanes.values()];
  for (const { spans, marks } of all) {
    for (const span of spans) span.end = Math.min(span.end, Math.max(end, span.start));
    marks.splice(0, Math.max(0, marks.length - MAX_MARKS));
  }
  const rank = { job: 0, role: 1, node: 2, worker: 2 };
  const trouble = (each) => (each.marks.some((mark) => mark.tone === "bad") ? 0 : 1);
  all.sort((a, b) => rank[a.kind] - rank[b.kind] || (a.kind === "worker" ? trouble(a) - trouble(b) : 0) || compareNames(a.name, b.name));
  return { lanes: all, start: events[0]?.at ?? end, end };
}

/** The same for Perfetto: Chrome's trace format. @param {Lane[]} lanes */
export function traceOf(lanes) {
  const traceEvents = lanes.flatMap((lane, tid) => [
    { ph: "M", pid: 1, tid, name: "thread_name", args: { name: lane.name } },
    ...lane.spans.map((span) => ({ ph: "X", pid: 1, tid, ts: span.start * 1e6, dur: (span.end - span.start) * 1e6, name: span.label })),
    ...lane.marks.map((mark) => ({ ph: "i", s: "t", pid: 1, tid, ts: mark.at * 1e6, name: mark.event, args: { reason: mark.text } })),
  ]);
  return { displayTimeUnit: "ms", traceEvents };
}
