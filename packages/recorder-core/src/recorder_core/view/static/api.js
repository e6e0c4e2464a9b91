// The server's routes. The key is in memory, or in this tab's session storage where that is asked
// for: never in the address, in a cookie or in any storage that outlives the tab.

const BASE = new URL(".", document.baseURI); // …/records/
const STORED = "recorder-key";
const PIECES = 20_000; // the most ids of one call
export const LIVE = "● live";
export const LIMIT = 2000; // entries of one reply on what finished lately

let key = sessionStorage.getItem(STORED);

export class Refused extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

export const hasKey = () => key !== null;

export function useKey(given, keep) {
  key = given;
  if (keep) sessionStorage.setItem(STORED, given);
  else sessionStorage.removeItem(STORED);
}

export function forgetKey() {
  key = null;
  sessionStorage.removeItem(STORED);
}

async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key !== null) headers.Authorization = `Bearer ${key}`;
  const reply = await fetch(new URL(path, BASE), {
    ...options, headers, credentials: "omit", cache: "no-store", redirect: "error",
  });
  if (reply.ok) return reply;
  let detail = `${reply.status} ${reply.statusText}`;
  try {
    detail = (await reply.json()).detail ?? detail;
  } catch { /* no JSON: the status says it */ }
  throw new Refused(reply.status, String(detail));
}

const asked = (path, parameters) => `${path}?${new URLSearchParams(parameters)}`;

const post = (path, body) => ask(path, {
  method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
});

export const recent = async (after, wait, signal) =>
  (await ask(asked("recent", { after, limit: LIMIT, wait_s: wait }), { signal })).json();

export const keys = async (after) => {
  const parameters = { prefix: "", limit: 1000 };
  if (after) parameters.after = after;
  return (await ask(asked("keys", parameters))).json();
};

export const stats = async () => (await ask("stats")).json();

export const forest = async (run) =>
  (await ask(asked("forest", { key: run, texts: "true" }))).json();

// The ids and logprobs of one trajectory, as typed arrays.
export async function tokens(run, leaf) {
  const buffer = await (await ask(asked("tokens", { key: run, leaf }))).arrayBuffer();
  const length = buffer.byteLength / 8;
  return { ids: new Int32Array(buffer, 0, length), logprobs: new Float32Array(buffer, 4 * length, length) };
}

const known = new Map(); // what tokens are as bytes: a vocabulary does not change

// The bytes of the distinct ids; null with the reason where the server does not know them.
export async function pieces(ids) {
  const wanted = [...new Set(ids)].filter((id) => !known.has(id));
  for (let at = 0; at < wanted.length; at += PIECES) {
    const part = wanted.slice(at, at + PIECES);
    let reply;
    try {
      reply = await (await post("pieces", { ids: part })).json();
    } catch (error) {
      if (error instanceof Refused && (error.status === 501 || error.status === 404)) {
        return { pieces: null, reason: error.message };
      }
      throw error;
    }
    part.forEach((id, number) => {
      const text = atob(reply.pieces[number]);
      known.set(id, Uint8Array.from(text, (letter) => letter.charCodeAt(0)));
    });
  }
  return { pieces: known };
}

// `recorder view` opens the page with a token in the fragment that works once.
export async function takeToken() {
  const found = /^#token=([\w-]+)$/.exec(location.hash);
  if (!found) return;
  history.replaceState(null, "", location.pathname);
  const reply = await (await post("session", { token: found[1] })).json();
  useKey(reply.session, true);
}
