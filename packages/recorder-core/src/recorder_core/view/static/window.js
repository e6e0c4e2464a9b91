// A list of rows of one height, of which those near the viewport exist.

import { h } from "./dom.js";

const AROUND = 8;

export class WindowedList {
  constructor(element, height, draw) {
    this.element = element;
    this.height = height;
    this.draw = draw;
    this.rows = [];
    this.inner = h("div", { class: "window" });
    element.replaceChildren(this.inner);
    let waiting = false;
    const later = () => {
      if (waiting) return;
      waiting = true;
      requestAnimationFrame(() => {
        waiting = false;
        this.render();
      });
    };
    element.addEventListener("scroll", later, { passive: true });
    new ResizeObserver(later).observe(element);
  }

  show(rows) {
    this.rows = rows;
    this.inner.style.height = `${rows.length * this.height}px`;
    this.render();
  }

  render() {
    const { scrollTop, clientHeight } = this.element;
    const first = Math.max(0, Math.floor(scrollTop / this.height) - AROUND);
    const last = Math.min(this.rows.length, Math.ceil((scrollTop + clientHeight) / this.height) + AROUND);
    const made = [];
    for (let at = first; at < last; at += 1) {
      const row = this.draw(this.rows[at], at);
      row.style.top = `${at * this.height}px`;
      made.push(row);
    }
    this.inner.replaceChildren(...made);
  }

  reveal(at) {
    const top = at * this.height;
    const { scrollTop, clientHeight } = this.element;
    if (top < scrollTop + this.height) this.element.scrollTop = top - this.height;
    else if (top + 2 * this.height > scrollTop + clientHeight) {
      this.element.scrollTop = top + 2 * this.height - clientHeight;
    }
    this.render();
  }
}
