// The tokens of one trajectory. Its text is always there, in blocks; spans exist near the viewport
// only, so that a hundred thousand tokens cost as little as a thousand.

import { count, h } from "./dom.js";
import { hex, hidden, marked, textsOf } from "./text.js";

const BLOCK = 400; // tokens; a block ends at a new line where one comes near that
const WORST = 200;
const STEPS = [-0.05, -0.2, -0.5, -1, -2, -4, -7];

const stepOf = (logprob) => {
  let step = 0;
  while (step < STEPS.length && logprob < STEPS[step]) step += 1;
  return step;
};
const percent = (logprob) => {
  const value = Math.exp(logprob) * 100;
  return `${value >= 1 ? value.toFixed(1) : value.toPrecision(2)} %`;
};
const fixed = (value) => value.toFixed(2).replace("-", "−");

export const METRICS = {
  logprob: (view, at) => stepOf(view.logprobs[at]),
  probability: (view, at) => Math.min(7, Math.floor((1 - Math.exp(view.logprobs[at])) * 8)),
  "below turn's mean": (view, at) => stepOf(view.logprobs[at] - view.means[view.turnOf[at]]),
  nothing: () => 0,
};

export class TokenView {
  constructor({ onselect }) {
    this.onselect = onselect;
    this.scroller = h("div", { class: "tokens", tabindex: "0", "aria-label": "tokens" });
    this.map = h("canvas", { class: "map", title: "the whole trajectory: lowest logprobs above, trained below; click to jump" });
    this.worstRow = h("div", { class: "worst" });
    this.detail = h("div", { class: "detail", role: "status" });
    this.metric = "logprob";
    this.asText = false;
    this.selected = -1;
    this.scroller.addEventListener("click", (event) => {
      const span = event.target.closest("[data-i]");
      if (span) this.select(Number(span.dataset.i));
    });
    this.scroller.addEventListener("pointerover", (event) => {
      const span = event.target.closest("[data-i]");
      this.#describe(span ? Number(span.dataset.i) : this.selected);
    });
    this.map.addEventListener("click", (event) => {
      const box = this.map.getBoundingClientRect();
      this.jump(Math.floor((event.clientX - box.left) / box.width * this.length));
    });
    this.observer = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        const block = this.byElement.get(entry.target);
        if (!block) continue;
        if (entry.isIntersecting) this.#fill(block);
        else this.#empty(block);
      }
    }, { root: this.scroller, rootMargin: "300px 0px" });
    new ResizeObserver(() => this.drawMap()).observe(this.map);
  }

  // Show a trajectory: its leaf and records as the forest tells them, its arrays, and the bytes of
  // its tokens (null where they are not known).
  show(leaf, records, { ids, logprobs }, pieces) {
    Object.assign(this, { leaf, records, ids, logprobs, pieces, length: ids.length });
    this.texts = pieces ? textsOf(ids, pieces) : new Array(ids.length).fill("");
    this.mask = new Uint8Array(ids.length);
    for (const [start, end] of leaf.mask) this.mask.fill(1, start, end);
    this.turnOf = new Int32Array(ids.length).fill(-1);
    this.means = [];
    leaf.turns.forEach((turn, number) => {
      this.turnOf.fill(number, turn.start, turn.end);
      let [sum, counted] = [0, 0];
      for (let at = turn.start; at < turn.end; at += 1) {
        if (!Number.isNaN(logprobs[at])) {
          sum += logprobs[at];
          counted += 1;
        }
      }
      this.means.push(counted ? sum / counted : NaN);
    });
    this.versionAt = new Map();
    let before = null;
    for (const [start, , version] of leaf.versions) {
      if (version !== before) this.versionAt.set(start, version);
      before = version;
    }
    this.worst = this.#worst();
    this.selected = -1;
    this.#draw();
  }

  clear(message) {
    this.observer.disconnect();
    this.length = 0;
    this.scroller.replaceChildren(h("p", { class: "quiet" }, message));
    this.worstRow.replaceChildren();
    this.detail.textContent = "";
  }

  #worst() {
    const sampled = [];
    for (let at = 0; at < this.length; at += 1) if (!Number.isNaN(this.logprobs[at])) sampled.push(at);
    sampled.sort((a, b) => this.logprobs[a] - this.logprobs[b]);
    return sampled.slice(0, WORST);
  }

  #segments() {
    const segments = [];
    let at = 0;
    this.leaf.turns.forEach((turn, number) => {
      if (turn.start > at) segments.push({ kind: number ? "between" : "prompt", start: at, end: turn.start });
      segments.push({ kind: "turn", start: turn.start, end: turn.end, number });
      at = turn.end;
    });
    return segments;
  }

  #draw() {
    this.observer.disconnect();
    this.byElement = new Map();
    this.blocks = [];
    const parts = this.#segments().map((segment) => {
      const body = h("div", { class: "body" });
      const part = h("section", { class: `segment ${segment.kind}` }, this.#heading(segment, body), body);
      if (this.asText) {
        body.append(h("pre", { class: "text" }, marked(this.#plain(segment)).map(([text, tag]) =>
          (tag ? h("span", { class: "x", data: { tag } }, text) : text))));
      }
      else this.#addBlocks(segment, body);
      return part;
    });
    this.scroller.replaceChildren(...parts);
    this.scroller.scrollTop = 0;
    for (const block of this.blocks) this.observer.observe(block.element);
    this.#drawWorst();
    this.drawMap();
    this.#describe(this.selected);
  }

  #plain(segment) {
    if (this.pieces) return this.texts.slice(segment.start, segment.end).join("");
    if (segment.kind === "turn") {
      return this.records.get(this.leaf.turns[segment.number].id).response_text ?? "the engine gave no text";
    }
    const root = this.records.get(this.leaf.turns[0].id);
    return segment.kind === "prompt" && root.prompt_text ? root.prompt_text : "its text is not known; view the tokens";
  }

  #addBlocks(segment, body) {
    let start = segment.start;
    while (start < segment.end) {
      let end = Math.min(start + BLOCK, segment.end);
      for (let at = end; end < segment.end && at > start + BLOCK / 4; at -= 1) {
        if (this.texts[at - 1].endsWith("\n")) {
          end = at;
          break;
        }
      }
      const block = { start, end, element: h("div", { class: "block" }), filled: false };
      block.element.textContent = this.texts.slice(start, end).join("");
      if (!this.pieces) this.#fill(block);
      this.blocks.push(block);
      this.byElement.set(block.element, block);
      body.append(block.element);
      start = end;
    }
  }

  #heading(segment, body) {
    const length = segment.end - segment.start;
    const fold = h("button", {
      class: "fold", title: "fold (f)", onclick: () => {
        body.hidden = !body.hidden;
        fold.textContent = body.hidden ? "unfold" : "fold";
      },
    }, "fold");
    const words = segment.kind === "turn" ? this.#turnWords(segment)
      : [segment.kind === "prompt" ? "prompt" : "between", `${count(length)} tok`, "not sampled"];
    const first = h("b", {}, words[0]);
    return h("header", { class: "segment-head" }, first, words.slice(1).map((word) =>
      typeof word === "string" ? h("span", {}, word) : word), fold);
  }

  #turnWords({ start, end, number }) {
    const record = this.records.get(this.leaf.turns[number].id);
    const versions = [...new Set((record.versions ?? []).map(([, , version]) => version))];
    const words = [`turn ${number + 1}`, `sampled ${count(end - start)}`];
    const mean = this.means[number];
    words.push(Number.isNaN(mean) ? "no logprobs" : `μ ${fixed(mean)}`);
    const temperature = record.sampling?.temperature;
    if (temperature !== undefined && temperature !== null) words.push(`T ${temperature}`);
    if (versions.length) words.push(`weights ${versions.join("→")}`);
    const took = record.finished_at - record.created_at;
    if (record.created_at && took >= 0) words.push(took < 10 ? `${Math.round(took * 1000)} ms` : `${took.toFixed(1)} s`);
    words.push(`finish ${record.finish_reason}`);
    if (record.reward !== undefined && record.reward !== null) words.push(`reward ${record.reward}`);
    if (!this.mask[start]) words.push(h("span", { class: "badge" }, record.superseded ? "superseded" : "trained elsewhere"));
    for (const flag of record.flags ?? []) words.push(h("span", { class: "badge warn" }, flag));
    if (record.delivered === false) words.push(h("span", { class: "badge warn" }, "not delivered"));
    if (this.pieces && record.response_text && !this.texts.slice(start, end).join("").startsWith(record.response_text)) {
      words.push(h("span", {
        class: "badge", title: "what the engine decoded differs: it leaves special tokens out, or a character is split at the turn's edge",
      }, "≈ engine's text"));
    }
    return words;
  }

  #fill(block) {
    if (block.filled) return;
    const spans = [];
    for (let at = block.start; at < block.end; at += 1) {
      const version = this.versionAt.get(at);
      if (version !== undefined) spans.push(h("b", { class: "v", data: { v: version } }));
      spans.push(this.#span(at));
    }
    block.element.replaceChildren(...spans);
    block.filled = true;
  }

  #empty(block) {
    if (!block.filled || !this.pieces) return;
    block.element.textContent = this.texts.slice(block.start, block.end).join("");
    block.filled = false;
  }

  #span(at) {
    const text = this.texts[at];
    const span = document.createElement("span");
    let name = "t";
    if (this.turnOf[at] >= 0) {
      name += this.mask[at] ? " m" : " s";
      if (!Number.isNaN(this.logprobs[at])) name += ` l${METRICS[this.metric](this, at)}`;
    }
    if (at === this.selected) name += " sel";
    const bytes = this.pieces?.get(this.ids[at]);
    let tag = null;
    if (!this.pieces || !bytes?.length) tag = `[${this.ids[at]}]`;
    else if (text === "") tag = hex(bytes);
    else tag = hidden(text);
    if (tag) {
      name += " x";
      span.dataset.tag = tag;
    }
    if (text.includes("\n")) name += " n";
    span.className = name;
    span.dataset.i = at;
    span.textContent = text;
    return span;
  }

  #drawWorst() {
    const shown = this.worst.slice(0, 6).map((at) => h("button", {
      class: `l${stepOf(this.logprobs[at])}`, title: `token ${count(at)}`, onclick: () => this.jump(at),
    }, fixed(this.logprobs[at])));
    this.worstRow.replaceChildren(...(shown.length
      ? ["worst ", ...shown, h("button", { title: "next worst token (n)", onclick: () => this.nextWorst(1) }, "next")]
      : ["no logprobs"]));
  }

  drawMap() {
    const { clientWidth: width, clientHeight: height } = this.map;
    if (!width || !this.length) return;
    const scale = devicePixelRatio;
    [this.map.width, this.map.height] = [width * scale, height * scale];
    const context = this.map.getContext("2d");
    context.scale(scale, scale);
    const style = getComputedStyle(this.map);
    const steps = Array.from({ length: STEPS.length + 1 }, (_, step) => style.getPropertyValue(`--l${step}`));
    const [trained, sampled] = [style.getPropertyValue("--trained"), style.getPropertyValue("--sampled")];
    for (let x = 0; x < width; x += 1) {
      const start = Math.floor(x / width * this.length);
      const end = Math.max(start + 1, Math.floor((x + 1) / width * this.length));
      let [step, here, mask] = [-1, false, false];
      for (let at = start; at < end && at < this.length; at += 1) {
        if (this.turnOf[at] < 0) continue;
        here = true;
        mask ||= Boolean(this.mask[at]);
        if (!Number.isNaN(this.logprobs[at])) step = Math.max(step, stepOf(this.logprobs[at]));
      }
      if (!here) continue;
      context.fillStyle = sampled;
      context.fillRect(x, 0, 1, height - 4);
      if (step > 0) {
        context.fillStyle = steps[step];
        context.fillRect(x, 0, 1, height - 4);
      }
      if (mask) {
        context.fillStyle = trained;
        context.fillRect(x, height - 3, 1, 3);
      }
    }
    if (this.selected >= 0) {
      context.fillStyle = style.getPropertyValue("--text");
      context.fillRect(Math.floor(this.selected / this.length * width) - 1, 0, 2, height);
    }
  }

  #describe(at) {
    if (at < 0 || at >= this.length) {
      this.detail.textContent = "pick a token, or press n for the worst one";
      return;
    }
    const bytes = this.pieces?.get(this.ids[at]);
    const turn = this.turnOf[at];
    const words = [`token ${count(at)}`, `id ${this.ids[at]}`];
    if (bytes) words.push(`${JSON.stringify(this.texts[at])} ${hex(bytes)}`);
    if (turn < 0) words.push("not sampled");
    else {
      const logprob = this.logprobs[at];
      words.push(Number.isNaN(logprob) ? "no logprob" : `logprob ${fixed(logprob)} (${percent(logprob)})`);
      const span = this.leaf.versions.find(([start, end]) => start <= at && at < end);
      words.push(span ? `weights ${span[2]}` : "weights unknown", this.mask[at] ? "✓ trained" : "not trained here", `turn ${turn + 1}`);
    }
    this.detail.textContent = words.join("  ·  ");
  }

  jump(at) {
    if (!this.length || this.asText) return;
    at = Math.max(0, Math.min(this.length - 1, at));
    const block = this.blocks.find((each) => at < each.end);
    block.element.parentElement.hidden = false;
    this.#fill(block);
    this.select(at);
    block.element.querySelector(`[data-i="${at}"]`).scrollIntoView({ block: "center" });
  }

  select(at) {
    this.scroller.querySelector(".sel")?.classList.remove("sel");
    this.selected = at;
    this.scroller.querySelector(`[data-i="${at}"]`)?.classList.add("sel");
    this.#describe(at);
    this.drawMap();
    this.onselect(at);
  }

  nextWorst(step) {
    if (!this.worst?.length) return;
    const now = this.worst.indexOf(this.selected);
    const next = now < 0 ? 0 : (now + step + this.worst.length) % this.worst.length;
    this.jump(this.worst[next]);
  }

  nextTurn(step) {
    if (!this.length) return;
    const starts = this.leaf.turns.map((turn) => turn.start);
    const at = this.selected < 0 ? -1 : this.selected;
    const next = step > 0 ? starts.find((start) => start > at) : starts.findLast((start) => start < at);
    if (next !== undefined) this.jump(next);
  }

  foldRest() {
    const rest = [...this.scroller.querySelectorAll(".segment:not(.turn) .fold")];
    const open = rest.some((each) => each.textContent === "fold");
    for (const each of rest) if ((each.textContent === "fold") === open) each.click();
  }

  set(name, value) {
    if (name === "metric") this.metric = value;
    else if (name === "asText") this.asText = value;
    else this.scroller.classList.toggle(name, value);
    if (!this.length) return;
    if (name === "asText") this.#draw();
    if (name === "metric") {
      for (const block of this.blocks) {
        if (!block.filled) continue;
        block.filled = false;
        this.#fill(block);
      }
    }
  }

  plainText() {
    return this.#segments().map((segment) => this.#plain(segment)).join("");
  }
}
