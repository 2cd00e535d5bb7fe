// Logs of any job: choose one; its own page follows them with role and rank.
import { jobUrl, place, setQuery } from "../router.js";
import { isOver } from "../states.js";
import { cluster, stageNow } from "../stream.js";
import { html } from "../text.js";
import { Card, Empty, Search, State } from "../parts/bits.js";
import { firstLine } from "../format.js";

const MAX_SHOWN = 60;

export function Logs() {
  const text = place.value.query.get("text") ?? "";
  const jobs = [...cluster.value.mirror.jobs.values()].filter((job) => `${job.job_id} ${job.submitted_by}`.toLowerCase().includes(text.toLowerCase()));
  jobs.sort((a, b) => Number(isOver(a)) - Number(isOver(b)) || b.submitted_at - a.submitted_at);
  return html`<div class="page-head"><h1>Logs</h1><div class="tools"><${Search} label="job or owner" value=${text} onInput=${(value) => setQuery({ text: value })} /></div></div>
    <${Card} title="Jobs">${jobs.length ? html`<ul class="log-jobs">${jobs.slice(0, MAX_SHOWN).map((job) => html`<li key=${job.job_id}>
        <a href=${jobUrl(job.job_id, "logs")}>${job.job_id}</a><${State} state=${stageNow(job)} />
        <span>${job.roles.map((role) => html`<a class="button" href=${jobUrl(job.job_id, "logs", { role: role.name })}>${role.name}</a> `)}</span>
        ${job.end ? html`<a class="clip" href=${jobUrl(job.job_id, "logs", { worker: job.end.worker, incarnation: String(job.end.incarnation), stream: "err" })}>${firstLine(job.end.failure.summary)}</a>` : html`<span></span>`}</li>`)}</ul>
      ${jobs.length > MAX_SHOWN && html`<p class="note muted">The first ${MAX_SHOWN} of ${jobs.length}: search for others.</p>`}`
    : html`<${Empty} text=${text ? "No job is like that." : "No job was submitted yet."} command=${text ? "" : "unified run --nproc-per-node 2 train.py"} />`}<//>`;
}
