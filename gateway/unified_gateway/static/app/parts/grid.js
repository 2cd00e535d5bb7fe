// A cell a worker, or a node: colour and letter, on one canvas, of which only what changes is drawn anew.
import { useEffect, useLayoutEffect, useRef, useState } from "../../vendor/vendor.js";
import { html } from "../text.js";
import { colour, look } from "./layout.js";

const SIZES = [[48, 34], [200, 26], [1200, 18], [Infinity, 13]]; // pixels of a cell, by the number of cells
const HEAD = 22;
const LEVELS = 10;

/**
 * @typedef {{tone?: string, level?: number, letter: string}} Look tone, or level from 0 to 9 of a scale
 * @param {object} props
 * @param {{title: string, items: any[]}[]} props.groups
 * @param {(item: any) => Look} props.lookOf
 * @param {(item: any) => string} props.keyOf
 * @param {(item: any) => any} props.describe shown beside the cell
 * @param {(item: any) => string} props.summarise one line about an item, for screen readers
 * @param {(item: any) => void} props.onOpen
 * @param {string} props.label
 */
export function Grid({ groups, lookOf, keyOf, describe, summarise, onOpen, label }) {
  const frame = useRef(null);
  const scroll = useRef(null);
  const canvas = useRef(null);
  const drawn = useRef({ looks: new Map(), shape: "" });
  const [width, setWidth] = useState(0);
  const [at, setAt] = useState(-1);
  const [isOn, setOn] = useState(false);
  const total = groups.reduce((sum, group) => sum + group.items.length, 0);
  const cell = SIZES.find(([most]) => total <= most)[1];
  const plan = layOut(groups, width, cell);
  const current = at >= 0 && at < total ? plan.itemAt(at) : null;

  useLayoutEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    observer.observe(frame.current);
    return () => observer.disconnect();
  }, []);

  useEffect(() => {
    if (width) draw(canvas.current, drawn.current, plan, { lookOf, keyOf, cell, width });
  });
  look.value; // colours have changed: `draw` compares

  const onMove = (event) => {
    const box = canvas.current.getBoundingClientRect();
    const found = plan.indexAt(event.clientX - box.left, event.clientY - box.top);
    setAt(found);
    setOn(found >= 0);
  };
  const onKeyDown = (event) => {
    const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: plan.columns, ArrowUp: -plan.columns, Home: -total, End: total };
    if (event.key in moves) setAt(Math.max(0, Math.min(total - 1, at + moves[event.key])));
    else if (event.key === "Enter" && current) onOpen(current);
    else if (event.key === "Escape") setOn(false);
    else return;
    event.preventDefault();
    if (event.key === "Escape") return;
    const { y } = plan.spotOf(Math.max(0, Math.min(total - 1, at + (moves[event.key] ?? 0))));
    const { scrollTop, clientHeight } = scroll.current;
    if (y < scrollTop || y + cell > scrollTop + clientHeight) scroll.current.scrollTop = y - clientHeight / 2;
    requestAnimationFrame(() => setOn(true)); // after the event of the scroll
  };
  const spot = current && plan.spotOf(at);
  return html`<div class="grid" ref=${frame}>
    <div class="grid-scroll" ref=${scroll} onScroll=${() => setOn(false)}>
      <div class="grid-sheet">
        <canvas ref=${canvas} tabindex="0" role="application" aria-roledescription="grid of cells" onMouseMove=${onMove} onMouseLeave=${() => setOn(false)} onBlur=${() => setOn(false)}
          aria-label=${`${label}, ${total} cells; arrow keys move, Enter opens.${current && isOn ? ` ${summarise(current)}` : ""}`}
          onClick=${() => current && onOpen(current)} onKeyDown=${onKeyDown}>
          <table><caption>${label}</caption><tbody>${groups.map((group) => html`<tr key=${group.title}><th>${group.title}</th><td>${group.items.length}</td></tr>`)}</tbody></table>
        </canvas>
        ${current && isOn && html`<div class="grid-mark" style=${{ left: `${spot.x}px`, top: `${spot.y}px`, width: `${cell - 1}px`, height: `${cell - 1}px` }}></div>`}
      </div>
    </div>
    ${current && isOn && html`<div class="tip" style=${{ top: `${spot.y + cell + 4 - scroll.current.scrollTop}px`, ...(spot.x > width / 2 ? { right: `${width - spot.x - cell}px` } : { left: `${spot.x}px` }) }}>${describe(current)}</div>`}
  </div>`;
}

