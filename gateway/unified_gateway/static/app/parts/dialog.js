// Questions before an action, and what came of it.
import { signal, useEffect, useRef } from "../../vendor/vendor.js";
import { call, session } from "../session.js";
import { html } from "../text.js";

const question = signal(null);
const notice = signal(null);

/**
 * Ask; if the answer is yes, call the API and say what it answered.
 * @param {{title: string, text: string, action: string, path: string, body?: any, isBad?: boolean, field?: string}} asked
 */
export function ask(asked) {
  question.value = asked;
}

export function say(text, tone = "good") {
  notice.value = { text, tone };
  setTimeout(() => notice.value?.text === text && (notice.value = null), 8000);
}

async function perform(asked, text) {
  question.value = null;
  try {
    const body = asked.field ? { ...asked.body, [asked.field]: text } : (asked.body ?? {});
    const { note } = await call(asked.path, { method: "POST", body });
    say(note || `${asked.action}: done`);
  } catch (error) {
    say(error.message, "bad");
  }
}

export function Dialogs() {
  const dialog = useRef(null);
  const field = useRef(null);
  const asked = question.value;
  useEffect(() => {
    if (asked && !dialog.current.open) dialog.current.showModal();
    if (!asked && dialog.current.open) dialog.current.close();
  }, [asked]);
  return html`
    <dialog ref=${dialog} aria-labelledby="question" onClose=${() => (question.value = null)}>
      ${asked && html`<form method="dialog" onSubmit=${(event) => { event.preventDefault(); perform(asked, field.current?.value ?? ""); }}>
        <h2 id="question">${asked.title}</h2>
        <p>${asked.text}</p>
        ${asked.field && html`<label class="field">${asked.field}<input ref=${field} name=${asked.field} autocomplete="off" /></label>`}
        <div class="buttons">
          <button type="button" onClick=${() => (question.value = null)}>Cancel</button>
          <button type="submit" class=${asked.isBad ? "bad" : "main"}>${asked.action}</button>
        </div>
      </form>`}
    </dialog>
    <div class="notices">${notice.value && html`<div class="notice tone-${notice.value.tone}" role="status">${notice.value.text}
      <button type="button" class="quiet" aria-label="dismiss" onClick=${() => (notice.value = null)}>✕</button></div>`}</div>`;
}

const Ask = ({ label, asked, isOff = false }) => html`<button type="button" class=${asked.isBad ? "bad" : undefined} disabled=${isOff || !session.value?.write}
  title=${session.value?.write ? undefined : "this session may only read"} onClick=${() => ask(asked)}>${label}</button>`;

/** Stop, suspend and resume of a job. @param {{job: any}} props */
export function JobActions({ job }) {
  const path = `/jobs/${encodeURIComponent(job.job_id)}`;
  if (job.stage === "STOPPED") return null;
  const change = job.suspended == null
    ? { title: `Suspend ${job.job_id}?`, text: "Its workers stop, and it waits until it is resumed. No restart limit is charged.", action: "Suspend", path: `${path}/suspend` }
    : { title: `Resume ${job.job_id}?`, text: "It goes back into the queue.", action: "Resume", path: `${path}/resume` };
  const stop = { title: `Stop ${job.job_id}?`, text: `Its ${job.num_workers} workers are stopped, and it ends. It cannot be resumed.`, action: "Stop the job", path: `${path}/stop`, body: { force: false }, isBad: true };
  return html`<div class="actions"><${Ask} label=${change.action} asked=${change} /><${Ask} label="Stop" asked=${stop} isOff=${job.stage === "STOPPING"} /></div>`;
}

/** Drain and undrain of a node. @param {{node: any}} props */
export function NodeActions({ node }) {
  const path = `/nodes/${encodeURIComponent(node.node)}`;
  const change = node.drained == null
    ? { title: `Drain ${node.node}?`, text: `Its ${node.num_workers} workers move to other nodes, and no other begins there. No restart limit is charged.`, action: "Drain", path: `${path}/drain`, field: "reason" }
    : { title: `Put ${node.node} back into service?`, text: "Workers may begin there again.", action: "Undrain", path: `${path}/undrain` };
  return html`<div class="actions"><${Ask} label=${change.action} asked=${change} /></div>`;
}
