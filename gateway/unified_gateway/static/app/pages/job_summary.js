// A job at a glance: why it failed, where its time went, its roles, and a cell for each worker.
import { clock, count, duration, firstLine, number } from "../format.js";
import { go, jobUrl, place, setQuery } from "../router.js";
import { isFailed, queuesOf, shortName, stateOf, WORKER_STATES } from "../states.js";
import { now } from "../stream.js";
import { html } from "../text.js";
import { Bar, Card, Command, Empty, Facts, Select, TimeBar } from "../parts/bits.js";
import { Grid, levelColour } from "../parts/grid.js";
import { Plain } from "./datasets.js";

const MAX_METRICS = 40;
const MAX_WAITING = 4;

export function JobSummary({ job, mirror }) {
  return html`
    ${job.end && isFailed(job) && html`<${RootCause} job=${job} mirror=${mirror} />`}
    ${job.times && html`<${Card} title="Where the time went"><${TimeBar} times=${job.times} /><//>`}
    <${Card} title="Roles"><${Roles} job=${job} /><//>
    <${Queues} queues=${queuesOf(mirror.workers.list)} />
    <${Workers} job=${job} mirror=${mirror} />
    <div class="halves">
      <${Card} title="Limits"><${Budgets} job=${job} /><//>
      <${Card} title="About this job"><${Facts} rows=${[
        ["submitted", clock(job.submitted_at)], ["started", job.started_at && clock(job.started_at)], ["ended", job.ended_at && clock(job.ended_at)],
        ["submitted by", job.submitted_by], ["workers", number(job.num_workers)], ["restarts", job.num_restarts], ["suspended", job.suspended],
        ...Object.entries(job.labels ?? {}).map(([name, value]) => [`label ${name}`, value]),
      ]} /><//>
    </div>`;
}

function RootCause({ job, mirror }) {
  const { worker, incarnation, node, failure, limit, log_file: file } = job.end;
  const { evidence } = failure;
  const first = mirror.workers.get(worker);
  const others = mirror.workers.list.filter((each) => each.state === "EXITED" && each.name !== worker).length;
  const memory = evidence?.memory?.length ? `${evidence.peak_mb ? `${number(evidence.peak_mb)} MB at most; ` : ""}${evidence.memory.map(([, mb]) => Math.round(mb)).join(", ")} MB in the seconds before` : "";
  return html`<section class="card root-cause" aria-label="Root cause">
    <header class="card-head"><h2><span class="state tone-bad">root cause</span> ${first ? shortName(first) : worker} on ${node || "no node"}</h2><div class="card-aside">incarnation ${incarnation}</div></header>
    <p class="failure">${failure.summary}</p>
    <${Facts} rows=${[
      ["kind", failure.category], ["signal", failure.signal], ["exit code", failure.exit_code], ["worker", worker], ["limit", limit], ["memory", memory],
      ["out of memory", evidence?.out_of_memory || evidence?.out_of_memory_here], ["killed for", evidence?.killed_for],
      ["others", others ? `${count(others, "other worker")} ended with it: collateral, not the cause` : ""],
    ]} />
    ${failure.traceback && html`<pre class="traceback" tabindex="0" aria-label="traceback">${failure.traceback.trimEnd().split("\n").slice(-30).join("\n")}</pre>`}
    <div class="links"><a class="button" href=${jobUrl(job.job_id, "logs", { worker, incarnation: String(incarnation) })}>its log</a><a class="button" href=${jobUrl(job.job_id, "why", { worker })}>decisions about it</a>
      ${file && html`<code class="clip" title=${file}>${file}</code>`}</div>
    <${Command} text="unified explain ${job.job_id}" />
  </section>`;
}

const Roles = ({ job }) => html`<div class="roles" role="table" aria-label="roles">
  <div role="row" class="role-row head"><span role="columnheader">Role</span><span role="columnheader">Workers</span><span role="columnheader">Step, slowest to fastest</span><span role="columnheader">Round</span><span role="columnheader">Restarts</span><span role="columnheader">Reported</span></div>
  ${job.roles.map((role) => {
    const summary = job.summary?.[role.name] ?? {};
    const { step, total } = summary;
    return html`<div role="row" class="role-row" key=${role.name}>
      <span role="cell"><b>${role.name}</b> <span class="muted">${role.kind}</span></span>
      <span role="cell" class="chips">${Object.entries(summary.states ?? {}).map(([state, size]) => html`<span key=${state} class="state tone-${WORKER_STATES[state]?.tone ?? "idle"}">${number(size)} ${state}</span>`)}</span>
      <span role="cell">${step ? html`<span class="numbers">${number(step.slowest)} · <b>${number(step.median)}</b> · ${number(step.fastest)}${total ? ` of ${number(total)}` : ""}</span>${total && html`<${Bar} value=${step.median} total=${total} label="progress of ${role.name}" />`}` : html`<span class="muted">-</span>`}</span>
      <span role="cell" class="numbers" data-label="round ">${role.round || "-"}</span><span role="cell" class="numbers" data-label="restarts ">${role.num_restarts || "-"}</span>
      <span role="cell" class="numbers muted">${Object.entries(summary.metrics ?? {}).slice(0, 6).map(([name, value]) => `${name}\u00a0${number(value)}`).join("   ")}</span></div>`;
  })}</div>`;

const listed = (names) => `${names.slice(0, MAX_WAITING).join(", ")}${names.length > MAX_WAITING ? ` and ${names.length - MAX_WAITING} more` : ""}`;

/** Who waits in a queue, and for what. @param {any} queue */
export const waitsText = ({ name, getters, putters }) => [getters.length && `${listed(getters)} for an item of ${name}`, putters.length && `${listed(putters)} for room in ${name}`].filter(Boolean).join("; ");

const Queues = ({ queues }) => queues.length > 0 && html`<${Card} title="Queues"><${Plain} label="queues" rows=${queues} columns=${[
  ["Queue", (row) => html`<b>${row.name}</b> <span class="muted">of ${row.owner}</span>`],
  ["Waiting", (row) => waitsText(row) || "-"],
  ["Items", (row) => html`<${Bar} value=${row.depth} total=${row.size} label="items in ${row.name}" /> <span class="numbers">${number(row.depth)} of ${number(row.size)}</span>`],
  ["Oldest", (row) => (row.oldestAt ? duration(now.value - row.oldestAt) : "-")]]} /><//>`;

function Workers({ job, mirror }) {
  const workers = mirror.workers.list;
  const by = place.value.query.get("by") || "state";
  const names = new Set();
  for (const { progress } of workers.slice(0, 50)) for (const [name, value] of Object.entries(progress?.metrics ?? {})) if (typeof value === "number") names.add(name);
  const options = [["state", "state"], ["lag", "step lag"], ["failures", "failures"], ...[...names].slice(0, MAX_METRICS).map((name) => [`metric ${name}`, name])];
  const groups = job.roles.map((role) => ({ title: `${role.name}, ${number(role.total)}`, items: workers.filter((worker) => worker.role === role.name) })).filter((group) => group.items.length);
  const scale = by === "state" ? null : scaleOf(workers, by);
  const lookOf = scale ? scale.lookOf : (worker) => WORKER_STATES[stateOf(worker, job)] ?? { tone: "idle", letter: "?" };
  const describe = (worker) => html`<b>${shortName(worker)}</b> ${stateOf(worker, job)}${worker.incarnation ? `, incarnation ${worker.incarnation}` : ""}<br />
    ${worker.node || "no node"}${worker.devices?.length ? `, device ${worker.devices.join(", ")}` : ""}${worker.progress?.step != null ? html`<br />step ${number(worker.progress.step)}` : ""}
    ${Object.entries(worker.progress?.metrics ?? {}).slice(0, 8).map(([name, value]) => html`<br />${name} ${number(value)}`)}
    ${worker.reason && html`<br /><span class="muted">${firstLine(worker.reason).slice(0, 160)}</span>`}`;
  return html`<${Card} title="Workers" aside=${html`<${Select} label="colour by" value=${by} options=${options} onPick=${(value) => setQuery({ by: value === "state" ? "" : value })} />`}>
    ${workers.length ? html`<${Grid} label="workers by ${by.replace("metric ", "")}" groups=${groups} keyOf=${(worker) => worker.name} lookOf=${lookOf} describe=${describe}
      summarise=${(worker) => `${shortName(worker)}, ${stateOf(worker, job)}, step ${worker.progress?.step ?? "none"}`} onOpen=${(worker) => go(jobUrl(job.job_id, "workers", { worker: worker.name }))} />
      ${scale ? html`<${ScaleLegend} scale=${scale} />` : html`<${StateLegend} workers=${workers} job=${job} />`}`
    : html`<${Empty} text="It has no workers yet." command="unified explain ${job.job_id}" />`}<//>`;
}

/** Levels 0 to 9 of a number of each worker; the letter of a cell is its level. */
function scaleOf(workers, by) {
  const top = by === "lag" ? Math.max(...workers.map((worker) => worker.progress?.step ?? -Infinity)) : 0;
  const valueOf = (worker) => {
    if (by === "failures") return worker.num_failures;
    if (by === "lag") return worker.progress?.step == null ? null : top - worker.progress.step;
    const value = worker.progress?.metrics?.[by.slice("metric ".length)];
    return typeof value === "number" ? value : null;
  };
  let [low, high] = by.startsWith("metric ") ? [Infinity, -Infinity] : [0, 9];
  for (const worker of workers) {
    const value = valueOf(worker);
    if (value == null) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  const lookOf = (worker) => {
    const value = valueOf(worker);
    if (value == null) return { tone: "idle", letter: "·" };
    const level = high > low ? Math.min(9, Math.floor((10 * (value - low)) / (high - low + (by.startsWith("metric ") ? 0 : 1)))) : 0;
    return { level, letter: String(level) };
  };
  return { low, high, lookOf };
}

const ScaleLegend = ({ scale }) => html`<ul class="legend"><li>0 is ${number(scale.low)}</li><li class="ramp" aria-hidden="true">${[...Array(10).keys()].map((level) => html`<i key=${level} style=${{ background: levelColour(level) }}></i>`)}</li><li>9 is ${number(scale.high)}</li><li class="muted">· nothing reported</li></ul>`;

function StateLegend({ workers, job }) {
  const counts = new Map();
  for (const worker of workers) counts.set(stateOf(worker, job), (counts.get(stateOf(worker, job)) ?? 0) + 1);
  return html`<ul class="legend">${Object.entries(WORKER_STATES).filter(([state]) => counts.has(state)).map(([state, { letter, tone }]) => html`
    <li key=${state}><i class="cell cell-${tone}">${letter}</i>${state === "FAILED" ? "root cause" : state} <b>${number(counts.get(state))}</b></li>`)}</ul>`;
}

const Budgets = ({ job }) => job.budgets?.length ? html`<ul class="budgets">${job.budgets.slice(0, 12).map((budget) => html`
  <li key=${`${budget.limit} ${budget.subject}`}><span>${budget.limit}</span><span class="muted clip">${budget.subject || "the job"}</span>
    <${Bar} value=${budget.used} total=${budget.allowed} label="${budget.limit} ${budget.subject}" /><span class="numbers ${budget.used >= budget.allowed ? "tone-bad" : ""}">${budget.used}, ${budget.allowed} allowed</span></li>`)}</ul>
  ${job.budgets.length > 12 && html`<p class="note muted">and ${job.budgets.length - 12} more: unified status ${job.job_id}</p>`}`
  : html`<p class="note muted">No restart limit was charged.${job.started_at ? ` Running for ${duration((job.ended_at ?? Date.now() / 1000) - job.started_at)}.` : ""}</p>`;
