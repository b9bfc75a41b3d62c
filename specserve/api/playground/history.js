// Draws the server's metrics over the last ten minutes, and sums them up in a table. They are read while the page is looked at.

import { FIGURES, Samples, WINDOW_S, valuesOf } from "./metrics.js";
import { label, node } from "./svg.js";
import { element, number, pause } from "./words.js";

const EVERY_S = 5;
const LEFT = 40, RIGHT = 10, TOP = 8, HEIGHT = 64, AXIS = 18;
const SPANS = [60, 120, 300, WINDOW_S]; // what the axis may show: as much as there is

export class History {
  #samples = new Samples();
  #follows = false;
  #area = document.getElementById("history");
  #words = document.getElementById("history-words");
  #table = document.querySelector("#history-table .scroll");

  constructor(server, models) {
    Object.assign(this, { server, models });
    new ResizeObserver(() => this.#draw()).observe(this.#area);
    document.getElementById("history-table").addEventListener("toggle", () => this.#list());
  }

  // Reads the metrics again and again; ends where the server refuses them.
  async follow() {
    if (this.#follows) return;
    this.#follows = true;
    while (document.hidden || (await this.#look())) await pause(EVERY_S);
    this.#follows = false;
  }

  async #look() {
    try {
      const { base } = this.models, text = await this.server.metrics();
      if (base === this.models.base) this.#samples.add(performance.now() / 1000, valuesOf(text, base));
    } catch (refusal) {
      this.#say(`The metrics cannot be read. ${refusal.message}`);
      return refusal.status === 0 || refusal.status >= 500; // it may come back
    }
    this.#say(words(this.#samples, this.models));
    this.#draw();
    this.#list();
    return true;
  }

  // The figures of another model start anew.
  clear() {
    this.#samples = new Samples();
    this.#area.replaceChildren();
    this.#table.replaceChildren();
    this.#say(words(this.#samples, this.models));
  }

  #say(text) {
    if (this.#words.textContent !== text) this.#words.textContent = text;
  }

  #draw() {
    if (this.#samples.length < 2) return;
    this.#area.replaceChildren(...FIGURES.map((figure) => this.#chart(figure)));
  }

  #chart(figure) {
    const line = this.#samples.line(figure), sum = sumOf(line);
    const chart = element("figure"), caption = element("figcaption");
    caption.append(element("span", "", figure.name), element("strong", "", written(sum.now, figure)));
    chart.append(caption, drawing(figure, line, sum, { width: this.#width, span: this.#span }));
    return chart;
  }

  get #width() {
    const columns = Math.max(1, Math.floor(this.#area.clientWidth / 260));
    return Math.max(200, Math.floor((this.#area.clientWidth - 16 * (columns - 1)) / columns));
  }

  get #span() {
    return SPANS.find((span) => this.#samples.span <= span) ?? WINDOW_S;
  }

  #list() {
    if (!this.#table.parentElement.open || this.#samples.length < 2) return;
    const table = element("table"), head = element("tr"), top = element("thead"), body = element("tbody");
    head.append(...["figure", "now", "least", "most"].map((name) => Object.assign(element("th", "", name), { scope: "col" })));
    top.append(head);
    for (const figure of FIGURES) {
      const row = element("tr"), { now, least, most } = sumOf(this.#samples.line(figure));
      row.append(Object.assign(element("th", "", figure.name), { scope: "row" }), ...[now, least, most].map((value) => element("td", "", written(value, figure))));
      body.append(row);
    }
    table.append(top, body);
    this.#table.replaceChildren(table);
  }
}

function words(samples, models) {
  if (samples.length < 2) return `Collecting: the first figures come in ${EVERY_S} s.`;
  const minutes = Math.floor(samples.span / 60);
  const since = samples.span > WINDOW_S - 2 * EVERY_S ? "The last ten minutes" : `Since this page was opened, ${minutes ? `${minutes} min` : "less than a minute"} ago`;
  return `${since}: all requests of the ${models.several ? "model" : "server"}, read every ${EVERY_S} s.`;
}

function sumOf(line) {
  const values = line.map(([, value]) => value).filter((value) => value !== null);
  return { now: line.at(-1)?.[1] ?? null, least: values.length ? Math.min(...values) : null, most: values.length ? Math.max(...values) : null };
}

function written(value, { unit, counts }) {
  if (value === null) return "–";
  const digits = counts ? value.toFixed(0) : number(value);
  return unit ? `${digits} ${unit}` : digits;
}

// Time runs to the right, and ends now.
function drawing(figure, line, sum, { width, span }) {
  const top = figure.most ?? roundedUp(sum.most ?? 1, figure.counts);
  const x = (before) => LEFT + (1 - before / span) * (width - LEFT - RIGHT);
  const y = (value) => TOP + (1 - value / top) * HEIGHT;
  const about = sum.most === null ? "nothing to show yet" : `now ${written(sum.now, figure)}, from ${written(sum.least, figure)} to ${written(sum.most, figure)}`;
  const drawn = node("svg", { viewBox: `0 0 ${width} ${TOP + HEIGHT + AXIS}`, width, height: TOP + HEIGHT + AXIS, role: "img", "aria-label": `${figure.name}: ${about}` });
  for (const value of [0, top]) {
    drawn.append(node("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }));
    drawn.append(label(LEFT - 6, y(value) + 4, value >= 10000 ? `${value / 1000}k` : String(value), "end"));
  }
  drawn.append(label(x(span), TOP + HEIGHT + 14, `-${span / 60} min`, "start"), label(x(0), TOP + HEIGHT + 14, "now", "end"));
  for (const piece of pieces(line)) drawn.append(stroke(piece, x, y));
  return drawn;
}

function stroke(piece, x, y) {
  if (piece.length === 1) return node("circle", { class: "point", cx: x(piece[0][0]), cy: y(piece[0][1]), r: 2 });
  return node("polyline", { class: "line", points: piece.map(([before, value]) => `${x(before).toFixed(1)},${y(value).toFixed(1)}`).join(" ") });
}

// A line is interrupted where there was nothing to go by.
function pieces(line) {
  const all = [[]];
  for (const point of line) {
    if (point[1] !== null) all.at(-1).push(point);
    else if (all.at(-1).length) all.push([]);
  }
  return all.filter((piece) => piece.length);
}

// The next of 1, 2 and 5 times a power of ten; of counts, a whole one.
function roundedUp(value, counts) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, counts ? 1 : 0.1)));
  return [1, 2, 5, 10].map((factor) => factor * power).find((end) => end >= value);
}
