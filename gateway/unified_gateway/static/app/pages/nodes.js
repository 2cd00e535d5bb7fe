// All nodes, and one of them: its devices, who holds them, and what was decided about it.
import { useEffect, useState } from "../../vendor/vendor.js";
import { duration, firstLine, number } from "../format.js";
import { go, jobUrl, nodeUrl, place, setQuery } from "../router.js";
import { nodeStateOf } from "../states.js";
import { cluster } from "../stream.js";
import { html } from "../text.js";
import { Bar, Card, Empty, Facts, Search, Select, State } from "../parts/bits.js";
import { NodeActions } from "../parts/dialog.js";
import { VirtualTable } from "../parts/virtual_table.js";
import { Decisions } from "./overview.js";

const held = (node) => (node.resources.devices?.length ?? 0) - (node.free.devices?.length ?? 0);
const share = (node, field) => html`<${Bar} value=${node.resources[field] - node.free[field]} total=${node.resources[field]} label="${field} held on ${node.node}" />`;

const COLUMNS = [
  { id: "node", title: "Node", width: "minmax(90px, 1fr)", cell: (node) => html`<a href=${nodeUrl(node.node)}>${node.node}</a>`, sort: (node) => node.node },
  { id: "state", title: "State", width: "112px", cell: (node) => html`<${State} state=${nodeStateOf(node)} />`, sort: nodeStateOf },
  { id: "workers", title: "Workers", width: "84px", isNumber: true, isWide: true, cell: (node) => node.num_workers || "", sort: (node) => node.num_workers },
  { id: "devices", title: "Devices held", width: "minmax(84px, 130px)", cell: (node) => (node.resources.devices?.length ? html`<${Bar} value=${held(node)} total=${node.resources.devices.length} label="devices held on ${node.node}" /> ${held(node)} of ${node.resources.devices.length}` : "-"), sort: held },
  { id: "cpu", title: "Cores", width: "130px", isWide: true, cell: (node) => html`${share(node, "cpu")} ${number(node.resources.cpu)}`, sort: (node) => node.resources.cpu - node.free.cpu },
  { id: "memory", title: "Memory", width: "140px", isWide: true, cell: (node) => html`${share(node, "memory_mb")} ${number(Math.round(node.resources.memory_mb / 1024))} GB`, sort: (node) => node.resources.memory_mb - node.free.memory_mb },
  { id: "host", title: "Host", width: "minmax(110px, 1fr)", isWide: true, cell: (node) => html`<span class="clip">${node.hostname}</span>`, sort: (node) => node.hostname },
  { id: "address", title: "Address", width: "130px", isWide: true, cell: (node) => html`<span class="clip">${node.address}</span>`, sort: (node) => node.address },
  { id: "check", title: "Last check, reason", width: "minmax(140px, 2fr)", isWide: true, cell: (node) => html`<span class="clip muted" title=${node.drained ?? node.reason ?? node.check}>${firstLine(node.drained || node.reason || node.check)}</span>` },
];

export function Nodes() {
  const { query } = place.value;
  const [state, text] = [query.get("state") ?? "", query.get("text") ?? ""];
  const all = cluster.value.mirror.nodes.list;
  const wanted = text.toLowerCase();
  const rows = all.filter((node) => (!state || nodeStateOf(node) === state) && (!wanted || `${node.node} ${node.hostname} ${node.address} ${Object.entries(node.labels ?? {}).join(" ")}`.toLowerCase().includes(wanted)));
  const states = [...new Set([...all.map(nodeStateOf), ...(state ? [state] : [])])].sort();
  return html`<div class="page-head"><h1>Nodes</h1><div class="tools">
      <${Select} label="state" value=${state} options=${[["", "all"], ...states.map((each) => [each, each])]} onPick=${(value) => setQuery({ state: value })} />
      <${Search} label="name, host or label" value=${text} onInput=${(value) => setQuery({ text: value })} /><span class="muted">${number(rows.length)} of ${number(all.length)}</span></div></div>
    ${rows.length ? html`<${VirtualTable} label="nodes" columns=${COLUMNS} rows=${rows} keyOf=${(node) => node.node} onOpen=${(node) => go(nodeUrl(node.node))} height=${Math.max(400, innerHeight - 190)} />`
      : html`<${Empty} text=${all.length ? "No node is like that." : "No node has joined."} command=${all.length ? "" : "unified-agent --master HOST:PORT"} />`}`;
}

export function Node() {
  const name = place.value.id;
  const { mirror } = cluster.value;
  const node = mirror.nodes.get(name);
  if (!node) return html`<h1>${name}</h1><${Empty} text=${mirror.version < 0 ? "Waiting for the state of the cluster …" : "The master knows no node of this name."} command="unified nodes" />`;
  const devices = node.resources.devices ?? [];
  const free = new Set((node.free.devices ?? []).map((device) => device.index));
  const events = mirror.events.filter((event) => event.node === name);
  return html`<div class="page-head"><div><h1>${name} <${State} state=${nodeStateOf(node)} /></h1><p class="muted">${node.hostname} ${node.address}</p></div><${NodeActions} node=${node} /></div>
    ${(node.drained || node.reason) && html`<p class="reason">${node.drained ? `out of service: ${node.drained}` : node.reason}</p>`}
    <${Card} title="Devices" aside="${held(node)} of ${devices.length} held">
      ${devices.length ? html`<ul class="devices">${devices.map((device) => html`<li key=${device.index} class=${free.has(device.index) ? "" : "held"}><b>${device.index}</b> ${free.has(device.index) ? "free" : "held"}
        <small class="muted">${device.name || device.kind}${device.memory_mb ? `, ${Math.round(device.memory_mb / 1024)} GB` : ""}</small></li>`)}</ul>` : html`<p class="note muted">It has no accelerators.</p>`}<//>
    <div class="halves"><${Card} title="About this node"><${Facts} rows=${[
      ["workers", node.num_workers], ["leaving", node.num_leaving || ""], ["cores", `${number(node.free.cpu)} free of ${number(node.resources.cpu)}`],
      ["memory", `${number(Math.round(node.free.memory_mb))} MB free of ${number(Math.round(node.resources.memory_mb))} MB`], ["disk", `${number(Math.round(node.resources.disk_mb / 1024))} GB`],
      ["last node check", node.check], ["seen", node.state === "LOST" ? `${duration(node.seen_s_ago)} before it was lost` : ""],
      ...Object.entries(node.labels ?? {}).map(([label, value]) => [`label ${label}`, value]),
    ]} /><//><${Card} title="Decisions about it"><${Decisions} events=${events.slice(-20).reverse()} /><//></div>`;
}
