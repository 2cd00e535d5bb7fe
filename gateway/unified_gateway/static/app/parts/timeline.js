// Lanes on a canvas: drag or arrows to move, wheel or + and - to zoom.
import { useEffect, useLayoutEffect, useRef, useState } from "../../vendor/vendor.js";
import { clock, duration } from "../format.js";
import { html, visible } from "../text.js";
import { isNarrow } from "./bits.js";
import { colour, look } from "./layout.js";

const LANE = 24;
const AXIS = 26;
const STEPS = [0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400];

/** @param {{lanes: import("../lanes.js").Lane[], start: number, end: number, isLive: boolean}} props */
export function Timeline({ lanes, start, end, isLive }) {
  const frame = useRef(null);
  const canvas = useRef(null);
  const drag = useRef(null);
  const [width, setWidth] = useState(0);
  const [top, setTop] = useState(0);
  const [range, setRange] = useState(null);
  const [tip, setTip] = useState(null);
  const names = isNarrow.value ? 96 : 180;
  const whole = { from: start, to: Math.max(end, start + 1) };
  const { from, to } = range ?? whole;
  const height = Math.min(560, lanes.length * LANE + AXIS);
  const scale = { x: (at) => names + ((at - from) / (to - from)) * (width - names), at: (x) => from + ((x - names) / (width - names)) * (to - from) };

  useLayoutEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    observer.observe(frame.current);
    return () => observer.disconnect();
  }, []);
  useEffect(() => {
    if (width) draw(canvas.current, { lanes, top, width, height, names, from, to, scale });
  });
  look.value;

  const zoom = (factor, middle = (from + to) / 2) => {
    const next = { from: middle - (middle - from) * factor, to: middle + (to - middle) * factor };
    setRange(next.to - next.from >= whole.to - whole.from ? null : next.to - next.from > 0.05 ? next : { from, to });
  };
  const move = (share) => setRange({ from: from + (to - from) * share, to: to + (to - from) * share });
  const onWheel = (event) => {
    if (!event.ctrlKey && !event.shiftKey) return; // the page scrolls
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, scale.at(event.clientX - canvas.current.getBoundingClientRect().left));
  };
  const onKeyDown = (event) => {
    const acts = { "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1.7), ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2), 0: () => setRange(null),
      ArrowDown: () => (frame.current.scrollTop += LANE), ArrowUp: () => (frame.current.scrollTop -= LANE) };
    if (!acts[event.key] || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    acts[event.key]();
  };
  const onMove = (event) => {
    const box = canvas.current.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    if (drag.current) {
      const moved = ((drag.current.x - x) / (width - names)) * (drag.current.to - drag.current.from);
      setRange({ from: drag.current.from + moved, to: drag.current.to + moved });
      return;
    }
    const lane = lanes[Math.floor((y - AXIS + top) / LANE)];
    const found = y > AXIS && lane && hit(lane, scale, x);
    setTip(found ? { ...found, lane, x, y } : null);
  };
  return html`<div class="timeline">
    <div class="timeline-tools" role="group" aria-label="zoom">
      <button type="button" aria-label="zoom in" onClick=${() => zoom(0.6)}>+</button>
      <button type="button" aria-label="zoom out" onClick=${() => zoom(1.7)}>−</button>
      <button type="button" onClick=${() => setRange(null)}>all</button>
      <span class="muted">${clock(from)} to ${range ? clock(to) : isLive ? "now" : clock(to)}, ${duration(to - from)}. Ctrl and wheel zoom, drag moves.</span>
    </div>
    <div class="timeline-scroll" ref=${frame} style=${{ height: `${height}px` }} onScroll=${(event) => setTop(event.currentTarget.scrollTop)}>
      <canvas ref=${canvas} tabindex="0" role="img" aria-label="timeline of ${lanes.length} lanes; the page Why has the same as text. Plus and minus zoom, arrows move."
        onWheel=${onWheel} onKeyDown=${onKeyDown} onMouseMove=${onMove} onMouseLeave=${() => { drag.current = null; setTip(null); }}
        onMouseDown=${(event) => (drag.current = { x: event.clientX - canvas.current.getBoundingClientRect().left, from, to })} onMouseUp=${() => (drag.current = null)}></canvas>
      <div style=${{ height: `${Math.max(0, lanes.length * LANE + AXIS - height)}px` }}></div>
    </div>
    ${tip && html`<div class="tip" style=${{ top: `${tip.y + 64}px`, ...(tip.x > width / 2 ? { right: `${width - tip.x}px` } : { left: `${tip.x}px` }) }}>
      <b>${tip.lane.name}</b> <span class="muted">${tip.when}</span><br />${tip.text}</div>`}
  </div>`;
}

