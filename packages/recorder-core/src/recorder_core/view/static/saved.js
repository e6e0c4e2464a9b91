// What `api.js` asks a server for, from the page's own file: see `view/saved.py`, which puts it here.

const read = (element) => JSON.parse(element.textContent);
const bytesOf = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));

const index = read(document.getElementById("saved-index"));
const runs = new Map([...document.querySelectorAll("script.saved-run")].map(
  (element, at) => [index.keys[at].key, element]));

export const LIVE = "as saved";
export const LIMIT = Infinity; // of entries: all are in the first answer

export class Refused extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

export const hasKey = () => false;
export function useKey() {}
export function forgetKey() {}
export async function takeToken() {}

export const recent = async (after) => (after === "" ? index.news : new Promise(() => {}));

export const keys = async (after) => (after === null ? index.keys : []);

export const stats = async () => index.stats;

function saved(run) {
  const element = runs.get(run);
  if (!element) throw new Refused(404, `${run} is not in this file`);
  return read(element);
}

export const forest = async (run) => saved(run).forest;

export async function tokens(run, leaf) {
  const { buffer } = bytesOf(saved(run).tokens[leaf]);
  const length = buffer.byteLength / 8;
  return { ids: new Int32Array(buffer, 0, length), logprobs: new Float32Array(buffer, 4 * length, length) };
}

const known = index.pieces && new Map(
  Object.entries(index.pieces).map(([id, text]) => [Number(id), bytesOf(text)]));

export const pieces = async () => ({ pieces: known, reason: index.reason });
