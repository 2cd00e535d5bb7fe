// Small pieces that many pages have.
import { signal } from "../../vendor/vendor.js";
import { duration } from "../format.js";
import { secondsAt } from "../mirror.js";
import { toneOf } from "../states.js";
import { now } from "../stream.js";
import { html } from "../text.js";

const narrow = matchMedia("(max-width: 760px)");
export const isNarrow = signal(narrow.matches);
narrow.addEventListener("change", () => (isNarrow.value = narrow.matches));

/** A state with its tone; the shape before it tells tones apart without colour. */
export const State = ({ state }) => html`<span class="state tone-${toneOf(state)}">${state}</span>`;

/** A region of a page with a heading. */
export const Card = ({ title, aside, children, class: name = "" }) => html`
  <section class="card ${name}" aria-label=${title}>
    <header class="card-head"><h2>${title}</h2>${aside && html`<div class="card-aside">${aside}</div>`}</header>
    ${children}
  </section>`;

/** Nothing to show: why, and the command that changes it. */
export const Empty = ({ text, command, children }) => html`
  <div class="empty"><p>${text}</p>${command && html`<${Command} text=${command} />`}${children}</div>`;

/** A command to copy. */
export const Command = ({ text }) => html`
  <div class="command"><code>${text}</code>
    <button type="button" class="quiet" aria-label="copy the command ${text}" onClick=${(event) => copy(text, event.currentTarget)}>copy</button>
  </div>`;

async function copy(text, button) {
  await navigator.clipboard?.writeText(text);
  button.textContent = "copied";
  setTimeout(() => (button.textContent = "copy"), 1500);
}

export const Failed = ({ error }) => html`<p class="note tone-bad" role="alert">${error}</p>`;

/** @param {{value: number, total: number, label: string}} props */
export const Bar = ({ value, total, label }) => html`
  <span class="bar" role="progressbar" aria-label=${label} aria-valuemin="0" aria-valuemax=${total} aria-valuenow=${Math.min(value, total)}>
    <span style=${{ width: `${Math.min(100, (100 * value) / (total || 1))}%` }}></span>
  </span>`;

/** Names and values, two columns. @param {{rows: [string, any][]}} props */
export const Facts = ({ rows }) => html`
  <dl class="facts">${rows.filter(([, value]) => value != null && value !== "").map(([name, value]) => html`
    <div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;

/** Buttons of which one is chosen. @param {{options: [string, string][], value: string, onPick: (value: string) => void, label: string}} props */
export const Choice = ({ options, value, onPick, label }) => html`
  <div class="choice" role="group" aria-label=${label}>${options.map(([name, title]) => html`
    <button type="button" key=${name} aria-pressed=${name === value} onClick=${() => onPick(name)}>${title}</button>`)}</div>`;

export const Select = ({ options, value, onPick, label }) => html`
  <label class="select"><span>${label}</span>
    <select value=${value} onChange=${(event) => onPick(event.currentTarget.value)}>
      ${options.map(([name, title]) => html`<option key=${name} value=${name} selected=${name === value}>${title}</option>`)}
    </select></label>`;

export const Search = ({ value, onInput, label }) => html`
  <input type="search" class="search" value=${value} placeholder=${label} aria-label=${label} spellcheck=${false}
    onInput=${(event) => onInput(event.currentTarget.value)} />`;

const PHASES = [
  ["waiting", "idle"], ["starting", "busy"], ["productive", "good"], ["redone", "done"], ["recovering", "warn"],
  ["stalled", "bad"], ["stopping", "idle"],
];

/** Where the time of a job went. @param {{times: any, isShort?: boolean}} props */
export function TimeBar({ times, isShort = false }) {
  const seconds = secondsAt(times, now.value);
  const parts = PHASES.filter(([phase]) => seconds[phase] > 0).map(([phase, tone]) => ({ phase, tone, s: seconds[phase] }));
  const total = parts.reduce((sum, part) => sum + part.s, 0);
  if (!total) return null;
  const share = (part) => `${Math.round((100 * part.s) / total)} %`;
  const said = parts.map((part) => `${part.phase} ${share(part)}`).join(", ");
  return html`<div class="time-bar">
    <div class="time-parts" role="img" aria-label="where the time went: ${said}">${parts.map((part) => html`
      <span key=${part.phase} class="fill-${part.tone} phase-${part.phase}" style=${{ flexGrow: part.s }} title="${part.phase} ${duration(part.s)}"></span>`)}</div>
    ${!isShort && html`<ul class="legend">${parts.map((part) => html`
      <li key=${part.phase}><i class="fill-${part.tone} phase-${part.phase}"></i>${part.phase} <b>${share(part)}</b> <span class="muted">${duration(part.s)}</span></li>`)}</ul>`}
  </div>`;
}

/** A line of values without axes. @param {{values: number[], label: string}} props */
export function Spark({ values, label }) {
  if (values.length < 2) return html`<span class="muted">-</span>`;
  const top = Math.max(...values) || 1;
  const points = values.map((value, index) => `${((100 * index) / (values.length - 1)).toFixed(1)},${(22 - (20 * value) / top).toFixed(1)}`);
  return html`<svg class="spark" viewBox="0 0 100 24" preserveAspectRatio="none" role="img" aria-label=${label}><polyline points=${points.join(" ")} /></svg>`;
}
