// The curves of a job over its steps, drawn by uPlot (uplot/). All charts share one cursor.

import * as format from "./format.js";
import { h, setText } from "./dom.js";

/* global uPlot */

// Each line: field of a MetricRow, label, colour role. `stacked`: each line is drawn on top of the one before it.
const VALIDATION = ["val_loss", "validation", "validation"];
const CHARTS = [
  { id: "loss", title: "Loss", show: format.loss, lines: [["loss", "train", "train"], VALIDATION] },
  { id: "tokens", title: "Tokens per second", show: format.count, zero: true, lines: [["tokens_per_s", "", "train"]] },
  {
    id: "time",
    title: "Time of a step",
    show: format.millis,
    zero: true,
    stacked: true,
    lines: [
      ["compute_ms", "compute", "compute"],
      ["communicate_ms", "communication", "communicate"],
      ["wait_ms", "wait", "wait"],
    ],
  },
  { id: "norm", title: "Gradient norm", show: format.threeDigits, lines: [["grad_norm", "", "train"]] },
  { id: "lr", title: "Learning rate", show: format.scientific, zero: true, lines: [["lr", "", "train"]] },
];

const colours = new Map(); // role → colour in the present theme

function colour(role) {
  if (!colours.has(role)) {
    const probe = h("i");
    probe.style.color = `var(--${role})`;
    document.body.append(probe);
    colours.set(role, getComputedStyle(probe).color);
    probe.remove();
  }
  return colours.get(role);
}

const figure = (value) => (format.isFigure(value) ? value : null);

class Chart {
  #plot = null;
  #rows = [];
  #settings = []; // changes of the job's settings: each is a line between two steps
  #spec;
  #canvas = h("div", { class: "plot", "aria-hidden": "true" });
  #values;
  #at = h("span", { class: "dim" });

  constructor(place, spec) {
    this.#spec = spec;
    this.#values = spec.lines.map(() => h("b"));
    const legend = spec.lines.map(([, label, role], index) => {
      const key = h("span", { class: `key ${role}`, "aria-hidden": "true" });
      return h("span", { class: "line" }, key, label && `${label} `, this.#values[index]);
    });
    const caption = h("figcaption", {}, h("h2", {}, spec.title), h("span", { class: "legend" }, ...legend, this.#at));
    const attributes = { class: "card chart", id: `chart-${spec.id}`, tabindex: 0 };
    const chart = h("figure", attributes, caption, this.#canvas);
    chart.addEventListener("keydown", (event) => this.#key(event));
    place.append(chart);
    new ResizeObserver(() => this.#plot?.setSize(this.#size())).observe(this.#canvas);
  }

  draw(rows, settings) {
    this.#rows = rows;
    this.#settings = settings;
    if (!rows.length) this.#plot?.destroy();
    this.#plot = rows.length ? (this.#plot ?? this.#newPlot()) : null;
    this.#plot?.setData(this.#columns());
    this.#read(this.#plot?.cursor.idx);
  }

  repaint() {
    this.#plot?.redraw(false, true);
  }

  #columns() {
    const { lines, stacked } = this.#spec;
    const columns = lines.map(([field]) => this.#rows.map((row) => figure(row[field])));
    if (stacked) {
      for (let index = 1; index < columns.length; index += 1) {
        columns[index] = columns[index].map((value, at) => (value ?? 0) + (columns[index - 1][at] ?? 0));
      }
      columns.reverse(); // the tallest area is drawn first, the others over it
    }
    return [this.#rows.map((row) => row.step), ...columns];
  }

  #size() {
    return { width: Math.max(this.#canvas.clientWidth, 50), height: Math.max(this.#canvas.clientHeight, 50) };
  }

  #newPlot() {
    const { lines, stacked, zero, show } = this.#spec;
    const drawn = stacked ? [...lines].reverse() : lines;
    const axis = { stroke: () => colour("dim"), font: "11px system-ui, sans-serif", ticks: { show: false } };
    const grid = { stroke: () => colour("grid"), width: 1 };
    const pad = { min: { pad: zero ? 0 : 0.05 }, max: { pad: 0.05 } };
    const short = show === format.loss ? format.count : show;
    const steps = (_, values) => values.map((step) => (Number.isInteger(step) ? format.whole(step) : ""));
    return new uPlot(
      {
        ...this.#size(),
        padding: [8, 14, 0, 0],
        legend: { show: false },
        cursor: { sync: { key: "steps" }, drag: { x: false, y: false }, y: false, points: { size: 6 } },
        scales: {
          x: { time: false },
          y: { range: (_, low, high) => uPlot.rangeNum(zero ? 0 : low, high, pad) },
        },
        axes: [
          { ...axis, grid: { show: false }, size: 22, gap: 2, space: 60, values: steps },
          { ...axis, grid, size: 52, gap: 4, space: 28, values: (_, all) => all.map(short) },
        ],
        series: [
          {},
          ...drawn.map(([field, , role]) => ({
            stroke: () => colour(role),
            fill: stacked ? () => colour(role) : undefined,
            width: stacked ? 0 : 1,
            spanGaps: field === "val_loss",
            points: { show: field === "val_loss" ? undefined : false, size: 4 },
          })),
        ],
        hooks: { setCursor: [(plot) => this.#read(plot.cursor.idx)], drawAxes: [(plot) => this.#drawSettings(plot)] },
      },
      this.#columns(),
      this.#canvas,
    );
  }

  #drawSettings(plot) {
    const { ctx, bbox, scales } = plot;
    ctx.fillStyle = colour("dim");
    for (const { step } of this.#settings) {
      if (step < scales.x.min || step > scales.x.max) continue;
      ctx.fillRect(Math.round(plot.valToPos(step + 0.5, "x", true)), bbox.top, 1, bbox.height);
    }
  }

  /** Write the values at the cursor, or the newest ones, into the caption. */
  #read(at) {
    const row = this.#rows[at] ?? this.#rows.at(-1);
    this.#spec.lines.forEach(([field], index) => {
      const newest = () => this.#rows.findLast((known) => figure(known[field]) !== null)?.[field];
      setText(this.#values[index], this.#spec.show(row?.[field] ?? (this.#rows[at] ? undefined : newest())));
    });
    const changed = this.#settings.filter(({ step }) => this.#rows[at]?.step === step + 1);
    const settings = changed.map(({ key, value, before }) => ` · ${key} = ${value}, before ${before}`).join("");
    setText(this.#at, this.#rows[at] ? `step ${format.whole(row.step)}${settings}` : "");
  }

  /** The arrow keys move the cursor by a row, with shift by a tenth of the chart; Escape leaves it. */
  #key(event) {
    const last = this.#rows.length - 1;
    const at = this.#plot?.cursor.idx ?? last;
    const stride = event.shiftKey ? Math.ceil(last / 10) : 1;
    const to = { ArrowLeft: at - stride, ArrowRight: at + stride, Home: 0, End: last, Escape: null }[event.key];
    if (to === undefined || !this.#plot || last < 0) return;
    event.preventDefault();
    const row = this.#rows[Math.min(Math.max(to ?? 0, 0), last)];
    this.#plot.setCursor(to === null ? { left: -10, top: -10 } : { left: this.#plot.valToPos(row.step, "x"), top: 0 });
  }
}

export class Charts {
  #charts;

  constructor(place) {
    this.#charts = CHARTS.map((spec) => new Chart(place, spec));
  }

  draw(rows, settings) {
    for (const chart of this.#charts) chart.draw(rows, settings);
  }

  /** Draw in the colours of another theme. */
  repaint() {
    colours.clear();
    for (const chart of this.#charts) chart.repaint();
  }
}
