// All workers of a job in a table, and one of them.
import { bytes, firstLine, number } from "../format.js";
import { jobUrl, nodeUrl, place, setQuery } from "../router.js";
import { shortName, stateOf } from "../states.js";
import { html } from "../text.js";
import { Card, Empty, Facts, Search, Select, State } from "../parts/bits.js";
import { VirtualTable } from "../parts/virtual_table.js";
import { Decisions } from "./overview.js";
import { useHistory } from "./job_history.js";

const inBytes = (mb) => bytes(mb * 2 ** 20);
/** @type {[string, string, (value: number) => string][]} Title, field of the load, and how it is written. */
const LOADS = [["Memory", "memory_mb", inBytes], ["CPU", "cpu", (cores) => `${number(cores)} cores`], ["GPU mem.", "device_memory_mb", inBytes]];
const loadOf = ({ state, progress }, field, unit) => (state === "EXITED" || progress?.load?.[field] == null ? "" : unit(progress.load[field]));

const columnsFor = (job) => [
  { id: "name", title: "Worker", width: "minmax(120px, 1fr)", cell: (worker) => html`<span class="clip" title=${worker.name}>${shortName(worker)}</span>`, sort: shortName },
  { id: "state", title: "State", width: "112px", cell: (worker) => html`<${State} state=${stateOf(worker, job)} />`, sort: (worker) => stateOf(worker, job) },
  { id: "step", title: "Step", width: "84px", isNumber: true, cell: (worker) => (worker.progress?.step == null ? "" : number(worker.progress.step)), sort: (worker) => worker.progress?.step },
  { id: "node", title: "Node", width: "minmax(90px, 0.8fr)", cell: (worker) => worker.node && html`<a href=${nodeUrl(worker.node)}>${worker.node}</a>`, sort: (worker) => worker.node },
  { id: "devices", title: "Devices", width: "72px", isWide: true, cell: (worker) => worker.devices.join(",") },
  ...LOADS.map(([title, field, unit]) => ({ id: field, title, width: "84px", isNumber: true, isWide: true, cell: (worker) => loadOf(worker, field, unit), sort: (worker) => worker.progress?.load?.[field] })),
  { id: "incarnation", title: "Incarn.", width: "72px", isNumber: true, isWide: true, cell: (worker) => worker.incarnation, sort: (worker) => worker.incarnation },
  { id: "failures", title: "Failures", width: "76px", isNumber: true, isWide: true, cell: (worker) => worker.num_failures || "", sort: (worker) => worker.num_failures },
  { id: "pid", title: "Pid", width: "76px", isNumber: true, isWide: true, cell: (worker) => worker.pid || "", sort: (worker) => worker.pid },
  { id: "metrics", title: "Reported", width: "minmax(140px, 1.4fr)", isWide: true, cell: (worker) => html`<span class="clip numbers">${Object.entries(worker.progress?.metrics ?? {}).map(([name, value]) => `${name} ${number(value)}`).join("  ")}</span>` },
  { id: "reason", title: "Reason", width: "minmax(140px, 1.6fr)", isWide: true, cell: (worker) => html`<span class="clip muted" title=${worker.reason}>${firstLine(worker.reason)}</span>` },
];

export function JobWorkers({ job, mirror }) {
  const { query } = place.value;
  const [role, state, text, name] = ["role", "state", "text", "worker"].map((each) => query.get(each) ?? "");
  const all = mirror.workers.list;
  const wanted = text.toLowerCase();
  const rows = !role && !state && !wanted ? all : all.filter((worker) => (!role || worker.role === role) && (!state || stateOf(worker, job) === state)
    && (!wanted || `${shortName(worker)} ${worker.name} ${worker.node} ${worker.reason}`.toLowerCase().includes(wanted)));
  const one = name && mirror.workers.get(name);
  const options = (values) => [["", "all"], ...values.map((value) => [value, value])];
  const states = [...new Set(Object.values(job.summary ?? {}).flatMap((summary) => Object.keys(summary.states ?? {})))];
  return html`${one && html`<${OneWorker} key=${name} job=${job} worker=${one} mirror=${mirror} />`}
    <${Card} title="Workers" aside=${html`
      <${Select} label="role" value=${role} options=${options(job.roles.map((each) => each.name))} onPick=${(value) => setQuery({ role: value })} />
      <${Select} label="state" value=${state} options=${options(states)} onPick=${(value) => setQuery({ state: value })} />
      <${Search} label="name, node or reason" value=${text} onInput=${(value) => setQuery({ text: value })} />`}>
      ${rows.length ? html`<${VirtualTable} label="workers" columns=${columnsFor(job)} rows=${rows} keyOf=${(worker) => worker.name} onOpen=${(worker) => setQuery({ worker: worker.name })} />`
        : html`<${Empty} text=${all.length ? "No worker is like that." : "It has no workers yet."} command=${all.length ? "" : `unified explain ${job.job_id}`} />`}<//>`;
}

function OneWorker({ job, worker, mirror }) {
  const { events } = useHistory(job.job_id, mirror, worker.name);
  return html`<${Card} title=${shortName(worker)} aside=${html`<a class="button" href=${jobUrl(job.job_id, "logs", { worker: worker.name })}>its log</a>
      <a class="button" href=${jobUrl(job.job_id, "stacks", { role: worker.role, rank: String(worker.rank) })}>its stack</a><button type="button" onClick=${() => setQuery({ worker: "" })}>close</button>`}>
    <${Facts} rows=${[
      ["full name", worker.name], ["state", stateOf(worker, job)], ["node", worker.node], ["address", worker.address], ["pid", worker.pid || ""], ["devices", worker.devices.join(", ")],
      ...LOADS.map(([title, field, unit]) => [title, loadOf(worker, field, unit)]),
      ["incarnation", worker.incarnation], ["failures", worker.num_failures], ["step", worker.progress?.step], ["waits for", worker.progress?.waits_for],
      ["unread errors of calls", worker.num_unread_errors || ""], ["log file", worker.log_file], ["reason", worker.reason],
      ...Object.entries(worker.progress?.metrics ?? {}).map(([name, value]) => [name, number(value)]),
    ]} />
    <${Decisions} events=${events.slice(-20).reverse()} isJobShown=${false} /><//>`;
}
