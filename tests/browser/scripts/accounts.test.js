// The account of a job's time: as time passes the page counts on, like `unified status`, though no message comes.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { Mirror, secondsAt } from "../static/app/mirror.js";

const cases = JSON.parse(readFileSync(new URL("accounts.json", import.meta.url), "utf8"));
const spent = (seconds) => Object.fromEntries(Object.entries(seconds).filter(([, value]) => value > 0));

test("the page counts the seconds of each phase as TimeSpent.at does", () => {
  assert.ok(cases.length > 0);
  for (const { times, now, seconds } of cases) assert.deepEqual(spent(secondsAt(times, now)), spent(seconds), JSON.stringify({ times, now }));
});

test("a job that stalls has a growing share of stalled time without a message about it", () => {
  const mirror = new Mirror();
  const { times } = cases[0];
  mirror.apply({ version: 1, at: 1049, jobs: [{ job_id: "j", roles: [], times }], events: [] }, true);
  const share = (now) => Math.round((100 * secondsAt(mirror.jobs.get("j").times, now).stalled) / (now - 1000));
  assert.deepEqual([1049, 1240].map(share), [18, 83]);
});
