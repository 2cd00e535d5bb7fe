// Logs of a job: one worker, or the first of each role together.
import { place, setQuery } from "../router.js";
import { isOver, shortName } from "../states.js";
import { html } from "../text.js";
import { Card, Choice, Empty, Select } from "../parts/bits.js";
import { LogView } from "../parts/log_view.js";

const MAX_TOGETHER = 8;
const MAX_LISTED = 500;

export function JobLogs({ job, mirror }) {
  const { query } = place.value;
  const [role, name, stream, incarnation] = ["role", "worker", "stream", "incarnation"].map((each) => query.get(each) ?? "");
  const all = mirror.workers.list.filter((worker) => worker.state !== "PENDING" || worker.incarnation);
  const workers = role ? all.filter((worker) => worker.role === role) : all;
  const one = name && all.find((worker) => worker.name === name || shortName(worker) === name);
  const failed = job.end && mirror.workers.get(job.end.worker);
  const first = failed && !role ? [failed, ...workers.filter((worker) => worker !== failed)] : workers;
  const chosen = (one ? [one] : first.slice(0, MAX_TOGETHER)).map((worker) => ({ name: worker.name, title: shortName(worker) }));
  const listed = one && !workers.slice(0, MAX_LISTED).includes(one) ? [one, ...workers.slice(0, MAX_LISTED)] : workers.slice(0, MAX_LISTED);
  const incarnations = one ? [...Array(one.incarnation + 1).keys()].slice(-50).reverse() : [];
  const aside = html`
    <${Select} label="role" value=${role} options=${[["", "all"], ...job.roles.map((each) => [each.name, each.name])]} onPick=${(value) => setQuery({ role: value, worker: "", incarnation: "" })} />
    <${Select} label="rank" value=${one ? one.name : ""} options=${[["", workers.length > MAX_TOGETHER ? `first ${MAX_TOGETHER}` : "all"], ...listed.map((worker) => [worker.name, shortName(worker)])]} onPick=${(value) => setQuery({ worker: value, incarnation: "" })} />
    ${incarnations.length > 1 && html`<${Select} label="incarnation" value=${incarnation} options=${[["", "newest"], ...incarnations.map((number) => [String(number), String(number)])]} onPick=${(value) => setQuery({ incarnation: value })} />`}
    <${Choice} label="stream" value=${stream || "both"} options=${[["both", "both"], ["out", "out"], ["err", "err"]]} onPick=${(value) => setQuery({ stream: value === "both" ? "" : value })} />`;
  const isAgain = !incarnation && chosen.some(({ name: each }) => mirror.workers.get(each).incarnation);
  return html`<${Card} title="Logs" aside=${aside}>
    ${isAgain && html`<p class="note muted">${one ? "The newest incarnation: choose an earlier one." : "The newest incarnation of each worker: choose a rank for the earlier ones."}</p>`}
    ${chosen.length ? html`<${LogView} jobId=${job.job_id} workers=${chosen} stream=${stream || "both"} incarnation=${incarnation} isOver=${isOver(job) || incarnation !== ""} />`
      : html`<${Empty} text="No worker has begun, so nothing was printed." command="unified explain ${job.job_id}" />`}<//>`;
}
