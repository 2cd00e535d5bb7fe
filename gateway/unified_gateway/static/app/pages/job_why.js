// Every decision about a job with its reason, as `unified explain` has it, live.
import { place, setQuery } from "../router.js";
import { eventTone } from "../states.js";
import { html } from "../text.js";
import { Card, Choice, Empty, Failed, Search } from "../parts/bits.js";
import { useHistory } from "./job_history.js";
import { Decisions } from "./overview.js";

const MAX_SHOWN = 200;

export function JobWhy({ job, mirror }) {
  const { query } = place.value;
  const [kind, text, worker] = ["kind", "text", "worker"].map((name) => query.get(name) ?? "");
  const { events, error, isAll, askOlder } = useHistory(job.job_id, mirror, worker);
  const wanted = text.toLowerCase();
  const found = events.filter((event) => (!kind || ["bad", "warn"].includes(eventTone(event.event))) && (!wanted || `${event.event} ${event.worker} ${event.node} ${event.reason}`.toLowerCase().includes(wanted)));
  const aside = html`${worker && html`<button type="button" onClick=${() => setQuery({ worker: "" })}>only ${worker} ✕</button>`}
    <${Choice} label="kind" value=${kind} options=${[["", "all"], ["trouble", "trouble"]]} onPick=${(value) => setQuery({ kind: value })} />
    <${Search} label="event, worker, node or reason" value=${text} onInput=${(value) => setQuery({ text: value })} />`;
  return html`<${Card} title="Why" aside=${aside}>
    ${error && html`<${Failed} error=${error} />`}
    ${found.length ? html`<${Decisions} events=${found.slice(-MAX_SHOWN).reverse()} isJobShown=${false} />` : html`<${Empty} text=${events.length ? "No decision is like that." : "Nothing was decided about it yet."} command="unified explain ${job.job_id}" />`}
    ${found.length > MAX_SHOWN && html`<p class="note muted">The newest ${MAX_SHOWN} of ${found.length}. Search, or: unified explain ${job.job_id}</p>`}
    ${!isAll && html`<p class="note"><button type="button" onClick=${askOlder}>older decisions</button></p>`}<//>`;
}
