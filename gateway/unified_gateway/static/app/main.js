// The start: find the session, follow the URL, watch what the page needs, show it.
import { effect, render } from "../vendor/vendor.js";
import { Layout, applyScheme } from "./parts/layout.js";
import { About, SignIn } from "./pages/about.js";
import { Datasets } from "./pages/datasets.js";
import { Job } from "./pages/job.js";
import { Jobs } from "./pages/jobs.js";
import { Logs } from "./pages/logs.js";
import { Node, Nodes } from "./pages/nodes.js";
import { Overview } from "./pages/overview.js";
import { Tasks } from "./pages/tasks.js";
import { Empty } from "./parts/bits.js";
import { followLinks, place } from "./router.js";
import { beginSession, session } from "./session.js";
import { endStream, followVisibility, watch } from "./stream.js";
import { html } from "./text.js";

const PAGES = { overview: Overview, jobs: Jobs, job: Job, nodes: Nodes, node: Node, datasets: Datasets, tasks: Tasks, logs: Logs, about: About, unknown: Unknown };

function Unknown() {
  return html`<h1>Not found</h1><${Empty} text="There is no page here."><a href="/">Overview</a><//>`;
}

function App() {
  if (session.value === undefined) return html`<main class="sign-in"><p class="loading">Signing in …</p></main>`;
  if (session.value === null) return html`<${SignIn} />`;
  const { page, id } = place.value;
  const Page = PAGES[page];
  return html`<${Layout}><${Page} key=${`${page} ${id}`} /><//>`;
}

applyScheme();
await beginSession();
followLinks();
followVisibility();
effect(() => {
  if (session.value) watch(place.value.page === "job" ? place.value.id : "");
  else endStream();
});
effect(() => {
  const { page, id, tab } = place.value;
  const name = id ? `${id}${tab && tab !== "summary" ? `, ${tab}` : ""}` : page[0].toUpperCase() + page.slice(1);
  document.title = `${name} · Unified`;
});
render(html`<${App} />`, document.getElementById("app"));
