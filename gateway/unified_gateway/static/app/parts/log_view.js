// Logs of workers, live: colours, folded lines, search, wrap; the page has only the lines that are seen.
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "../../vendor/vendor.js";
import { count, grepPattern, stamp } from "../format.js";
import { firstTrouble, lineAt, LogLines, rowsOf } from "../log_lines.js";
import { call } from "../session.js";
import { poll } from "../stream.js";
import { html } from "../text.js";
import { Empty, Failed, Search } from "./bits.js";
import { say } from "./dialog.js";

const ROW = 18;
const SPARE = 20;
const STAMP = 22; // columns
const FIRST_BYTES = 65536;
const PERIOD_S = 1.5;
const MAX_DOWNLOAD = 256e6;

/**
 * @param {object} props
 * @param {string} props.jobId
 * @param {{name: string, title: string}[]} props.workers whose logs are shown
 * @param {"both"|"out"|"err"} props.stream @param {string} [props.incarnation] @param {boolean} props.isOver true if nothing more will be printed
 */
export function LogView({ jobId, workers, stream, incarnation = "", isOver }) {
  const [log, setLog] = useState(null);
  const [, setVersion] = useState(0);
  const [error, setError] = useState("");
  const [find, setFind] = useState("");
  const [isWrapped, setWrapped] = useState(true);
  const [isFolded, setFolded] = useState(true);
  const [hasTimes, setTimes] = useState(false);
  const [follows, setFollows] = useState(true);
  const [isWhole, setWhole] = useState(false);
  const key = `${jobId} ${stream} ${incarnation} ${isOver} ${isWhole} ${workers.map((worker) => worker.name)}`;

  useEffect(() => {
    const fresh = new LogLines();
    const streams = stream === "both" ? ["out", "err"] : [stream];
    const sources = workers.flatMap(({ name, title }) => streams.map((each) => ({ name, title, stream: each, isErr: each === "err" && stream === "both", next: 0, incarnation: null, isDone: false })));
    if (!isWhole) for (const source of sources) source.next = -Math.floor(FIRST_BYTES / sources.length); // of many the newest of each
    setLog(fresh);
    setError("");
    const read = async (source) => {
      const found = await readLog(jobId, source.name, source.stream, incarnation, source.next, isWhole ? 1 << 20 : FIRST_BYTES, "1");
      const isNew = source.incarnation !== null && found.incarnation !== source.incarnation;
      source.incarnation = found.incarnation;
      if (isNew) {
        fresh.finish(source);
        fresh.add(source, `── incarnation ${found.incarnation} ──\n`);
        source.next = 0;
        return;
      }
      source.next = found.next_offset;
      fresh.add(source, found.text, found.times);
      if (found.is_final && found.next_offset >= found.size) {
        fresh.finish(source);
        source.isDone = isOver;
      }
    };
    return poll(async () => {
      const reads = sources.filter((source) => !source.isDone).map((source) => read(source).then(() => "", (failure) => `${source.title}: ${failure.message}`));
      setError((await Promise.all(reads)).find((text) => text) ?? "");
      setVersion(fresh.version);
    }, PERIOD_S);
  }, [key]);

  const shown = useMemo(() => log?.shown({ find, isFolded }) ?? [], [log, log?.version, find, isFolded]);
  const [target, setTarget] = useState(-1);
  const trouble = useMemo(() => firstTrouble(shown), [shown]);
  const download = () => downloadLog(jobId, workers[0], stream, incarnation).catch((failure) => say(failure.message, "bad"));
  return html`<div class="log">
    <div class="tools">
      <${Search} value=${find} onInput=${setFind} label="show lines with …" />
      ${toggle("follow", follows, setFollows)}${toggle("wrap", isWrapped, setWrapped)}${toggle("from the start", isWhole, setWhole)}
      ${toggle("fold equal lines", isFolded, setFolded)}${toggle("times", hasTimes, setTimes)}
      <button type="button" disabled=${trouble < 0} onClick=${() => { setFollows(false); setTarget(trouble); }}>first error</button>
      <button type="button" disabled=${workers.length !== 1} title=${workers.length === 1 ? "the whole log" : "choose one worker"} onClick=${download}>download</button>
      <span class="muted log-count">${count(shown.length, "line")}${find && log ? ` of ${log.lines.length}` : ""}</span>
    </div>
    ${error && html`<${Failed} error=${error} />`}
    ${shown.length > 0 ? html`<${Lines} lines=${shown} isWrapped=${isWrapped} follows=${follows} setFollows=${setFollows} target=${target} setTarget=${setTarget} find=${find} isMany=${workers.length > 1} hasTimes=${hasTimes} />`
      : html`<${Empty} text=${find ? "No line that was read has this in it." : "Nothing was printed yet."} command=${find ? `unified logs ${jobId} --grep=${grepPattern(find)}` : ""} />`}
  </div>`;
}

const toggle = (title, isOn, turn) => html`<button type="button" aria-pressed=${isOn} onClick=${() => turn(!isOn)}>${title}</button>`;

