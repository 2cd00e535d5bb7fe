// The account of a job's time: as time passes the page counts on, like `unified status`, though no message comes.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { Mirror, etaOf, secondsAt } from "../static/app/mirror.js";
import { queuesOf, stageOf, stalledSince, toneOf } from "../static/app/states.js";

const cases = JSON.parse(readFileSync(new URL("accounts.json", import.meta.url), "utf8"));
const spent = (seconds) => Object.fromEntries(Object.entries(seconds).filter(([, value]) => value > 0));

test("the page counts the seconds of each phase as TimeSpent.at does", () => {
  assert.ok(cases.length > 0);
  for (const { times, now, seconds } of cases) assert.deepEqual(spent(secondsAt(times, now)), spent(seconds), JSON.stringify({ times, now }));
});

test("a job is stalled for the page when it is for `unified status`", () => {
  for (const { times, now, stalled_since: since } of cases) assert.equal(stalledSince({ times }, now), since, JSON.stringify({ times, now }));
  assert.equal(stalledSince({ times: null }, 1e9) ?? null, null);
});

test("a job that stalls is no longer green, and nothing says when it will be done", () => {
  const job = { job_id: "j", stage: "RUNNING", started_at: 1000, roles: [{ name: "t" }], summary: { t: { step: { median: 4 }, total: 8 } }, times: cases[0].times };
  assert.deepEqual([1039, 1040].map((now) => [stageOf(job, now), toneOf(stageOf(job, now))]), [["RUNNING", "good"], ["STALLED", "bad"]]);
  assert.ok(etaOf(job, [], 1039) > 0);
  assert.equal(etaOf(job, [], 1040), null);
});

test("a queue has its owner, and the workers that have waited there for long", () => {
  const worker = (rank, queues, load = null) => ({ role: "w", rank, progress: { queues, load } });
  const workers = [
    worker(0, [["", "puts", "q", false]], { queues: { q: [3, 8, 1010], idle: [0, 8, 0] } }), worker(1, [["main", "gets", "q", true]]),
    worker(2, [["main", "puts", "q", true], ["main", "gets", "other", true]]), { role: "w", rank: 3, progress: null },
  ];
  const [q, idle] = queuesOf(workers);
  assert.deepEqual(q, { name: "q", owner: "w-0", depth: 3, size: 8, oldestAt: 1010, getters: ["w-1"], putters: ["w-2"] });
  assert.deepEqual([idle.getters, idle.putters], [[], []]);
  assert.deepEqual(queuesOf([]), []);
});

test("a job that stalls has a growing share of stalled time without a message about it", () => {
  const mirror = new Mirror();
  const { times } = cases[0];
  mirror.apply({ version: 1, at: 1049, jobs: [{ job_id: "j", roles: [], times }], events: [] }, true);
  const share = (now) => Math.round((100 * secondsAt(mirror.jobs.get("j").times, now).stalled) / (now - 1000));
  assert.deepEqual([1049, 1240].map(share), [18, 83]);
});
