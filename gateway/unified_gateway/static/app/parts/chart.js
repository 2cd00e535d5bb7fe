// Charts of series: uPlot with our colours, a band of what all ranks reported, and restarts as lines.
import { uPlot, useLayoutEffect, useRef, useState } from "../../vendor/vendor.js";
import { clock, number } from "../format.js";
import { html } from "../text.js";
import { colour, look } from "./layout.js";

const HEIGHT = 180;
const told = (_, values) => values.map((value) => (value == null ? "" : number(value)));

/**
 * @param {object} props
 * @param {string} props.title
 * @param {number[]} props.x @param {(number|null)[]} props.mean
 * @param {(number|null)[]} [props.low] @param {(number|null)[]} [props.high] band around the mean
 * @param {boolean} [props.isTime] true if x is seconds since 1970, else steps
 * @param {number[]} [props.marks] values of x at which something happened
 */
export function Chart({ title, x, mean, low, high, isTime = false, marks = [] }) {
  const frame = useRef(null);
  const plot = useRef(null);
  const marked = useRef(marks);
  const [at, setAt] = useState(null);
  marked.current = marks;
  const hasBand = !!low && low.some((value, index) => value !== high[index]);
  /** @type {any} */
  const data = hasBand ? [x, high, low, mean] : [x, mean];

  useLayoutEffect(() => {
    const line = colour("line");
    const axis = { stroke: colour("muted"), grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, font: "11px system-ui, sans-serif" };
    const edge = { stroke: "transparent", points: { show: false } };
    const series = [{}, ...(hasBand ? [edge, edge] : []), { stroke: colour("accent"), width: 1.5, points: { show: x.length < 3 } }];
    plot.current = new uPlot({
      width: frame.current.clientWidth || 300,
      height: HEIGHT,
      legend: { show: false },
      cursor: { drag: { x: true, y: false }, sync: { key: isTime ? "time" : "step" } },
      scales: { x: { time: isTime } },
      axes: [{ ...axis, size: 32, ...(!isTime && { values: told }) }, { ...axis, size: 64, values: told }],
      padding: [8, 8, 0, 0],
      series,
      bands: hasBand ? [{ series: [1, 2], fill: colour("band") }] : [],
      hooks: { draw: [(drawn) => drawMarks(drawn, marked.current)], setCursor: [(drawn) => setAt(drawn.cursor.idx ?? null)] },
    }, data, frame.current);
    const observer = new ResizeObserver(([entry]) => plot.current?.setSize({ width: Math.floor(entry.contentRect.width), height: HEIGHT }));
    observer.observe(frame.current);
    return () => {
      observer.disconnect();
      plot.current.destroy();
      plot.current = null;
    };
  }, [look.value, hasBand, isTime, x.length < 3]);
  useLayoutEffect(() => plot.current?.setData(data), [x, mean]);

  const index = at != null && at < x.length ? at : x.length - 1;
  const where = x.length ? (isTime ? clock(x[index]) : `step ${number(x[index])}`) : "";
  const band = hasBand ? ` (${number(low[index])} to ${number(high[index])})` : "";
  return html`<figure class="chart" role="group" aria-label="${title}: ${number(mean[index])} at ${where}">
    <figcaption><b>${title}</b><span>${number(mean[index])}<span class="muted">${band} ${where}</span></span></figcaption>
    <div ref=${frame} class="plot" aria-hidden="true"></div>
  </figure>`;
}

function drawMarks(plot, marks) {
  const { ctx: context, bbox: box } = plot;
  context.save();
  context.strokeStyle = colour("warn");
  context.setLineDash([4, 4]);
  context.lineWidth = devicePixelRatio || 1;
  for (const mark of marks) {
    const x = plot.valToPos(mark, "x", true);
    if (x < box.left || x > box.left + box.width) continue;
    context.beginPath();
    context.moveTo(x, box.top);
    context.lineTo(x, box.top + box.height);
    context.stroke();
  }
  context.restore();
}
