// Texts of others: colours are kept, everything that could do harm is shown or gone.
import assert from "node:assert/strict";
import { test } from "node:test";
import { parseLine, plain, stripped } from "../static/app/ansi.js";
import { bytes, duration, grepPattern, number } from "../static/app/format.js";
import { lanesOf } from "../static/app/lanes.js";
import { LogLines, firstTrouble, lineAt, rowsOf } from "../static/app/log_lines.js";
import { match } from "../static/app/router.js";
import { visible } from "../static/app/text.js";

const ESC = "\u001b";
const spansOf = (line) => parseLine(line).spans.map(({ text, name }) => [text, name]);

test("colours become classes, and go on in the next line", () => {
  assert.deepEqual(spansOf(`${ESC}[1;31mred${ESC}[0m plain`), [["red", "bold fg-1"], [" plain", ""]]);
  assert.deepEqual(spansOf(`${ESC}[38;5;196ma${ESC}[48;2;0;0;255mb${ESC}[39;49mc`), [["a", "fg-9"], ["b", "fg-9 bg-12"], ["c", ""]]);
  assert.deepEqual(spansOf(`${ESC}[7mturned`), [["turned", "fg-inverse bg-inverse"]]);
  const { style } = parseLine(`${ESC}[32m`);
  assert.equal(parseLine("next", style).spans[0].name, "fg-2");
  assert.deepEqual(parseLine(`${ESC}[m`, style).style, plain());
});

test("links, titles and movements of the cursor go", () => {
  assert.equal(stripped(`a ${ESC}]8;;javascript:alert(1)\u0007link${ESC}]8;;\u0007 b`), "a link b");
  assert.equal(stripped(`${ESC}]0;title${ESC}\\x${ESC}[2J${ESC}[10;10Hy`), "xy");
  assert.deepEqual(spansOf(`${ESC}[38;5;999mx${ESC}[38;2my`), [["xy", ""]]);
  assert.equal(stripped(`half ${ESC}[3`), "half 3");
});

test("of a line that was written over the last state is left", () => {
  assert.equal(stripped("  0%\r 50%\r100%"), "100%");
  assert.equal(stripped("100%\r"), "100%");
});

test("what cannot be seen, or turns text around, is shown as an escape", () => {
  assert.equal(visible("a\u0000b\u202ec\u200bd\u2066e\rf"), "a\\x00b\\u202ec\\u200bd\\u2066e\\rf");
  assert.equal(visible("größe 日本 tab\tnew\nline"), "größe 日本 tab\tnew\nline");
});

test("equal lines of many workers are one, of one worker only if they follow each other", () => {
  const log = new LogLines();
  const [a, b] = [{ title: "t-0" }, { title: "t-1" }];
  log.add(a, "start\nepoch\nepoch\nend\nepoch\n");
  log.add(b, "start\nepoch\npart");
  const shown = log.shown({}).map((line) => [line.text, line.times, line.by?.size ?? 1]);
  assert.deepEqual(shown, [["start", 2, 2], ["epoch", 2, 1], ["end", 1, 1], ["epoch", 2, 2]]);
  assert.equal(log.shown({ isFolded: false }).length, 7);
  assert.equal(log.shown({ find: "EPOCH", isFolded: false }).length, 4);
  log.finish(b);
  assert.equal(log.shown({}).at(-1).text, "part");
  assert.equal(firstTrouble([{ text: "<img onerror=x>" }, { text: "ValueError: no" }]), 1);
});

test("lines of several streams are in the order of time, those of one stream as they were written", () => {
  const log = new LogLines();
  const [a, b, old] = [{ title: "t-0" }, { title: "t-1" }, { title: "t-2" }];
  log.add(a, "1\n4\nclock set back\n", [[0, 10], [1, 40], [2, 20]]);
  log.add(old, "no times\n");
  log.add(b, "2\n3\n5", [[0, 20], [0, 21], [1, 30], [2, 50]]);
  log.add(b, "\n6\n", [[0, 50], [1, 60]]);
  log.add(a, "new incarnation\n");
  log.add(a, "the end", [[0, 55]]);
  log.finish(a);
  const shown = log.shown({});
  const texts = ["no times", "1", "2", "3", "4", "clock set back", "new incarnation", "5", "the end", "6"];
  assert.deepEqual(shown.map((line) => line.text), texts);
  assert.deepEqual(shown.map((line) => line.time), [0, 10, 21, 30, 40, 20, 0, 50, 55, 60]);
});

