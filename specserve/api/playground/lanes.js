// Draws a scene of rounds as two lanes, target over draft, in SVG; and as a table for who would rather read.

import { label, node } from "./svg.js";
import { sumOf } from "./trace.js";
import { element, percent } from "./words.js";

const LEFT = 56, RIGHT = 8, TOP = 18, LANE = 34, BETWEEN = 22, AXIS = 20;
const STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 60000];
const KINDS = {
  accepted: "accepted draft",
  rejected: "rejected draft",
  next: "the target's own token",
  plain: "its own, in a round without drafts",
  draft: "drafting while the target waits",
  anticipate: "drafting in advance",
};
const COLUMNS = ["round", "requests", "gamma", "drafted", "accepted", "committed", "drafts", "ms"];

export class Lanes {
  #area = document.getElementById("lanes");
  #words = document.getElementById("rounds-words");
  #table = document.querySelector("#rounds-table .scroll");
  #scene = null;

  constructor() {
    new ResizeObserver(() => this.#scene && this.#draw()).observe(this.#area);
    document.getElementById("rounds-table").addEventListener("toggle", () => this.#scene && this.#list());
  }

  show(scene) {
    this.#scene = scene;
    this.#words.textContent = sentence(sumOf(scene));
    this.#draw();
    this.#list();
  }

  say(words) {
    this.#words.textContent = words;
  }

  #draw() {
    const width = Math.max(320, this.#area.clientWidth), height = TOP + 2 * LANE + BETWEEN + AXIS;
    const scale = (width - LEFT - RIGHT) / this.#scene.length;
    const x = (time) => LEFT + Math.max(0, Math.min(time, this.#scene.length)) * scale;
    const drawing = node("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-labelledby": "rounds-title rounds-words" });
    drawing.append(patterns(), label(LEFT - 8, TOP + LANE / 2 + 4, "target", "end"), label(LEFT - 8, TOP + LANE + BETWEEN + LANE / 2 + 4, "draft", "end"));
    for (const lane of [0, 1]) drawing.append(node("rect", { class: "lane", x: LEFT, y: top(lane), width: width - LEFT - RIGHT, height: LANE }));
    for (const bar of this.#scene.target) drawing.append(...cells(bar).map((cell) => box(cell, x, 0)), ...total(bar, x));
    for (const bar of this.#scene.draft) drawing.append(box({ ...bar, kind: bar.name === "anticipate" ? "anticipate" : "draft" }, x, 1));
    drawing.append(...axis(this.#scene.length, x));
    this.#area.replaceChildren(drawing, legend());
  }

  #list() {
    if (!this.#table.parentElement.open) return;
    const table = element("table"), head = element("tr"), body = element("tbody"), top = element("thead");
    head.append(...COLUMNS.map((name) => Object.assign(element("th", "", name), { scope: "col" })));
    top.append(head);
    for (const { begun, ended, about } of this.#scene.rounds) {
      const row = element("tr"), ready = about.hits ? "ready" : about.misses ? "waited for" : "none";
      const values = [about.round, about.sequences, about.pacer?.gamma ?? "", about.drafted, about.accepted, about.committed, ready, (ended - begun).toFixed(1)];
      row.append(...values.map((value) => element("td", "", String(value))));
      body.append(row);
    }
    table.append(top, body);
    this.#table.replaceChildren(table);
  }
}

function sentence({ rounds, committed, sequences, hits, misses, median, busy }) {
  const shared = sequences > 1 ? ` of up to ${sequences} requests` : "";
  const ready = hits + misses ? ` ${hits} of ${hits + misses} proposals were ready in advance.` : "";
  return `${rounds} rounds${shared}, ${committed} tokens, ${median.toFixed(1)} ms a round; the target is busy ${percent(busy)} of the time.${ready}`;
}

// A cell for each share of the pass's rows: accepted, rejected, or added by the target.
function cells({ begun, ended, round }) {
  const about = round?.about ?? { drafted: 0, accepted: 0, sequences: 1 };
  const kinds = [...Array(about.accepted).fill("accepted"), ...Array(about.drafted - about.accepted).fill("rejected"), ...Array(about.sequences).fill(about.drafted ? "next" : "plain")];
  const each = (ended - begun) / kinds.length;
  return kinds.map((kind, i) => ({ kind, begun: begun + i * each, ended: begun + (i + 1) * each }));
}

function total({ begun, ended, round }, x) {
  return round && x(ended) - x(begun) > 14 ? [label((x(begun) + x(ended)) / 2, TOP - 5, `+${round.about.committed}`, "middle")] : [];
}

function box({ kind, begun, ended }, x, lane) {
  return node("rect", { class: `cell ${kind}`, x: x(begun), y: top(lane), width: Math.max(x(ended) - x(begun), 0.4), height: LANE });
}

function axis(length, x) {
  const step = STEPS.find((some) => (x(some) - x(0)) > 56) ?? length;
  const ticks = [];
  for (let time = 0; time <= length; time += step) ticks.push(label(x(time), top(1) + LANE + 15, `${time} ms`, time ? "middle" : "start"));
  return ticks.filter((tick, i) => i === 0 || +tick.getAttribute("x") < x(length) - 18);
}

function legend() {
  const list = element("ul", "legend lanes-legend");
  for (const [kind, words] of Object.entries(KINDS)) {
    const item = element("li"), swatch = node("svg", { width: 14, height: 14, "aria-hidden": "true" });
    swatch.append(node("rect", { class: `cell ${kind}`, width: 14, height: 14, rx: 2 }));
    item.append(swatch, element("span", "", words));
    list.append(item);
  }
  return list;
}

// Refused drafts and the target's own tokens differ by more than colour.
function patterns() {
  const all = node("defs", {});
  for (const [id, path] of [["hatch", "M-1,1 l2,-2 M0,6 l6,-6 M5,7 l2,-2"], ["dots", "M2,2 h1.6 v1.6 h-1.6 z"]]) {
    const pattern = node("pattern", { id, width: 6, height: 6, patternUnits: "userSpaceOnUse" });
    pattern.append(node("rect", { class: `${id}-ground`, width: 6, height: 6 }), node("path", { class: `${id}-mark`, d: path }));
    all.append(pattern);
  }
  return all;
}

function top(lane) {
  return TOP + lane * (LANE + BETWEEN);
}
