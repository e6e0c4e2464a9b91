// A run's trajectories, one bar each: where it branches off, what was sampled, what is trained.

import { count, h, reward } from "./dom.js";
import { WindowedList } from "./window.js";

const ROW = 30;

// How many turns two trajectories share, and how many tokens that are.
function shared(a, b) {
  let [turns, tokens] = [0, 0];
  while (turns < a.turns.length && turns < b.turns.length && a.turns[turns].id === b.turns[turns].id) {
    tokens = a.turns[turns].end;
    turns += 1;
  }
  return { turns, tokens };
}

// Each trajectory below the one that it branches off from.
function inTree(rows) {
  const below = new Map();
  for (const row of rows) {
    if (!below.has(row.from.of)) below.set(row.from.of, []);
    below.get(row.from.of).push(row);
  }
  const ordered = [];
  const waiting = [...(below.get(-1) ?? [])].reverse();
  while (waiting.length) {
    const row = waiting.pop();
    ordered.push(row);
    waiting.push(...(below.get(row.number) ?? []).reverse());
  }
  return ordered;
}

export class ForestView {
  constructor({ onpick }) {
    this.element = h("div", { class: "forest" });
    this.list = new WindowedList(this.element, ROW, (row) => this.#row(row));
    this.onpick = onpick;
    this.picked = null;
  }

  show(forest) {
    this.records = new Map(forest.records.map((each) => [each.id, each]));
    this.longest = Math.max(1, ...forest.leaves.map((leaf) => leaf.length));
    this.rows = [];
    for (const [number, leaf] of forest.leaves.entries()) {
      // Drawn from where it leaves the trajectory above it with which it has most in common.
      let from = { turns: 0, tokens: 0, of: -1 };
      for (let other = 0; other < number && other < 200; other += 1) {
        const found = shared(forest.leaves[other], leaf);
        if (found.turns > from.turns) from = { ...found, of: other };
      }
      this.rows.push({ number, leaf, from });
    }
    this.rows = inTree(this.rows);
    this.element.style.height = `${Math.min(6, this.rows.length) * ROW + 2}px`;
    this.list.show(this.rows);
  }

  pick(id) {
    this.picked = id;
    const at = this.rows.findIndex((row) => row.leaf.id === id);
    if (at >= 0) this.list.reveal(at);
  }

  next(step) {
    const at = this.rows.findIndex((row) => row.leaf.id === this.picked);
    const row = this.rows[Math.max(0, Math.min(this.rows.length - 1, at + step))];
    if (row && row.leaf.id !== this.picked) this.onpick(row.leaf.id);
  }

  #row({ number, leaf, from }) {
    const canvas = h("canvas", { class: "lane" });
    const last = this.records.get(leaf.turns.at(-1).id);
    const fresh = leaf.turns.slice(from.turns).map((turn) => this.records.get(turn.id));
    const badges = [];
    if (leaf.superseded) badges.push(["superseded: retried", "warn"]);
    if (fresh.some((record) => record.prefix_break)) badges.push(["⚠ prefix break", "warn"]);
    if (last.finish_reason !== "stop") badges.push([last.finish_reason, last.finish_reason === "length" ? "" : "warn"]);
    if (from.of >= 0) badges.push([`shares ${from.turns} turn${from.turns > 1 ? "s" : ""} with ${from.of + 1}`, ""]);
    const row = h("button", {
      class: `leaf${leaf.id === this.picked ? " picked" : ""}`, data: { leaf: leaf.id },
      title: fresh.some((record) => record.prefix_break)
        ? "its prompt repeats an earlier prompt, but not the tokens sampled after it" : "",
      onclick: () => this.onpick(leaf.id),
    },
    h("span", { class: "leaf-name" }, `${number + 1}`),
    canvas,
    h("span", { class: "leaf-words" }, `trained ${count(leaf.trained)}`,
      leaf.reward === null || leaf.reward === undefined ? null : h("span", {}, `reward ${reward(leaf.reward)}`),
      badges.map(([text, kind]) => h("span", { class: `badge ${kind}` }, text))));
    requestAnimationFrame(() => this.#lane(canvas, leaf, from));
    return row;
  }

  #lane(canvas, leaf, from) {
    const { clientWidth: width, clientHeight: height } = canvas;
    if (!width) return;
    const scale = devicePixelRatio;
    [canvas.width, canvas.height] = [width * scale, height * scale];
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    const style = getComputedStyle(canvas);
    const colour = (name) => style.getPropertyValue(name);
    const x = (token) => token / this.longest * (width - 6) + 1;
    const middle = height / 2;
    const begin = x(from.tokens);
    context.strokeStyle = colour("--line");
    context.lineWidth = 1.5;
    if (from.of >= 0) {
      context.beginPath();
      context.moveTo(begin, 0);
      context.lineTo(begin, middle);
      context.stroke();
    }
    context.fillStyle = colour("--prompt");
    context.fillRect(begin, middle - 2, Math.max(2, x(leaf.length) - begin), 4);
    for (const turn of leaf.turns.slice(from.turns)) {
      const [start, end] = [x(turn.start), x(turn.end)];
      const trained = leaf.mask.some(([a, b]) => a <= turn.start && turn.start < b);
      context.fillStyle = colour(trained ? "--trained" : "--sampled");
      context.fillRect(start, middle - 6, Math.max(1.5, end - start - 0.5), 12);
    }
    const last = this.records.get(leaf.turns.at(-1).id);
    context.fillStyle = colour(last.finish_reason === "stop" ? "--trained" : "--warn");
    context.beginPath();
    context.arc(x(leaf.length), middle, 4, 0, 7);
    context.fill();
  }
}
