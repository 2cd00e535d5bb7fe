// The first page: what is wrong and where, then what runs.
import { clock, count, duration, firstLine, number, roughly } from "../format.js";
import { etaOf, rateOf, stepOf } from "../mirror.js";
import { go, jobUrl, nodeUrl } from "../router.js";
import { eventTone, isFailed, isOver, nodeStateOf, stalledSince, waitsForRoom } from "../states.js";
import { cluster, now, stageNow } from "../stream.js";
import { html } from "../text.js";
import { Bar, Card, Empty, Spark, State, TimeBar } from "../parts/bits.js";
import { Grid } from "../parts/grid.js";

const MAX_CARDS = 12;
const DAY_S = 86400;
const NODE_LETTERS = { ALIVE: ["good", "A"], LOST: ["bad", "L"], DRAINING: ["warn", "D"], DRAINED: ["idle", "D"] };

export function Overview() {
  const { mirror } = cluster.value;
  if (mirror.version < 0) return html`<p class="loading">Waiting for the first state of the cluster …</p>`;
  const jobs = [...mirror.jobs.values()];
  const open = jobs.filter((job) => !isOver(job)).sort((a, b) => a.submitted_at - b.submitted_at);
  const isHeld = (job) => waitsForRoom(job) || stageNow(job) === "SUSPENDED";
  const running = open.filter((job) => !isHeld(job));
  const held = open.filter(isHeld).sort((a, b) => Number(waitsForRoom(b)) - Number(waitsForRoom(a)));
  return html`
    <h1 class="hidden">Overview</h1>
    <${Strip} mirror=${mirror} jobs=${jobs} />
    <${Attention} />
    <${Card} title="Running jobs" aside=${html`<a href="/jobs">all ${number(jobs.length)} jobs</a>`}>
      ${running.length ? html`<div class="job-list">${running.slice(0, MAX_CARDS).map((job) => html`<${JobLine} key=${job.job_id} job=${job} />`)}</div>`
        : html`<${Empty} text="No job runs." command="unified run --nproc-per-node 2 train.py" />`}
      ${running.length > MAX_CARDS && html`<p class="note"><a href="/jobs">${running.length - MAX_CARDS} more</a></p>`}
    <//>
    ${held.length > 0 && html`<${Card} title="Waiting jobs" aside="the oldest first">
      <div class="job-list">${held.slice(0, MAX_CARDS).map((job, index) => html`<${JobLine} key=${job.job_id} job=${job} place=${waitsForRoom(job) ? `number ${index + 1} in the queue, ` : ""} />`)}</div>
      ${held.length > MAX_CARDS && html`<p class="note"><a href="/jobs">${held.length - MAX_CARDS} more</a></p>`}<//>`}
    <div class="halves">
      <${Card} title="Nodes" aside=${html`<a href="/nodes">table</a>`}><${NodeGrid} nodes=${mirror.nodes.list} /><//>
      <${Card} title="Last decisions"><${Decisions} events=${mirror.events.slice(-14).reverse()} /><//>
    </div>`;
}

function Strip({ mirror, jobs }) {
  const nodes = mirror.nodes.list;
  const states = counted(nodes.map(nodeStateOf));
  const devices = nodes.filter((node) => node.state === "ALIVE").map((node) => [node.resources.devices?.length ?? 0, node.free.devices?.length ?? 0]);
  const total = devices.reduce((sum, [all]) => sum + all, 0);
  const free = devices.reduce((sum, [, left]) => sum + left, 0);
  const stages = counted(jobs.map(stageNow));
  const said = (counts, names) => names.filter((name) => counts[name]).map((name) => `${counts[name]} ${name.toLowerCase()}`).join(", ");
  const alive = jobs.filter((job) => !isOver(job));
  const workers = alive.reduce((sum, job) => sum + job.num_workers, 0);
  const busy = alive.flatMap((job) => Object.values(job.summary ?? {})).reduce((sum, { states }) => sum + (states?.RUNNING ?? 0) + (states?.SERVING ?? 0), 0);
  const failed = jobs.filter((job) => isFailed(job) && isOver(job) && now.value - job.ended_at < DAY_S).length;
  return html`<section class="strip" aria-label="The cluster at a glance">
    <${Figure} title="Nodes" value=${states.ALIVE ?? 0} of=${nodes.length} tone=${states.LOST ? "bad" : ""} note=${said(states, ["LOST", "DRAINING", "DRAINED"]) || "all alive"} />
    <${Figure} title="Devices held" value=${total - free} of=${total} note="${number(free)} free" />
    <${Figure} title="Jobs" value=${alive.length} note=${said(stages, ["RUNNING", "STALLED", "WAITING", "RESTARTING", "SUSPENDED", "INIT", "READY", "STOPPING"]) || "none runs"} />
    <${Figure} title="Workers" value=${busy} of=${workers} note="run, of all that jobs want" />
    <${Figure} title="Failed in 24 h" value=${failed} tone=${failed ? "bad" : ""} note="ever: ${said(stages, ["FAILED", "FINISHED", "STOPPED"]) || "no job has ended"}" />
  </section>`;
}

const Figure = ({ title, value, of, note, tone }) => html`<div class="figure ${tone ? `tone-${tone}` : ""}"><span>${title}</span><b>${number(value)}${of != null && html`<small> / ${number(of)}</small>`}</b><em>${note}</em></div>`;

export function counted(names) {
  const counts = {};
  for (const name of names) counts[name] = (counts[name] ?? 0) + 1;
  return counts;
}

/** Tab of a job where one looks first. */
const TABS = { "may hang": "stacks", restarting: "why", waiting: "why", "checkpoint late": "data", "save waits": "data" };

function Attention() {
  const { shown, total } = cluster.value.mirror.attention;
  const ageOf = ({ what, since }) => since == null ? "" : what === "failed" ? `${roughly(now.value - since)} ago: ` : `for ${duration(now.value - since)}: `;
  return html`<section class="card attention" aria-label="Needs attention">
    <header class="card-head"><h2>Needs attention</h2><div class="card-aside">${total > shown.length ? `the first ${shown.length} of ${number(total)}` : total || ""}</div></header>
    <ul aria-live="polite">${total ? shown.map((item) => html`
      <li key=${item.what + item.subject + item.text}><a href=${item.is_node ? nodeUrl(item.subject) : jobUrl(item.subject, TABS[item.what])}>
        <span class="state tone-${item.is_urgent ? "bad" : "warn"}">${item.what}</span><b>${item.subject}</b><span>${ageOf(item)}${item.text}</span></a></li>`)
    : html`<li class="calm"><span class="state tone-good">nothing</span> All jobs go on, and all nodes answer.</li>`}</ul></section>`;
}

function JobLine({ job, place = "" }) {
  const points = cluster.value.mirror.history.get(job.job_id) ?? [];
  const step = stepOf(job);
  const stalled = stalledSince(job, now.value);
  const rate = stalled == null ? rateOf(points) : null;
  const eta = etaOf(job, points, now.value);
  const metrics = Object.entries(Object.values(job.summary ?? {}).find((role) => Object.keys(role.metrics ?? {}).length)?.metrics ?? {}).slice(0, 3);
  return html`<article class="job-line" aria-label=${job.job_id}>
    <div class="job-name"><a href=${jobUrl(job.job_id)}>${job.job_id}</a><${State} state=${stageNow(job)} /></div>
    <div class="job-step ${step ? "" : "wide"}">${step ? html`<${Bar} value=${step.median} total=${step.total ?? step.median} label="progress of ${job.job_id}" />
      <span class="numbers">step ${number(step.median)}${step.total ? ` / ${number(step.total)}` : ""}</span>` : html`<span class="muted clip" title=${job.reason}>${place}${firstLine(job.reason)}</span>`}</div>
    ${step && html`<div class="job-rate"><${Spark} values=${ratesOf(points)} label="steps a second over the last minutes" /><span class="numbers">${rate == null ? "" : `${number(Number(rate.toPrecision(3)))} steps/s`}</span></div>
    <div class="numbers muted">${metrics.map(([name, value]) => `${name}\u00a0${number(value)}`).join("  ")}</div>`}
    <div class="numbers job-eta">${stalled != null ? html`no step for <b>${roughly(now.value - stalled)}</b>` : eta == null ? duration(now.value - job.submitted_at) : html`<b>${roughly(eta)}</b> left`}</div>
    ${job.times ? html`<${TimeBar} times=${job.times} isShort />` : html`<span></span>`}
  </article>`;
}

export const ratesOf = (points) => points.slice(1).map((point, index) => Math.max(0, (point.step - points[index].step) / (point.at - points[index].at))).slice(-60);

function NodeGrid({ nodes }) {
  if (!nodes.length) return html`<${Empty} text="No node has joined." command="unified-agent --master HOST:PORT" />`;
  const describe = (node) => html`<b>${node.node}</b> ${nodeStateOf(node)}<br />${count(node.num_workers, "worker")}, ${node.free.devices?.length ?? 0} of ${node.resources.devices?.length ?? 0} devices free${node.reason && html`<br />${node.reason}`}`;
  return html`<${Grid} label="nodes" groups=${[{ title: Object.entries(counted(nodes.map(nodeStateOf))).map(([state, size]) => `${number(size)} ${state}`).join(", "), items: nodes }]}
    keyOf=${(node) => node.node} lookOf=${(node) => ({ tone: NODE_LETTERS[nodeStateOf(node)][0], letter: NODE_LETTERS[nodeStateOf(node)][1] })}
    describe=${describe} summarise=${(node) => `${node.node} ${nodeStateOf(node)}`} onOpen=${(node) => go(nodeUrl(node.node))} />`;
}

export const Decisions = ({ events, isJobShown = true }) => events.length ? html`<ol class="decisions">${events.map((event) => html`
  <li key=${event.sequence}><time>${clock(event.at)}</time><span class="state tone-${eventTone(event.event)}">${event.event}</span>
    <span class="decision-text">${isJobShown && event.job && html`<a href=${jobUrl(event.job)}>${event.job}</a>${" "}`}${event.worker && html`<b>${event.worker}</b>${" "}`}${!event.job && event.node && html`<a href=${nodeUrl(event.node)}>${event.node}</a>${" "}`}${event.reason}</span></li>`)}</ol>`
  : html`<${Empty} text="Nothing was decided yet." command="unified jobs" />`;
