// All jobs, filtered by stage, owner and text, which are in the URL.
import { duration, firstLine, number, roughly } from "../format.js";
import { etaOf, stepOf } from "../mirror.js";
import { go, jobUrl, place, setQuery } from "../router.js";
import { isOver, stalledSince } from "../states.js";
import { cluster, now, stageNow } from "../stream.js";
import { html } from "../text.js";
import { Bar, Empty, Search, Select, State } from "../parts/bits.js";
import { VirtualTable } from "../parts/virtual_table.js";

/** Why a job is in its stage. */
const reasonOf = (job) => (stalledSince(job, now.value) == null ? firstLine(job.reason) : `no step for ${roughly(now.value - stalledSince(job, now.value))}`);

const ownerOf = (job) => job.submitted_by.split("@")[0];

const COLUMNS = [
  { id: "job", title: "Job", width: "minmax(110px, 1.4fr)", cell: (job) => html`<a href=${jobUrl(job.job_id)}>${job.job_id}</a>`, sort: (job) => job.job_id },
  { id: "stage", title: "Stage", width: "124px", cell: (job) => html`<${State} state=${stageNow(job)} />`, sort: stageNow },
  { id: "progress", title: "Progress", width: "minmax(70px, 1fr)", cell: progress, sort: (job) => share(job) },
  { id: "workers", title: "Workers", width: "84px", isNumber: true, isWide: true, cell: (job) => number(job.num_workers), sort: (job) => job.num_workers },
  { id: "restarts", title: "Restarts", width: "84px", isNumber: true, isWide: true, cell: (job) => job.num_restarts || "", sort: (job) => job.num_restarts },
  { id: "left", title: "Left", width: "84px", isNumber: true, isWide: true, cell: left },
  { id: "age", title: "Age", width: "84px", isNumber: true, isWide: true, cell: (job) => roughly(now.value - job.submitted_at), sort: (job) => -job.submitted_at },
  { id: "took", title: "Took", width: "112px", isNumber: true, isWide: true, cell: (job) => duration((job.ended_at ?? now.value) - job.submitted_at), sort: (job) => (job.ended_at ?? now.value) - job.submitted_at },
  { id: "owner", title: "Owner", width: "110px", isWide: true, cell: (job) => html`<span class="clip">${ownerOf(job)}</span>`, sort: ownerOf },
  { id: "reason", title: "Reason", width: "minmax(140px, 2fr)", isWide: true, cell: (job) => html`<span class="clip muted" title=${job.reason}>${reasonOf(job)}</span>` },
];

function share(job) {
  const step = stepOf(job);
  return step?.total ? step.median / step.total : null;
}

function progress(job) {
  const step = stepOf(job);
  if (!step) return html`<span class="muted">-</span>`;
  return step.total ? html`<${Bar} value=${step.median} total=${step.total} label="progress of ${job.job_id}" /> ${Math.floor((100 * step.median) / step.total)} %` : `step ${number(step.median)}`;
}

function left(job) {
  const eta = etaOf(job, cluster.value.mirror.history.get(job.job_id), now.value);
  return eta == null ? "" : roughly(eta);
}

export function Jobs() {
  const { query } = place.value;
  const [stage, owner, text] = ["stage", "owner", "text"].map((name) => query.get(name) ?? "");
  const all = [...cluster.value.mirror.jobs.values()];
  const wanted = text.toLowerCase();
  const rows = all
    .filter((job) => (!stage || stageNow(job) === stage) && (!owner || ownerOf(job) === owner))
    .filter((job) => !wanted || `${job.job_id} ${job.name} ${job.reason} ${Object.entries(job.labels ?? {}).join(" ")}`.toLowerCase().includes(wanted))
    .sort((a, b) => Number(isOver(a)) - Number(isOver(b)) || b.submitted_at - a.submitted_at);
  const options = (values, any) => [["", any], ...[...new Set(values)].sort().map((value) => [value, value])];
  return html`<div class="page-head"><h1>Jobs</h1><div class="tools">
      <${Select} label="stage" value=${stage} options=${options([...all.map(stageNow), ...(stage ? [stage] : [])], "all")} onPick=${(value) => setQuery({ stage: value })} />
      <${Select} label="owner" value=${owner} options=${options(all.map(ownerOf), "all")} onPick=${(value) => setQuery({ owner: value })} />
      <${Search} label="name, label or reason" value=${text} onInput=${(value) => setQuery({ text: value })} />
      <span class="muted">${number(rows.length)} of ${number(all.length)}</span></div></div>
    ${rows.length ? html`<${VirtualTable} label="jobs" columns=${COLUMNS} rows=${rows} keyOf=${(job) => job.job_id} onOpen=${(job) => go(jobUrl(job.job_id))} height=${Math.max(400, innerHeight - 190)} />`
      : html`<${Empty} text=${all.length ? "No job is like that." : "No job was submitted yet."} command=${all.length ? "" : "unified run --nproc-per-node 2 train.py"} />`}`;
}
