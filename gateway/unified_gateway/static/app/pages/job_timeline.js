// When each incarnation lived, when rounds began, and what ended them.
import { useMemo, useState } from "../../vendor/vendor.js";
import { lanesOf, traceOf } from "../lanes.js";
import { isOver, shortName } from "../states.js";
import { now } from "../stream.js";
import { html } from "../text.js";
import { Card, Choice, Empty, Failed } from "../parts/bits.js";
import { saveAs } from "../parts/log_view.js";
import { Timeline } from "../parts/timeline.js";
import { useHistory } from "./job_history.js";

export function JobTimeline({ job, mirror }) {
  const [by, setBy] = useState("worker");
  const { events, error, isAll, askOlder } = useHistory(job.job_id, mirror);
  const end = job.ended_at ?? now.value;
  const { lanes, start } = useMemo(() => lanesOf(events, end, by, (name) => (mirror.workers.get(name) ? shortName(mirror.workers.get(name)) : name)), [events.length, Math.floor(end), by]);
  const download = () => saveAs(`${job.job_id}-trace.json`, [JSON.stringify(traceOf(lanes))], "application/json");
  const aside = html`<${Choice} label="lanes" value=${by} onPick=${setBy} options=${[["worker", "by worker"], ["node", "by node"]]} />
    ${!isAll && html`<button type="button" onClick=${askOlder}>older events</button>`}<button type="button" onClick=${download}>download for Perfetto</button>`;
  return html`<${Card} title="Timeline" aside=${aside}>
    ${error && html`<${Failed} error=${error} />`}
    ${events.length ? html`<${Timeline} lanes=${lanes} start=${start} end=${end} isLive=${!isOver(job)} />
      <ul class="legend"><li><i class="cell-good"></i>incarnation</li><li><i class="cell-bad"></i>ended badly</li><li><i class="cell-done"></i>finished</li><li><i class="cell-busy"></i>round</li><li><b class="tone-bad">◆</b> failure</li><li><b class="tone-warn">▲</b> other decision</li></ul>`
    : html`<${Empty} text="Nothing was decided about it yet." command="unified explain ${job.job_id}" />`}<//>`;
}
