// A chart for each metric that the workers of a role report: the mean, and the band of its ranks.
import { useEffect, useState } from "../../vendor/vendor.js";
import { number } from "../format.js";
import { place, setQuery } from "../router.js";
import { call } from "../session.js";
import { isOver } from "../states.js";
import { poll } from "../stream.js";
import { html } from "../text.js";
import { Card, Choice, Command, Empty, Failed, Select } from "../parts/bits.js";
import { Chart } from "../parts/chart.js";

const MAX_RANKS = 8;
const PERIOD_S = 5;

const hasReported = (progress) => progress?.step != null || Object.keys(progress?.metrics ?? {}).length > 0;

export function JobMetrics({ job, mirror }) {
  const { query } = place.value;
  const role = query.get("role") || reporting(job)[0] || job.roles[0]?.name;
  const axis = query.get("axis") || "step";
  const workers = mirror.workers.list.filter((worker) => worker.role === role && hasReported(worker.progress));
  const every = Math.max(1, Math.ceil(workers.length / MAX_RANKS));
  const chosen = workers.filter((_, place) => place % every === 0).map((worker) => worker.name);
  const [series, setSeries] = useState(null);
  const [error, setError] = useState("");
  useEffect(() => {
    if (!chosen.length) return undefined;
    const ask = async () => {
      const path = `/jobs/${encodeURIComponent(job.job_id)}/metrics`;
      const answers = await Promise.all(chosen.map((worker) => call(`${path}?${new URLSearchParams({ worker })}`).catch((failure) => failure)));
      const told = answers.filter((answer) => !(answer instanceof Error));
      setError(told.length ? "" : answers[0].message);
      setSeries(merged(told, axis));
    };
    return isOver(job) ? void ask() : poll(ask, PERIOD_S);
  }, [job.job_id, chosen.join(" "), axis, isOver(job)]);
  const aside = html`<${Select} label="role" value=${role} options=${job.roles.map(({ name }) => [name, name])} onPick=${(value) => setQuery({ role: value })} />
    <${Choice} label="axis" value=${axis} onPick=${(value) => setQuery({ axis: value === "step" ? "" : value })} options=${[["step", "by step"], ["time", "by time"]]} />`;
  const restarts = mirror.events.filter((event) => /^(job|role)-restarts$/.test(event.event)).map((event) => event.at);
  return html`<${Card} title="Metrics" aside=${aside}>
    ${error && html`<${Failed} error=${error} />`}
    ${series?.length ? html`<p class="muted note">Mean and band of ${chosen.length} of ${number(workers.length)} ranks. Dashed lines: restarts. Drag to zoom, double click to zoom out.</p>
      <div class="charts">${series.map(({ name, x, mean, low, high, at }) => html`<${Chart} key=${`${role} ${axis} ${name}`} title=${name} x=${x} mean=${mean} low=${low} high=${high} isTime=${axis === "time"}
        marks=${axis === "time" ? restarts : restarts.map((time) => x[at.findLastIndex((each) => each <= time)]).filter((step) => step != null)} />`)}</div>
      <${Command} text="unified metrics ${job.job_id} --csv" />`
    : series && !error ? html`<${Empty} text="Role ${role} has reported nothing. Report numbers from its code:" command="current_worker().report(step=step, loss=loss)" />` : html`<p class="loading">Reading …</p>`}<//>`;
}

const reporting = (job) => job.roles.map(({ name }) => name).filter((name) => Object.keys(job.summary?.[name]?.metrics ?? {}).length);

/** One series a metric over all ranks: mean, lowest and highest value at each point of the axis. */
function merged(answers, axis) {
  const names = new Set(answers.flatMap((answer) => answer.names));
  return [...names].map((name) => {
    const points = new Map();
    for (const { step, at, values } of answers) {
      (values[name] ?? []).forEach((value, place) => {
        if (typeof value !== "number") return;
        const x = axis === "time" ? Math.round(at[place]) : step[place];
        if (x == null) return;
        const point = points.get(x) ?? { x, at: at[place], sum: 0, size: 0, low: Infinity, high: -Infinity };
        points.set(x, Object.assign(point, { sum: point.sum + value, size: point.size + 1, low: Math.min(point.low, value), high: Math.max(point.high, value) }));
      });
    }
    const all = [...points.values()].sort((a, b) => a.x - b.x);
    return { name, x: all.map((p) => p.x), at: all.map((p) => p.at), mean: all.map((p) => p.sum / p.size), low: all.map((p) => p.low), high: all.map((p) => p.high) };
  }).filter(({ x }) => x.length);
}
