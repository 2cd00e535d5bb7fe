// A table of any number of rows, of which the page has only those that are seen.
import { useEffect, useMemo, useRef, useState } from "../../vendor/vendor.js";
import { compareNames } from "../mirror.js";
import { html } from "../text.js";
import { isNarrow } from "./bits.js";

const ROW = 32;
const SPARE = 6;

/**
 * @param {object} props
 * @param {{id: string, title: string, width: string, cell: (row: any) => any, sort?: (row: any) => any, isNumber?: boolean, isWide?: boolean}[]}
 *   props.columns columns; those with `isWide` are left out on a narrow screen
 * @param {any[]} props.rows in the order in which they are shown unless the user sorts
 * @param {(row: any) => string} props.keyOf
 * @param {(row: any) => void} props.onOpen called on Enter and on a click
 * @param {string} props.label @param {number} [props.height] most pixels
 */
export function VirtualTable({ columns, rows, keyOf, onOpen, label, height = 640 }) {
  const frame = useRef(null);
  const [top, setTop] = useState(0);
  const [active, setActive] = useState(-1);
  const [order, setOrder] = useState(null);
  const shown = columns.filter((column) => !(column.isWide && isNarrow.value));
  const sorted = useMemo(() => sortRows(rows, columns, order), [rows, order]);
  const size = Math.min(height, sorted.length * ROW + ROW + 2);
  const first = Math.max(0, Math.floor(top / ROW) - SPARE);
  const last = Math.min(sorted.length, Math.ceil((top + size) / ROW) + SPARE);
  const template = shown.map((column) => column.width).join(" ");
  const id = `table-${label.replace(/\W/g, "-")}`;

  useEffect(() => {
    if (active < 0) return;
    const { current } = frame;
    const at = active * ROW;
    if (at < current.scrollTop) current.scrollTop = at;
    else if (at + 2 * ROW > current.scrollTop + current.clientHeight) current.scrollTop = at + 2 * ROW - current.clientHeight;
  }, [active]);

  const onKeyDown = (event) => {
    if (event.target !== frame.current) return;
    const page = Math.max(1, Math.floor(size / ROW) - 2);
    const moves = { ArrowDown: active + 1, ArrowUp: active - 1, PageDown: active + page, PageUp: active - page, Home: 0, End: sorted.length - 1 };
    if (event.key in moves) setActive(Math.max(0, Math.min(sorted.length - 1, moves[event.key])));
    else if (event.key === "Enter" && sorted[active]) onOpen?.(sorted[active]);
    else return;
    event.preventDefault();
  };
  const sortBy = (column) => setOrder(order?.id !== column.id ? { id: column.id, isDown: !!column.isNumber } : order.isDown === !!column.isNumber ? { id: column.id, isDown: !column.isNumber } : null);
  const ariaSort = (column) => (order?.id !== column.id ? "none" : order.isDown ? "descending" : "ascending");

  return html`<div class="table ${onOpen ? "opens" : ""}" ref=${frame} role="grid" tabindex="0" aria-label=${label} aria-rowcount=${sorted.length + 1}
      aria-activedescendant=${active >= first && active < last ? `${id}-${active}` : undefined} style=${{ maxHeight: `${size}px` }}
      onScroll=${(event) => setTop(event.currentTarget.scrollTop)} onKeyDown=${onKeyDown}>
    <div class="table-head" role="rowgroup"><div class="row" role="row" aria-rowindex="1" style=${{ gridTemplateColumns: template }}>${shown.map((column) => html`
      <div key=${column.id} role="columnheader" aria-sort=${column.sort ? ariaSort(column) : undefined} class=${column.isNumber ? "number" : ""}>
        ${column.sort ? html`<button type="button" class="sort ${ariaSort(column)}" onClick=${() => sortBy(column)}>${column.title}</button>` : html`<span>${column.title}</span>`}
      </div>`)}</div></div>
    <div class="table-body" role="rowgroup" style=${{ height: `${sorted.length * ROW}px` }}>${sorted.slice(first, last).map((row, index) => html`
      <div key=${keyOf(row)} id="${id}-${first + index}" class="row ${first + index === active ? "active" : ""}" role="row" aria-rowindex=${first + index + 2}
          style=${{ gridTemplateColumns: template, transform: `translateY(${(first + index) * ROW}px)` }}
          onClick=${(event) => { if (!event.target.closest("a, button")) { setActive(first + index); onOpen?.(row); } }}>
        ${shown.map((column) => html`<div key=${column.id} role="gridcell" class=${column.isNumber ? "number" : ""}>${column.cell(row)}</div>`)}
      </div>`)}</div>
  </div>`;
}

function sortRows(rows, columns, order) {
  const column = order && columns.find((each) => each.id === order.id);
  if (!column) return rows;
  const sign = order.isDown ? -1 : 1;
  const keyed = rows.map((row) => [column.sort(row), row]);
  keyed.sort(([a], [b]) => {
    if (a == null || b == null) return Number(a == null) - Number(b == null); // what is not known is last either way
    return sign * (typeof a === "string" ? compareNames(a, b) : a - b);
  });
  return keyed.map(([, row]) => row);
}
