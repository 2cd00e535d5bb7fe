// The page's copy of what the gateway tells by `whole` and `changes`. Pure: nothing here knows of a browser.
import { stageOf } from "./states.js";

const WORKER = {
  name: "", role: "", rank: 0, local_rank: 0, node_rank: 0, incarnation: 0, state: "PENDING", node: "", address: "",
  pid: 0, devices: [], num_failures: 0, progress: null, log_file: "", reason: "", num_unread_errors: 0,
};
const NODE = {
  node: "", state: "ALIVE", hostname: "", address: "", resources: {}, free: {}, labels: {}, num_workers: 0,
  seen_s_ago: 0, reason: "", drained: null, num_leaving: 0, check: "",
};
const MAX_EVENTS = 2000;
const MAX_HISTORY = 240;

/** Rows by a key field, in an order that is kept while they change. */
export class Rows {
  /**
   * @param {string} key field that names a row
   * @param {any} defaults values of the columns that are left out
   * @param {(a: any, b: any) => number} compare order of the rows
   */
  constructor(key, defaults, compare) {
    this.key = key;
    this.defaults = defaults;
    this.compare = compare;
    this.clear();
  }

  clear() {
    /** @type {any[]} */
    this.list = [];
    this.place = new Map();
  }

  /** @param {string} name */
  get(name) {
    return this.list[this.place.get(name)];
  }

  /** Take in columns: a list of values a field, all equally long. @param {Object<string, any[]>} columns */
  apply(columns) {
    const fields = Object.keys(columns);
    const size = fields.length ? columns[fields[0]].length : 0;
    const known = this.list.length;
    for (let i = 0; i < size; i++) {
      const row = { ...this.defaults };
      for (const field of fields) row[field] = columns[field][i];
      const place = this.place.get(row[this.key]);
      if (place === undefined) {
        this.place.set(row[this.key], this.list.length);
        this.list.push(row);
      } else this.list[place] = row;
    }
    if (this.list.length !== known) this.sort();
  }

  /** @param {string[]} names */
  remove(names) {
    if (!names.length) return;
    const gone = new Set(names);
    this.list = this.list.filter((row) => !gone.has(row[this.key]));
    this.sort();
  }

  sort() {
    this.list.sort(this.compare);
    this.place = new Map(this.list.map((row, place) => [row[this.key], place]));
  }
}

/** The cluster, or one job of it, as of `version`. */
export class Mirror {
  constructor() {
    this.version = -1;
    this.at = 0;
    /** @type {Map<string, any>} */
    this.jobs = new Map();
    this.nodes = new Rows("node", NODE, (a, b) => compareNames(a.node, b.node));
    this.workers = new Rows("name", WORKER, (a, b) => this.compareWorkers(a, b));
    /** @type {any[]} oldest first */
    this.events = [];
    /** What needs attention, the urgent first, and how much of it there is. Of the whole cluster alone. */
    this.attention = { shown: [], total: 0, urgent: 0 };
    /** @type {Map<string, {at: number, step: number}[]>} median step of the first role that has one, by job */
    this.history = new Map();
  }

  compareWorkers(a, b) {
    if (a.role !== b.role) return (this.roles?.get(a.role) ?? 0) - (this.roles?.get(b.role) ?? 0) || compareNames(a.role, b.role);
    return a.rank - b.rank;
  }

  /** Take in an event of the stream. @param {any} body @param {boolean} isWhole */
  apply(body, isWhole) {
    if (isWhole) {
      this.jobs.clear();
      this.nodes.clear();
      this.workers.clear();
      this.events = [];
    }
    const jobs = body.jobs ?? (body.job ? [body.job] : []);
    if (body.job) this.roles = new Map(body.job.roles.map((role, place) => [role.name, place]));
    for (const id of body.gone_jobs ?? []) this.jobs.delete(id);
    for (const job of jobs) {
      this.jobs.set(job.job_id, job);
      this.remember(job, body.at);
    }
    this.nodes.remove(body.gone_nodes ?? []);
    this.nodes.apply(body.nodes ?? {});
    this.workers.apply(body.workers ?? {});
    this.addEvents(body.events ?? []);
    this.attention = body.attention ?? this.attention;
    this.version = body.version;
    this.at = body.at;
  }

  /** Add events, none twice, by their numbers. @param {any[]} events */
  addEvents(events) {
    if (!events.length) return;
    const known = new Set(this.events.map((event) => event.sequence));
    const fresh = events.filter((event) => !known.has(event.sequence));
    this.events = [...this.events, ...fresh].sort((a, b) => a.sequence - b.sequence).slice(-MAX_EVENTS);
  }

  remember(job, at) {
    const step = stepOf(job)?.median;
    if (step == null) return;
    const points = this.history.get(job.job_id) ?? [];
    const last = points.at(-1);
    if (!last || at > last.at) points.push({ at, step });
    if (points.length > MAX_HISTORY) points.shift();
    this.history.set(job.job_id, points);
  }
}

/** Names by the numbers in them: `node-2` before `node-10`. @param {string} a @param {string} b */
export const compareNames = new Intl.Collator("en", { numeric: true }).compare;

/** Return the step of the first role of a job that reports one, and its total. @param {any} job */
export function stepOf(job) {
  for (const role of job.roles) {
    const summary = job.summary?.[role.name];
    if (summary?.step) return { ...summary.step, total: summary.total ?? null, role: role.name };
  }
  return null;
}

/** Return steps a second over the last points, or null. @param {{at: number, step: number}[]} points */
export function rateOf(points) {
  if (!points || points.length < 2) return null;
  const last = points.at(-1);
  const first = points.findLast((point) => last.at - point.at >= 30) ?? points[0];
  const span = last.at - first.at;
  if (span <= 0 || last.step < first.step || (last.step === first.step && span < 30)) return null; // one step may take long
  return (last.step - first.step) / span;
}

/** Seconds of a job in each phase until `now`, as `TimeSpent.at` counts them: messages come with changes, not as time passes. */
export function secondsAt({ seconds, phase, since, stalls_at: stallsAt }, now) {
  const open = phase ? Math.max(0, now - since) : 0;
  const stalled = stallsAt == null ? 0 : Math.min(open, Math.max(0, now - stallsAt));
  const found = { ...seconds, stalled: (seconds.stalled ?? 0) + stalled };
  return phase ? { ...found, [phase]: (found[phase] ?? 0) + open - stalled } : found;
}

/** Seconds until a job is done, by the steps that were seen; null where that is not known. */
export function etaOf(job, points, now) {
  const step = stepOf(job);
  if (!step?.total || stageOf(job, now) !== "RUNNING") return null;
  const rate = rateOf(points) ?? (job.started_at && step.median / (now - job.started_at));
  return rate > 0 ? (step.total - step.median) / rate : null;
}