function hit(lane, scale, x) {
  const mark = lane.marks.findLast((each) => Math.abs(scale.x(each.at) - x) < 6);
  if (mark) return { text: `${mark.event}: ${mark.text}`, when: clock(mark.at) };
  const span = lane.spans.findLast((each) => scale.x(each.start) <= x && x <= scale.x(each.end));
  return span && { text: span.label, when: `${clock(span.start)}, ${duration(span.end - span.start)}` };
}

function draw(canvas, { lanes, top, width, height, names, from, to, scale }) {
  const ratio = devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "middle";
  const first = Math.max(0, Math.floor(top / LANE) - 1);
  for (let index = first; index < Math.min(lanes.length, first + height / LANE + 2); index++) {
    drawLane(context, lanes[index], AXIS + index * LANE - top, { width, names, scale });
  }
  context.fillStyle = colour("surface");
  context.fillRect(0, 0, width, AXIS);
  context.strokeStyle = colour("line");
  context.fillStyle = colour("muted");
  const step = STEPS.find((each) => (to - from) / each < (width - names) / 90) ?? 86400 * 7;
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) {
    const x = Math.round(scale.x(at)) + 0.5;
    context.beginPath();
    context.moveTo(x, AXIS - 6);
    context.lineTo(x, height);
    context.globalAlpha = 0.6;
    context.stroke();
    context.globalAlpha = 1;
    if (x < width - 56) context.fillText(step < 1 ? (at % 60).toFixed(1) : clock(at), x + 4, AXIS / 2);
  }
}

function drawLane(context, lane, y, { width, names, scale }) {
  context.fillStyle = colour(lane.kind === "worker" || lane.kind === "node" ? "muted" : "text");
  const label = visible(lane.name);
  context.fillText(label.length > names / 7 ? `${label.slice(0, names / 7 - 1)}…` : label, 4, y + LANE / 2);
  context.save();
  context.beginPath();
  context.rect(names, y, width - names, LANE);
  context.clip();
  for (const span of lane.spans) {
    const x = scale.x(span.start);
    const size = Math.max(2, scale.x(span.end) - x - 1);
    context.fillStyle = colour({ run: "cell-good", failed: "cell-bad", done: "cell-done", round: "cell-busy" }[span.tone]);
    context.fillRect(x, y + 5, size, LANE - 10);
    if (size > 70 && span.tone === "round") {
      context.fillStyle = colour("on-busy");
      context.fillText(visible(span.short), x + 4, y + LANE / 2);
    }
  }
  for (const mark of lane.marks) {
    const x = scale.x(mark.at);
    context.fillStyle = colour(mark.tone);
    context.strokeStyle = colour("surface");
    context.beginPath(); // a bad mark is a diamond, any other a triangle
    context.moveTo(x, y + 3);
    context.lineTo(x + 6, y + (mark.tone === "bad" ? LANE / 2 : LANE - 4));
    if (mark.tone === "bad") context.lineTo(x, y + LANE - 3);
    context.lineTo(x - 6, y + (mark.tone === "bad" ? LANE / 2 : LANE - 4));
    context.closePath();
    context.fill();
    context.stroke();
  }
  context.restore();
}