function layOut(groups, width, cell) {
  const columns = Math.max(1, Math.floor(width / cell));
  const heads = [];
  let y = 0;
  let first = 0;
  for (const { title, items } of groups) {
    heads.push({ title, items, y, first });
    y += HEAD + Math.ceil(items.length / columns) * cell + 6;
    first += items.length;
  }
  const headOf = (index) => heads.findLast((head) => head.first <= index && head.items.length);
  const spotOf = (index) => {
    const head = headOf(index);
    const place = index - head.first;
    return { x: (place % columns) * cell, y: head.y + HEAD + Math.floor(place / columns) * cell };
  };
  const indexAt = (x, y) => {
    const head = heads.findLast((each) => each.y + HEAD <= y);
    const column = Math.floor(x / cell);
    if (!head || column < 0 || column >= columns) return -1;
    const place = Math.floor((y - head.y - HEAD) / cell) * columns + column;
    return place < head.items.length ? head.first + place : -1;
  };
  const itemAt = (index) => headOf(index).items[index - headOf(index).first];
  return { columns, heads, height: y, spotOf, indexAt, itemAt };
}

function draw(canvas, drawn, plan, { lookOf, keyOf, cell, width }) {
  const ratio = devicePixelRatio || 1;
  const shape = `${width} ${plan.height} ${ratio} ${look.value} ${plan.heads.map((head) => `${head.title} ${head.first}`)}`;
  const context = canvas.getContext("2d");
  if (shape !== drawn.shape) {
    canvas.width = width * ratio;
    canvas.height = plan.height * ratio;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${plan.height}px`;
    drawn.looks.clear();
    drawn.sprites = new Map();
    drawn.shape = shape;
    context.scale(ratio, ratio);
    context.font = "600 12px system-ui, sans-serif";
    context.fillStyle = colour("muted");
    context.textBaseline = "middle";
    for (const head of plan.heads) context.fillText(head.title, 0, head.y + HEAD / 2);
  }
  for (const head of plan.heads) {
    for (let place = 0; place < head.items.length; place++) {
      const item = head.items[place];
      const { tone, level, letter } = lookOf(item);
      const kind = `${tone ?? level}${letter}`;
      const key = keyOf(item);
      if (drawn.looks.get(key) === kind) continue;
      drawn.looks.set(key, kind);
      if (!drawn.sprites.has(kind)) drawn.sprites.set(kind, sprite(tone, level, letter, cell, ratio));
      const x = (place % plan.columns) * cell;
      const y = head.y + HEAD + Math.floor(place / plan.columns) * cell;
      context.clearRect(x, y, cell, cell);
      context.drawImage(drawn.sprites.get(kind), x, y, cell, cell);
    }
  }
}

/** The colour of a level of the scale: from the surface to the accent. */
export const levelColour = (level) => `color-mix(in oklab, ${colour("scale-low")} ${100 - (100 * level) / (LEVELS - 1)}%, ${colour("scale-high")})`;

function sprite(tone, level, letter, cell, ratio) {
  const canvas = new OffscreenCanvas(cell * ratio, cell * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.fillStyle = tone ? colour(`cell-${tone}`) : levelColour(level);
  context.beginPath();
  context.roundRect(0, 0, cell - 1, cell - 1, cell > 16 ? 3 : 1);
  context.fill();
  context.fillStyle = tone ? colour(`on-${tone}`) : colour(level < LEVELS / 2 ? "on-low" : "on-high");
  context.font = `600 ${Math.max(8, Math.round(cell * 0.5))}px system-ui, sans-serif`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillText(letter, (cell - 1) / 2, cell / 2 + 0.5);
  return canvas;
}
