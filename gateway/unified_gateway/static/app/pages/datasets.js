// Datasets, barriers, checkpoints and registered workers, as the coordinator has them.
import { useEffect, useState } from "../../vendor/vendor.js";
import { bytes, clock, duration, number } from "../format.js";
import { jobUrl } from "../router.js";
import { call } from "../session.js";
import { now, poll } from "../stream.js";
import { html } from "../text.js";
import { Bar, Card, Empty, Failed } from "../parts/bits.js";

const PERIOD_S = 3;
const MAX_ROWS = 100;

export const Datasets = () => html`<div class="page-head"><h1>Datasets</h1></div><${Data} />`;

/** @param {{space?: string}} props id of the job; all spaces if it is left out */
export function Data({ space }) {
  const [told, setTold] = useState(null);
  const [error, setError] = useState("");
  useEffect(() => poll(() => call(`/datasets${space === undefined ? "" : `?job=${encodeURIComponent(space)}`}`).then((answer) => { setTold(answer); setError(""); }, (failure) => setError(failure.message)), PERIOD_S), [space]);
  if (!told) return error ? html`<${Failed} error=${error} />` : html`<p class="loading">Reading …</p>`;
  const own = (rows) => (rows ?? []).filter((row) => space === undefined || row.space === space);
  const [datasets, barriers, checkpoints, workers] = [own(told.datasets), own(told.barriers), own(told.checkpoints), own(told.workers)];
  const where = space === undefined ? [["Space", (row) => (row.space ? html`<a href=${jobUrl(row.space, "data")}>${row.space}</a>` : html`<span class="muted">no job</span>`)]] : [];
  return html`${error && html`<${Failed} error=${error} />`}
    <${Card} title="Datasets">${datasets.length ? html`<${Plain} label="datasets" rows=${datasets} columns=${[...where,
      ["Dataset", (row) => html`<b>${row.dataset_id}</b> <span class="muted">${row.format}</span>`],
      ["Epoch", (row) => number(row.epoch)],
      ["Shards done", (row) => html`<${Bar} value=${row.num_done} total=${row.num_shards} label="shards done of ${row.dataset_id}" /> <span class="numbers">${number(row.num_done)} of ${number(row.num_shards)}</span>`],
      ["Samples", (row) => number(row.total_samples)],
      ["Read by", (row) => html`<span title=${(row.workers ?? []).join(", ")}>${number(row.workers?.length ?? 0)} workers</span>`],
      ["Path", (row) => html`<code class="clip" title=${row.path}>${row.path}</code>`]]} />`
      : html`<${Empty} text="No dataset is registered. Register one from the code of the workers:" command=${'DatasetRegistry().register("samples", path, "jsonl")'} />`}<//>
    <${Card} title="Checkpoints">${checkpoints.length ? html`<${Plain} label="checkpoints" rows=${checkpoints} columns=${[...where,
      ["Series", (row) => html`<b>${row.name || "default"}</b>`], ["Step", (row) => number(row.step)], ["Age", (row) => (row.saved_at ? html`<span title=${clock(row.saved_at)}>${duration(now.value - row.saved_at)}</span>` : "-")],
      ["Size", (row) => (row.size_bytes ? bytes(row.size_bytes) : "-")], ["Path", (row) => html`<code class="clip" title=${row.path}>${row.path}</code>`]]} />`
      : html`<${Empty} text="No checkpoint was told to the master. Save one from the code of the workers:" command="CheckpointManager(folder).save(state, step)" />`}<//>
    <div class="halves"><${Card} title="Barriers">${barriers.length ? html`<${Plain} label="barriers" rows=${barriers} columns=${[...where,
      ["Barrier", (row) => html`<b>${row.barrier_id}</b>`], ["Arrived", (row) => `${row.arrived.length} of ${row.world_size}`], ["Missing", (row) => html`<span class="clip" title=${row.missing.join(", ")}>${row.missing.join(", ") || "-"}</span>`]]} />`
      : html`<${Empty} text="Nobody waits at a barrier." />`}<//>
    <${Card} title="Registered workers">${workers.length ? html`<${Plain} label="registered workers" rows=${workers} columns=${[...where, ["Worker", (row) => html`<b>${row.worker}</b>`]]} />`
      : html`<${Empty} text="No worker is registered." />`}<//></div>`;
}

/** A table of a hundred rows at most. @param {{label: string, rows: any[], columns: [string, (row: any) => any][]}} props */
export const Plain = ({ label, rows, columns }) => html`<div class="plain" tabindex="0" role="region" aria-label=${label}><table><thead><tr>${columns.map(([title]) => html`<th key=${title} scope="col">${title}</th>`)}</tr></thead>
  <tbody>${rows.slice(0, MAX_ROWS).map((row, place) => html`<tr key=${place}>${columns.map(([title, cell]) => html`<td key=${title}>${cell(row)}</td>`)}</tr>`)}</tbody></table>
  ${rows.length > MAX_ROWS && html`<p class="note muted">The first ${MAX_ROWS} of ${number(rows.length)}.</p>`}</div>`;
