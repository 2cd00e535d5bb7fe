// Training runs of the training API, with their progress and checkpoints.
import { useEffect, useState } from "../../vendor/vendor.js";
import { clock, duration, number } from "../format.js";
import { jobUrl, place, setQuery } from "../router.js";
import { call } from "../session.js";
import { now, poll } from "../stream.js";
import { html } from "../text.js";
import { Bar, Card, Empty, Failed, Search } from "../parts/bits.js";
import { Plain } from "./datasets.js";

const PERIOD_S = 3;
const TONES = { RUNNING: "good", SUCCEEDED: "done", FAILED: "bad", PENDING: "idle", STOPPED: "idle", CREATED: "idle", RESTARTING: "warn" };
const seconds = (at) => (typeof at === "string" ? Date.parse(at) / 1000 : at);

export function Tasks() {
  const [told, setTold] = useState(null);
  const [error, setError] = useState("");
  useEffect(() => poll(() => call("/tasks").then((answer) => { setTold(answer); setError(""); }, (failure) => setError(failure.message)), PERIOD_S), []);
  const text = place.value.query.get("text") ?? "";
  const runs = (told?.tasks ?? []).filter((run) => `${run.name} ${run.run_id} ${run.status}`.toLowerCase().includes(text.toLowerCase()));
  return html`<div class="page-head"><h1>Tasks</h1><div class="tools"><${Search} label="name, run or state" value=${text} onInput=${(value) => setQuery({ text: value })} /></div></div>
    ${error && html`<${Failed} error=${error} />`}
    <${Card} title="Training runs">${runs.length ? html`<${Plain} label="training runs" rows=${runs} columns=${[
      ["Run", (run) => html`<a href=${jobUrl(run.job_id)}><b>${run.run_id}</b></a> <span class="muted">${run.framework}</span>`],
      ["State", (run) => html`<span class="state tone-${TONES[String(run.status).toUpperCase()] ?? "idle"}">${run.status}</span>`],
      ["Progress", ({ run_id: id, progress }) => (progress?.step == null ? "-" : html`${progress.total ? html`<${Bar} value=${progress.step} total=${progress.total} label="progress of ${id}" /> ` : ""}<span class="numbers">step ${number(progress.step)}${progress.total ? ` of ${number(progress.total)}` : ""}</span>`)],
      ["Loss", (run) => number(run.progress?.metrics?.loss)], ["Tokens/s", (run) => number(run.progress?.metrics?.tokens_per_s)], ["Restarts", (run) => run.num_restarts || "-"],
      ["Submitted", (run) => (run.submitted_at ? clock(seconds(run.submitted_at)) : "-")],
      ["Took", (run) => (run.submitted_at ? duration((seconds(run.ended_at) || now.value) - seconds(run.submitted_at)) : "-")],
      ["More", (run) => html`<a href=${jobUrl(run.job_id, "logs")}>log</a> <a href=${jobUrl(run.job_id, "metrics")}>curves</a> <a href=${jobUrl(run.job_id, "data")}>checkpoints</a>`],
      ["Detail", (run) => html`<span class="clip muted" title=${run.detail ?? ""}>${run.detail ?? ""}</span>`]]} />`
    : told ? html`<${Empty} text="No training run was submitted over HTTP." command=${'curl HOST:PORT/train -H "X-TRAINER-TOKEN: $TRAINER_API_TOKEN" -H content-type:application/json -d @run.json'} />` : !error && html`<p class="loading">Reading …</p>`}<//>`;
}
