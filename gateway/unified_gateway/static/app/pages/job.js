// One job: its head, and a tab for each way to look at it.
import { useEffect } from "../../vendor/vendor.js";
import { clock, duration, firstLine, roughly } from "../format.js";
import { etaOf } from "../mirror.js";
import { jobUrl, place } from "../router.js";
import { isOver, queuesOf, stalledSince, waitsForRoom } from "../states.js";
import { now, stageNow, job as watched } from "../stream.js";
import { html } from "../text.js";
import { Empty, State } from "../parts/bits.js";
import { JobActions } from "../parts/dialog.js";
import { Data } from "./datasets.js";
import { JobLogs } from "./job_logs.js";
import { JobMetrics } from "./job_metrics.js";
import { JobStacks } from "./job_stacks.js";
import { JobSummary, waitsText } from "./job_summary.js";
import { JobTimeline } from "./job_timeline.js";
import { JobWhy } from "./job_why.js";
import { JobWorkers } from "./job_workers.js";

const TABS = {
  summary: ["Summary", JobSummary], timeline: ["Timeline", JobTimeline], metrics: ["Metrics", JobMetrics], workers: ["Workers", JobWorkers],
  logs: ["Logs", JobLogs], data: ["Data", ({ job }) => html`<${Data} space=${job.job_id} />`], why: ["Why", JobWhy], stacks: ["Stacks", JobStacks],
};

export function Job() {
  const { id, tab } = place.value;
  const { mirror } = watched.value;
  const job = mirror.jobs.get(id) ?? [...mirror.jobs.values()][0];
  useEffect(() => document.querySelector(".tabs [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" }), [tab, !job]);
  if (!job) {
    return html`<h1>${id}</h1>${mirror.version < 0 ? html`<p class="loading">Waiting for the state of the job …</p>`
      : html`<${Empty} text="The master knows no job of this name. Ended jobs are forgotten after a while." command="unified jobs" />`}`;
  }
  const [, Tab] = TABS[tab] ?? TABS.summary;
  const eta = etaOf(job, mirror.history.get(job.job_id), now.value);
  const stalled = stalledSince(job, now.value);
  const waits = stalled == null ? [] : queuesOf(mirror.workers.list).map(waitsText).filter(Boolean);
  const age = duration((job.ended_at ?? now.value) - job.submitted_at);
  return html`
    <div class="page-head job-head">
      <div><h1>${job.job_id} <${State} state=${stageNow(job)} /></h1>
        <p class="muted">${isOver(job) ? `took ${age}, ended ${clock(job.ended_at)}, exit code ${job.exit_code}` : stalled != null ? `no step for ${duration(now.value - stalled)}, submitted ${age} ago` : `for ${age}${eta == null ? "" : `, ${roughly(eta)} left`}`}, by ${job.submitted_by || "-"}</p></div>
      <${JobActions} job=${job} />
    </div>
    ${job.reason && stalled == null && html`<p class="reason" title=${job.reason}>${firstLine(job.reason)}${waitsForRoom(job) && html` · <a href="/">its place in the queue</a>`}</p>`}
    ${waits.length > 0 && html`<p class="reason">${waits.join("; ")}</p>`}
    <nav class="tabs" aria-label="Views of the job">${Object.entries(TABS).map(([name, [title]]) => html`
      <a key=${name} href=${jobUrl(id, name === "summary" ? "" : name)} aria-current=${name === tab ? "page" : undefined}>${title}</a>`)}</nav>
    <${Tab} job=${job} mirror=${mirror} />`;
}
