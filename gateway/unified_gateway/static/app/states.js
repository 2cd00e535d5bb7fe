// States in a word, a letter and a tone. A tone is the name of a colour in style.css. Pure.

/** Letter and tone of each state of a worker. */
export const WORKER_STATES = {
  FAILED: { letter: "F", tone: "bad" },
  PENDING: { letter: "P", tone: "idle" },
  STARTING: { letter: "S", tone: "busy" },
  READY: { letter: "Y", tone: "busy" },
  RUNNING: { letter: "R", tone: "good" },
  SERVING: { letter: "V", tone: "good" },
  FINISHED: { letter: "D", tone: "done" },
  STOPPING: { letter: "T", tone: "warn" },
  EXITED: { letter: "E", tone: "idle" },
  UNSTARTED: { letter: "U", tone: "idle" },
};

const STAGES = {
  INIT: "idle", READY: "busy", RUNNING: "good", STOPPING: "warn", FINISHED: "done", STOPPED: "idle", FAILED: "bad",
  RESTARTING: "warn", STALLED: "bad", SUSPENDED: "idle", WAITING: "warn", ALIVE: "good", LOST: "bad", DRAINING: "warn", DRAINED: "idle",
};

/** @param {string} state of a worker, a job or a node */
export const toneOf = (state) => WORKER_STATES[state]?.tone ?? STAGES[state] ?? "idle";

/** The state of a worker as the page shows it. @param {any} worker @param {any} [job] */
export function stateOf(worker, job) {
  if (job && isFailed(job) && job.end?.worker === worker.name) return "FAILED";
  const isOver = job && (job.stage === "STOPPING" || job.stage === "STOPPED");
  return isOver && worker.state === "PENDING" ? "UNSTARTED" : worker.state;
}

const STOPPED_BY_USER = 130;

/** @param {any} job */
export const isFailed = (job) => {
  const code = job.exit_code ?? job.outcome;
  return code != null && code !== 0 && code !== STOPPED_BY_USER;
};

/** @param {any} job */
export const isOver = (job) => job.stage === "STOPPED";

/** Time of the last step of a job that is stalled at `now`, as `TimeSpent.stalled_since` has it; null: it is not. */
export function stalledSince({ times }, now) {
  const isStalled = times && (times.phase === "stalled" || (times.stalls_at != null && now >= times.stalls_at));
  return isStalled ? times.since : null;
}

/** The stage of a job in one word, as `unified status` has it, and how it ended. @param {any} job @param {number} now the master's clock */
export function stageOf(job, now) {
  if (isOver(job)) return isFailed(job) ? "FAILED" : job.exit_code === 0 ? "FINISHED" : "STOPPED";
  if (stalledSince(job, now) != null) return "STALLED";
  if (job.stage !== "INIT") return job.stage;
  if (job.suspended != null) return "SUSPENDED";
  if (job.num_restarts || job.roles.some((role) => role.num_restarts)) return "RESTARTING";
  return waitsForRoom(job) ? "WAITING" : "INIT";
}

/** Whether a job is in the queue, as `report.queue_text` has it. @param {any} job */
export const waitsForRoom = (job) => job.stage === "INIT" && job.suspended == null && job.reason.startsWith("waits");

/** @param {any} node */
export function nodeStateOf(node) {
  if (node.state === "LOST") return "LOST";
  if (node.drained == null) return "ALIVE";
  return node.num_workers || node.num_leaving ? "DRAINING" : "DRAINED";
}

/** `trainer-0`. @param {any} worker */
export const shortName = (worker) => `${worker.role}-${worker.rank}`;

/** The queues of a job, each with the workers that have waited there for seconds. @param {any[]} workers */
export function queuesOf(workers) {
  const waits = (wanted, does) => workers.filter(({ progress }) => progress?.queues?.some(([, did, queue, isLong]) => isLong && did === does && queue === wanted)).map(shortName);
  return workers.filter(({ state }) => state !== "EXITED").flatMap((owner) => Object.entries(owner.progress?.load?.queues ?? {}).map(([name, [depth, size, oldestAt]]) => (
    { name, owner: shortName(owner), depth, size, oldestAt, getters: waits(name, "gets"), putters: waits(name, "puts") })));
}

/** @type {[RegExp, string][]} */
const EVENT_TONES = [
  [/failed|lost|excluded|diagnosed|damaged|refused|given-up/, "bad"],
  [/restart|hang-suspected|queue-cycle$|replaced|killed|broken|waits|drained|suspended|slow|stops|left|silent/, "warn"],
  [/running|sealed|complete|joined|placed|ready|resumed|readmitted|(hang|cycle)-over|finished/, "good"],
];

/** @param {string} event short word of an event */
export const eventTone = (event) => EVENT_TONES.find(([pattern]) => pattern.test(event))?.[1] ?? "idle";
