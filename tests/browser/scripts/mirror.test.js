// The page's mirror: whole states and changes come out as rows in order.
import assert from "node:assert/strict";
import { test } from "node:test";
import { Mirror, Rows, compareNames, rateOf, stepOf } from "../static/app/mirror.js";

const job = (id, more = {}) => ({ job_id: id, stage: "RUNNING", roles: [{ name: "trainer", total: 2 }, { name: "actor", total: 1 }], ...more });

test("columns that are left out stand for defaults, also for rows that had others", () => {
  const rows = new Rows("name", { name: "", reason: "", num: 0 }, (a, b) => compareNames(a.name, b.name));
  rows.apply({ name: ["w-10", "w-2"], reason: ["late", "early"] });
  assert.deepEqual(rows.list, [{ name: "w-2", reason: "early", num: 0 }, { name: "w-10", reason: "late", num: 0 }]);
  rows.apply({ name: ["w-10"], num: [3] });
  assert.deepEqual(rows.get("w-10"), { name: "w-10", reason: "", num: 3 });
  rows.remove(["w-2"]);
  assert.deepEqual(rows.list.map((row) => row.name), ["w-10"]);
  assert.equal(rows.get("w-2"), undefined);
  rows.apply({});
  assert.equal(rows.list.length, 1);
});

test("workers are ordered by role as the job has them, then by rank", () => {
  const mirror = new Mirror();
  const workers = { name: ["a", "b", "c", "d"], role: ["actor", "trainer", "trainer", "actor"], rank: [0, 10, 2, 1], state: Array(4).fill("RUNNING") };
  mirror.apply({ version: 1, at: 10, job: job("j"), workers, events: [] }, true);
  assert.deepEqual(mirror.workers.list.map((worker) => worker.name), ["c", "b", "a", "d"]);
  assert.deepEqual(mirror.workers.get("a").devices, []);
});

test("a whole state forgets what was, changes keep it", () => {
  const mirror = new Mirror();
  const attention = { shown: [{ what: "failed", subject: "a" }], total: 1, urgent: 1 };
  mirror.apply({ version: 1, at: 1, attention, jobs: [job("a"), job("b")], nodes: { node: ["n2", "n1"], state: ["ALIVE", "LOST"] }, events: [{ sequence: 1 }] }, true);
  mirror.apply({ version: 2, at: 2, attention: null, jobs: [job("b", { stage: "STOPPED" })], nodes: {}, gone_jobs: ["a"], gone_nodes: ["n1"], events: [{ sequence: 2 }, { sequence: 1 }] }, false);
  assert.deepEqual(mirror.attention, attention);
  assert.deepEqual([...mirror.jobs.keys()], ["b"]);
  assert.equal(mirror.jobs.get("b").stage, "STOPPED");
  assert.deepEqual(mirror.nodes.list.map((node) => node.node), ["n2"]);
  assert.deepEqual(mirror.events.map((event) => event.sequence), [1, 2]);
  mirror.apply({ version: 9, at: 3, jobs: [], nodes: {}, events: [] }, true);
  assert.equal(mirror.jobs.size + mirror.nodes.list.length + mirror.events.length, 0);
  assert.equal(mirror.version, 9);
});

test("steps a second come from the last points, and are unknown while one step lasts", () => {
  assert.equal(rateOf([{ at: 0, step: 5 }]), null);
  assert.equal(rateOf([{ at: 0, step: 0 }, { at: 10, step: 20 }]), 2);
  assert.equal(rateOf([{ at: 0, step: 7 }, { at: 10, step: 7 }]), null);
  assert.equal(rateOf([{ at: 0, step: 7 }, { at: 40, step: 7 }]), 0);
  assert.equal(rateOf([{ at: 0, step: 70 }, { at: 10, step: 7 }]), null); // it went back to a checkpoint
  const summary = { trainer: { step: null }, actor: { step: { slowest: 1, median: 2, fastest: 3 }, total: 9 } };
  assert.deepEqual(stepOf(job("j", { summary })), { slowest: 1, median: 2, fastest: 3, total: 9, role: "actor" });
  assert.equal(stepOf(job("j")), null);
});

test("10 000 workers: a change of 250 rows touches those alone, and keeps the order", () => {
  const mirror = new Mirror();
  const ranks = [...Array(10000).keys()];
  mirror.apply({ version: 1, at: 1, job: job("j"), workers: { name: ranks.map((rank) => `t-${rank}`), role: ranks.map(() => "trainer"), rank: ranks }, events: [] }, true);
  const [untouched, changed] = [mirror.workers.get("t-9000"), ranks.slice(0, 250)];
  mirror.apply({ version: 2, at: 2, job: job("j"), workers: { name: changed.map((rank) => `t-${rank}`), role: changed.map(() => "trainer"), rank: changed, num_failures: changed.map(() => 1) }, events: [] }, false);
  assert.equal(mirror.workers.get("t-9000"), untouched);
  assert.equal(mirror.workers.list.filter((worker) => worker.num_failures).length, 250);
  assert.deepEqual(mirror.workers.list.map((worker) => worker.rank), ranks);
});