function readLog(jobId, worker, stream, incarnation, offset, maxBytes, times = "") {
  const query = new URLSearchParams({ worker, stream, offset, max_bytes: maxBytes, times, ...(incarnation && { incarnation }) });
  return call(`/jobs/${encodeURIComponent(jobId)}/logs?${query}`);
}

/** The lines that are seen, each as high as it has rows. */
function Lines({ lines, isWrapped, follows, setFollows, target, setTarget, find, isMany, hasTimes }) {
  const frame = useRef(null);
  const known = useRef(0);
  const [view, setView] = useState({ top: 0, height: 400, columns: 100 });
  const prefix = isMany ? Math.min(16, Math.max(...lines.slice(-200).map((line) => line.who.length))) + 1 : 0;
  const columns = Math.max(10, view.columns - (hasTimes ? STAMP : 0) - prefix - 6);
  const rows = useMemo(() => rowsOf(lines, isWrapped ? columns : 0), [lines, isWrapped, columns]);
  const first = Math.max(0, lineAt(rows, Math.floor(view.top / ROW)) - SPARE);
  const last = Math.min(lines.length, lineAt(rows, Math.ceil((view.top + view.height) / ROW)) + SPARE);

  useLayoutEffect(() => {
    const measure = frame.current.querySelector(".measure");
    const observer = new ResizeObserver(() => {
      const { clientHeight: height, clientWidth: width, scrollTop: top } = frame.current;
      setView({ top, height, columns: Math.floor((width - 16) / (measure.getBoundingClientRect().width / 20)) });
    });
    observer.observe(frame.current);
    return () => observer.disconnect();
  }, []);
  useLayoutEffect(() => {
    if (follows) frame.current.scrollTop = frame.current.scrollHeight;
  }, [follows, rows]);
  useLayoutEffect(() => {
    if (target < 0) return;
    frame.current.scrollTop = Math.max(0, rows[Math.min(target, lines.length)] * ROW - 60);
    setTarget(-1);
  }, [target]);
  const onScroll = (event) => {
    const { scrollTop: top, clientHeight: height, scrollHeight } = event.currentTarget;
    const isMoved = scrollHeight === known.current; // by the user, and not since lines came or were laid out anew
    known.current = scrollHeight;
    if (follows && isMoved && top < view.top - 4) setFollows(false);
    else if (!follows && top + height >= scrollHeight - 4) setFollows(true);
    setView({ ...view, top, height });
  };
  return html`<div class="lines ${isWrapped ? "wraps" : ""}" ref=${frame} tabindex="0" role="log" aria-live="off" aria-label="lines of the log" onScroll=${onScroll}>
    <span class="measure" aria-hidden="true">${"0".repeat(20)}</span>
    <div class="sheet" style=${{ height: `${rows[lines.length] * ROW}px` }}>${lines.slice(first, last).map((line, index) => html`
      <div key=${line.id} class="line ${line.isErr ? "err" : ""}" style=${{ top: `${rows[first + index] * ROW}px`, height: `${(rows[first + index + 1] - rows[first + index]) * ROW}px` }}>
        ${hasTimes && html`<span class="at" style=${{ width: `${STAMP}ch` }}>${line.time ? stamp(line.time) : ""}</span>`}
        ${isMany && html`<span class="who" style=${{ width: `${prefix}ch` }} title=${line.by ? [...line.by].join(", ") : line.who}>${line.by?.size > 1 ? `${line.by.size} workers` : line.who}</span>`}
        <span class="times" title=${line.times > 1 ? `${line.times} times, by ${count(line.by?.size ?? 1, "worker")}` : undefined}>${line.times > 1 ? `×${line.times}` : ""}</span>
        <span class="words" style=${isWrapped ? { width: `${columns}ch` } : {}}>${line.spans.map((span) => html`<span class=${span.name}>${marked(span.text.replaceAll("\t", "    "), find)}</span>`)}</span>
      </div>`)}</div>
  </div>`;
}

function marked(text, find) {
  const place = find ? text.toLowerCase().indexOf(find.toLowerCase()) : -1;
  if (place < 0) return text;
  const end = place + find.length;
  return [text.slice(0, place), html`<mark>${text.slice(place, end)}</mark>`, ...[marked(text.slice(end), find)].flat()];
}

async function downloadLog(jobId, worker, stream, incarnation) {
  const parts = [];
  for (const each of stream === "both" ? ["out", "err"] : [stream]) {
    let [offset, size] = [0, 1];
    if (stream === "both") parts.push(`==> std${each} <==\n`);
    while (offset < size && offset < MAX_DOWNLOAD) {
      const read = await readLog(jobId, worker.name, each, incarnation, offset, 1 << 20);
      parts.push(read.text);
      if (read.next_offset <= offset) break;
      [offset, size] = [read.next_offset, read.size];
    }
  }
  saveAs(`${jobId}-${worker.title}.log`, parts, "text/plain");
}

/** Let the browser save a file. @param {string} name @param {string[]} parts @param {string} type */
export function saveAs(name, parts, type) {
  const url = URL.createObjectURL(new Blob(parts, { type }));
  const link = Object.assign(document.createElement("a"), { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}
