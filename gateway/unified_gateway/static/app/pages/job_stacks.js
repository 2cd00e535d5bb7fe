// Where the workers of a job stand now: equal stacks as one group.
import { useEffect, useState } from "../../vendor/vendor.js";
import { clock, count } from "../format.js";
import { place, setQuery } from "../router.js";
import { call, session } from "../session.js";
import { isOver } from "../states.js";
import { now } from "../stream.js";
import { html } from "../text.js";
import { Card, Empty, Failed, Search, Select } from "../parts/bits.js";

const MAX_NAMED = 6;

export function JobStacks({ job }) {
  const { query } = place.value;
  const [role, rank] = [query.get("role") ?? "", query.get("rank") ?? ""];
  const [found, setFound] = useState(null);
  const [isAsking, setAsking] = useState(false);
  const take = async () => {
    setAsking(true);
    try {
      const search = new URLSearchParams({ ...(role && { role }), ...(rank && { rank }) });
      setFound({ at: now.value, ...(await call(`/jobs/${encodeURIComponent(job.job_id)}/stacks?${search}`)) });
    } catch (error) {
      setFound({ error: error.message });
    }
    setAsking(false);
  };
  const mayProfile = session.value?.write;
  const [profile, setProfile] = useState(null);
  const worker = `${role || job.roles[0]?.name}-${rank || 0}`;
  const sample = async () => {
    setProfile({ isTaken: true, worker });
    try {
      const { svg } = await call(`/jobs/${encodeURIComponent(job.job_id)}/profile`, { method: "POST", body: { worker } });
      setProfile({ worker, url: `data:image/svg+xml,${encodeURIComponent(svg)}` });
    } catch (error) {
      setProfile({ error: error.message });
    }
  };
  useEffect(() => {
    if (rank && !isOver(job)) take();
  }, []);
  const aside = html`<${Select} label="role" value=${role} options=${[["", "all"], ...job.roles.map(({ name }) => [name, name])]} onPick=${(value) => setQuery({ role: value })} />
    <${Search} label="rank" value=${rank} onInput=${(value) => setQuery({ rank: value.replace(/\D/g, "") })} />
    <button type="button" class="main" disabled=${isAsking || isOver(job)} onClick=${take}>${isAsking ? "asking the workers …" : "Take stacks"}</button>
    <button type="button" disabled=${!mayProfile || profile?.isTaken || isOver(job)} title=${mayProfile ? `py-spy, of the extra debug, samples ${worker}, which runs on` : "this session may only read"} onClick=${sample}>${profile?.isTaken ? `profiling ${profile.worker} …` : "Profile 10 s"}</button>`;
  const missing = Object.entries(found?.missing ?? {});
  return html`<${Card} title="Stacks" aside=${aside}>
    ${profile?.error && html`<${Failed} error=${profile.error} />`}
    ${profile?.url && html`<figure class="flame"><figcaption>Where the time of ${profile.worker} goes. <a class="button" href=${profile.url} download="${job.job_id}-${profile.worker}.svg">Download, to zoom and search</a></figcaption>
      <img src=${profile.url} alt="flame graph of ${profile.worker}" /></figure>`}
    ${found?.error && html`<${Failed} error=${found.error} />`}
    ${found?.verdict && html`<p class="reason"><b>Collectives:</b> ${found.verdict}</p>`}
    ${found?.groups?.length ? html`<p class="muted note">Taken ${clock(found.at)}. Workers that stand in the same place are one group; the innermost frame is last.</p>
      <div class="stacks">${found.groups.map((group, index) => html`<section key=${index} class="stack" aria-label="group ${index + 1}">
        <h3>${count(group.workers.length, "worker")} <span class="muted">${group.state}</span></h3>
        <p class="muted clip" title=${group.workers.join(", ")}>${group.workers.slice(0, MAX_NAMED).join(", ")}${group.workers.length > MAX_NAMED ? ` and ${group.workers.length - MAX_NAMED} more` : ""}</p>
        <pre tabindex="0" aria-label="stack of group ${index + 1}">${group.frames.join("\n")}</pre></section>`)}</div>`
    : !found?.error && html`<${Empty} text=${isOver(job) ? "The job has ended: its workers stand nowhere." : "See where each worker stands. This stops nothing, and needs no rights on the hosts."} command="unified stack ${job.job_id}" />`}
    ${missing.length > 0 && html`<p class="note"><b>No answer:</b> ${missing.slice(0, 20).map(([name, why]) => `${name}: ${why}`).join("; ")}</p>`}<//>`;
}