test("the newest lines are kept", () => {
  const log = new LogLines();
  log.add({ title: "t-0" }, "new\n".repeat(19000), [[0, 20]]);
  log.add({ title: "t-1" }, "old\n".repeat(19000), [[0, 10]]);
  const texts = log.shown({ isFolded: false }).map((line) => line.text);
  assert.deepEqual([texts.length, texts[0], texts.indexOf("new")], [20000, "old", 1000]);
});

test("a line without an end is shown in parts before it fills the browser", () => {
  const log = new LogLines();
  const source = { title: "t-0" };
  log.add(source, "50 %");
  assert.equal(log.lines.length, 0);
  for (let i = 0; i < 3; i++) log.add(source, "y".repeat(20000));
  log.add(source, "end\n");
  assert.deepEqual(log.lines.map((line) => line.text.length), [20004, 20000, 20000, 3]);
});

test("rows of wrapped lines", () => {
  const rows = rowsOf([{ text: "x".repeat(25) }, { text: "" }, { text: "日本語日本語" }], 10);
  assert.deepEqual([...rows], [0, 3, 4, 6]);
  assert.deepEqual([0, 2, 3, 5].map((row) => lineAt(rows, row)), [0, 0, 1, 2]);
});

test("paths lead to pages", () => {
  assert.deepEqual(match("/"), { page: "overview", id: "", tab: "" });
  assert.deepEqual(match("/jobs/a%20b/logs"), { page: "job", id: "a b", tab: "logs" });
  assert.deepEqual(match("/nodes/n%E0%A4%A"), { page: "node", id: "n%E0%A4%A", tab: "" });
  assert.equal(match("/nowhere").page, "unknown");
});

test("numbers as people read them", () => {
  assert.deepEqual([12345, 0.00002, 2.34567, 41650.4, "x", null].map(number), ["12\u202f345", "2.00e-5", "2.346", "41\u202f650", "x", "-"]);
  assert.deepEqual([0.42, 200, 7500, 90000].map(duration), ["0.4 s", "3 min 20 s", "2 h 5 min", "1 d 1 h"]);
  assert.equal(bytes(95.4e6), "95.4 MB");
});

test("a text is found by a pattern that a shell passes on as it is", () => {
  assert.equal(grepPattern("it's (nan"), String.raw`'(?i)it'\''s \(nan'`);
  assert.equal(grepPattern("-x $HOME\\[1]"), String.raw`'(?i)-x \$HOME\\\[1\]'`);
});

const event = (sequence, at, word, more = {}) => ({ sequence, at, event: word, reason: word, job: "j", role: "t", worker: "", node: "", ...more });

test("lanes: an incarnation lasts from its start to its failure, the others to the restart", () => {
  const starts = (at) => [event(at, at, "worker-starts", { worker: "w-0", node: "n" }), event(at, at, "worker-starts", { worker: "w-1", node: "n" })];
  const events = [event(0, 0, "job-submitted"), ...starts(1), event(3, 2, "round-sealed", { reason: "round 1 of role t" }), event(4, 2, "job-running"),
    event(5, 8, "worker-failed", { worker: "w-1", node: "n" }), event(6, 8, "job-restarts"), ...starts(9)];
  const { lanes } = lanesOf(events, 20, "worker");
  assert.deepEqual(lanes.map((lane) => lane.name), ["job", "t", "w-1", "w-0"]);
  const spans = (name) => lanes.find((lane) => lane.name === name).spans.map(({ start, end, tone }) => [start, end, tone]);
  assert.deepEqual(spans("w-1"), [[1, 8, "failed"], [9, 20, "run"]]);
  assert.deepEqual(spans("w-0"), [[1, 8, "run"], [9, 20, "run"]]);
  assert.deepEqual(spans("t"), [[2, 8, "round"]]);
});
