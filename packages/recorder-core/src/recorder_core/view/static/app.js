// The page: what is shown, what the keys do, and the talk with the server.

import * as api from "./api.js";
import { $, ago, bytes, count, h, reward, short } from "./dom.js";
import { ForestView } from "./forest.js";
import { meanLogprob, Runs, select } from "./runs.js";
import { METRICS, TokenView } from "./tokens.js";
import { WindowedList } from "./window.js";

const ROW = 30;
const WAIT_S = 10; // an engine that ends waits for this reply
const STATS_MS = 3000;
const RETRY_MS = 2000;

const pause = (ms) => new Promise((done) => { setTimeout(done, ms); });

// The list of runs.

const runs = new Runs();
const wanted = { search: "", finish: "", kind: "", sort: "latest", descending: true, group: true, bar: null };
const list = new WindowedList($("runs"), ROW, drawRow);
let selection = { rows: [], rewards: [] };
let open = null; // what is shown on the right: { key, leaf, token, forest }

function drawRow(row) {
  if (row.task !== undefined) {
    return h("div", { class: "row-line task", role: "presentation" },
      h("span", { class: "grow" }, row.task), h("span", {}, `${row.runs} run${row.runs > 1 ? "s" : ""}`),
      h("span", {}, row.average === null ? "" : `μ ${reward(row.average)}`),
      row.flat ? h("span", { class: "badge", title: "all its rewards are equal: no advantage" }, "no spread") : null);
  }
  const { run } = row;
  const picked = open?.key === run.key;
  const marks = [];
  if (run.flags.size) marks.push(h("span", { class: "mark warn", title: [...run.flags].join(", ") }, "⚑"));
  if (run.missing) marks.push(h("span", { class: "mark warn", title: `${run.missing} generations are missing` }, "✂"));
  if (run.drained) marks.push(h("span", { class: "mark", title: "drained" }, "drained"));
  return h("div", {
    class: `row-line run${picked ? " picked" : ""}${run.drained ? " drained" : ""}${wanted.group ? " under" : ""}`,
    role: "option", "aria-selected": String(picked), data: { key: run.key },
    onclick: () => openRun(run.key),
  },
  h("span", { class: `reward ${run.reward === null ? "none" : ""}` }, run.reward === null ? "○" : reward(run.reward)),
  h("span", { class: "grow name" }, wanted.group ? run.name : run.key),
  ...marks,
  h("span", { class: "number turns", title: "generations" }, run.turns ? `${run.turns}×` : ""),
  h("span", { class: "number", title: "tokens of its longest trajectory" }, run.length ? short(run.length) : "–"),
  h("span", { class: "number worst-of", title: `mean logprob ${meanLogprob(run)?.toFixed(2) ?? "unknown"}` },
    run.worst === null ? "" : run.worst.toFixed(1).replace("-", "−")),
  h("span", { class: `finish ${run.finish ?? ""}` }, run.finish ?? (run.pending ? "in flight" : "")));
}

function showList() {
  selection = select(runs, wanted);
  list.show(selection.rows);
  $("count").replaceChildren(
    `${count(selection.shown)} of ${count(selection.total)} runs`,
    selection.flat ? h("button", {
      type: "button", class: "link", onclick: () => set("kind", wanted.kind === "no-spread" ? "" : "no-spread"),
    }, `groups without spread: ${count(selection.flat)} of ${count(selection.tasks)}`) : "");
  showHistogram();
  const finishes = [...new Set([...runs.byKey.values()].map((run) => run.finish).filter(Boolean))].sort();
  const options = ["", ...finishes];
  const select_ = $("finish");
  if (select_.options.length !== options.length) {
    select_.replaceChildren(...options.map((each) => h("option", { value: each }, each || "any")));
    select_.value = wanted.finish;
  }
  $("empty").hidden = selection.total > 0;
}

function showHistogram() {
  const bars = selection.rewards;
  const most = Math.max(1, ...bars.map((bar) => bar.runs));
  $("histogram").replaceChildren(...bars.map((bar) => {
    const chosen = wanted.bar && wanted.bar.from === bar.from && wanted.bar.to === bar.to;
    const range = `reward ${reward(bar.from)} to ${reward(bar.to)}: ${count(bar.runs)} runs`;
    const fill = h("span");
    fill.style.height = bar.runs ? `${Math.max(8, 100 * bar.runs / most)}%` : "0";
    return h("button", {
      type: "button", class: chosen ? "chosen" : "", title: range, "aria-label": range,
      onclick: () => { wanted.bar = chosen ? null : bar; showList(); },
    }, fill);
  }), ...(bars.length ? [h("span", { class: "range" }, reward(bars[0].from)), h("span", { class: "range high" }, reward(bars.at(-1).to))] : []));
}

let listing = false;
function showListSoon() {
  if (listing) return;
  listing = true;
  setTimeout(() => {
    listing = false;
    showList();
  }, 250);
}

function set(name, value) {
  wanted[name] = value;
  if (name === "kind" || name === "search") wanted.bar = null;
  $("kind").value = wanted.kind;
  $("order").textContent = wanted.descending ? "↓" : "↑";
  list.element.scrollTop = 0;
  showList();
}

function move(step) {
  const keys = selection.rows.map((row, at) => [row.run?.key, at]).filter(([key]) => key);
  if (!keys.length) return;
  const now = keys.findIndex(([key]) => key === open?.key);
  const [key, at] = keys[Math.max(0, Math.min(keys.length - 1, now < 0 ? 0 : now + step))];
  openRun(key);
  list.reveal(at);
}

// One run.

const forestView = new ForestView({ onpick: (leaf) => openLeaf(leaf) });
const tokenView = new TokenView({
  onselect: (at) => {
    open.token = at;
    place();
  },
});
const toggles = { mask: true, versions: true, turns: true, whitespace: false };
const heading = h("header", { class: "run-head" });
const controls = h("div", { class: "controls" },
  h("label", {}, "colour ", h("select", {
    id: "metric", onchange: (event) => tokenView.set("metric", event.target.value),
  }, Object.keys(METRICS).map((name) => h("option", { value: name }, name)))),
  Object.keys(toggles).map((name) => h("label", {}, h("input", {
    type: "checkbox", id: `toggle-${name}`, checked: toggles[name],
    onchange: (event) => tokenView.set(name, event.target.checked),
  }), ` ${name}`)),
  h("label", {}, "view ", h("select", {
    id: "as-text", onchange: (event) => tokenView.set("asText", event.target.value === "text"),
  }, h("option", { value: "tokens" }, "tokens"), h("option", { value: "text" }, "text"))),
  tokenView.worstRow);
const note = h("p", { class: "note", hidden: true });
$("run").append(heading, forestView.element, controls, tokenView.map, note, tokenView.scroller, tokenView.detail);
for (const [name, value] of Object.entries(toggles)) tokenView.set(name, value);

function place() {
  if (!open) return;
  const path = open.key.split("/").map(encodeURIComponent).join("/");
  const parameters = new URLSearchParams();
  if (open.leaf) parameters.set("leaf", open.leaf);
  if (open.token >= 0) parameters.set("t", open.token);
  history.replaceState(null, "", `#/${path}${parameters.size ? `?${parameters}` : ""}`);
}

function placed() {
  const [path, query] = location.hash.split("?");
  if (!path.startsWith("#/")) return null;
  const parameters = new URLSearchParams(query ?? "");
  try {
    const key = path.slice(2).split("/").map(decodeURIComponent).join("/");
    return { key, leaf: parameters.get("leaf"), token: Number(parameters.get("t") ?? -1) };
  } catch {
    return null;
  }
}

async function openRun(key, leaf = null, token = -1) {
  open = { key, leaf, token, forest: null };
  document.body.classList.add("reading");
  $("run").hidden = false;
  $("none").hidden = true;
  list.render();
  place();
  await refresh();
}

// Fetch the open run's forest, and its tokens where they are others than those on the screen.
async function refresh() {
  const asked = open;
  if (!asked) return;
  try {
    const forest = await api.forest(asked.key);
    if (open !== asked) return;
    open.forest = forest;
    showHeading(forest);
    forestView.show(forest);
    const found = forest.leaves.find((leaf) => leaf.id === open.leaf)
      // What has gone on is the trajectory that goes through there.
      ?? forest.leaves.find((leaf) => leaf.turns.some((turn) => turn.id === open.leaf)) ?? forest.leaves[0];
    if (found) await openLeaf(found.id, open.token, found.turns.some((turn) => turn.id === open.shown));
    else tokenView.clear("no generation of this run is here");
  } catch (error) {
    if (open === asked) sayRun(error);
  }
}

// `goesOn`: it is what is on the screen, and what came after it.
async function openLeaf(id, token = -1, goesOn = false) {
  const asked = open;
  const leaf = open.forest.leaves.find((each) => each.id === id);
  Object.assign(open, { leaf: id, token });
  forestView.pick(id);
  if (open.shown === id) return;
  place();
  try {
    const arrays = await api.tokens(asked.key, id);
    const { pieces, reason } = await api.pieces(arrays.ids);
    if (open !== asked || open.leaf !== id) return;
    open.shown = id;
    $("run").dataset.shown = id;
    note.hidden = pieces !== null;
    note.textContent = pieces ? "" : `Token ids only: ${reason}. View “text” shows what the engine decoded.`;
    const top = tokenView.scroller.scrollTop;
    tokenView.show(leaf, forestView.records, arrays, pieces);
    if (goesOn) {
      tokenView.scroller.scrollTop = top;
      if (token >= 0) tokenView.select(token);
    } else if (token >= 0) tokenView.jump(token);
  } catch (error) {
    if (open === asked) sayRun(error);
  }
}

function sayRun(error) {
  if (error instanceof api.Refused && error.status === 401) return askKey(error);
  if (open.forest) { // what was read stays on the screen
    heading.querySelector(".gone")?.remove();
    heading.append(h("span", { class: "badge warn gone" }, `as it was: ${error.message}`));
    return undefined;
  }
  heading.replaceChildren(h("button", { class: "back", onclick: closeRun }, "‹ runs"), h("b", { class: "key" }, open.key));
  forestView.show({ records: [], leaves: [] });
  note.hidden = true;
  tokenView.clear(error.message);
  return undefined;
}

function showHeading(forest) {
  const trained = forest.leaves.reduce((sum, leaf) => sum + leaf.trained, 0);
  const longest = Math.max(0, ...forest.leaves.map((leaf) => leaf.length));
  const versions = [...new Set(forest.leaves.flatMap((leaf) => leaf.versions.map(([, , version]) => version)))];
  const last = forest.records.at(-1);
  const missing = Object.entries(forest.missing ?? {}).map(([reason, number]) => `${number} ${reason}`);
  const info = Object.entries(forest.info ?? {});
  heading.replaceChildren(...[
    h("button", { class: "back", title: "back to the list (Esc)", onclick: closeRun }, "‹ runs"),
    h("b", { class: "key" }, forest.key),
    h("span", { class: "headline" }, `reward ${reward(forest.reward)}`),
    h("span", {}, `${count(forest.records.length)} turn${forest.records.length === 1 ? "" : "s"}`),
    h("span", {}, `${count(longest)} tok (${count(trained)} trained)`),
    versions.length ? h("span", {}, `weights ${versions.length > 3 ? `${versions[0]}→…→${versions.at(-1)}` : versions.join("→")}`) : null,
    last ? h("span", {}, last.finish_reason) : null,
    last?.model ? h("span", { class: "quiet" }, last.model) : null,
    forest.pending ? h("span", { class: "badge" }, `${forest.pending} in flight`) : null,
    forest.drained ? h("span", { class: "badge" }, "drained") : null,
    missing.length ? h("span", { class: "badge warn" }, `missing: ${missing.join(", ")}`) : null,
    info.length ? h("span", { class: "quiet info", title: JSON.stringify(forest.info, null, 1) },
      info.slice(0, 4).map(([name, value]) => `${name}=${JSON.stringify(value)}`).join(" ").slice(0, 200)) : null,
  ].filter(Boolean));
}

function closeRun() {
  document.body.classList.remove("reading");
  $("runs").focus();
}

async function copy() {
  try {
    await navigator.clipboard.writeText(tokenView.plainText());
    say("copied");
  } catch {
    say("the browser lets nobody copy here: it wants https or localhost");
  }
}

// The talk with the server.

let cursor = "";
let answered = 0;
let keyAsked = false;
let faulty = false; // whether the notice tells of a fault that may pass

function say(text, lasting = false) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
  if (text && !lasting) setTimeout(() => { if ($("notice").textContent === text) say(""); }, 4000);
}

function setLive(state, words) {
  $("live").className = state;
  $("live").textContent = words;
}

function askKey(error) {
  if (keyAsked) return;
  keyAsked = true;
  $("key-reason").textContent = api.hasKey() ? `${error.message}: this key is another one.`
    : "This server tells of its records whoever has its admin key. The key stays in this page.";
  api.forgetKey();
  $("key-dialog").showModal();
}

function fault(error) {
  if (error instanceof api.Refused && error.status === 401) {
    askKey(error);
    setLive("off", "○ key wanted");
    explain("This server wants its admin key.");
  } else if (error instanceof api.Refused) {
    setLive("off", "○ refused");
    explain(error.message);
    say(error.message, true);
    faulty = true;
  } else {
    const when = answered ? `, last reply ${new Date(answered).toLocaleTimeString()}` : "";
    setLive("off", `○ the server does not answer${when}`);
    explain("The server does not answer.");
  }
}

function explain(words) {
  $("empty").replaceChildren(h("p", {}, words));
}

function explainNothing() {
  $("empty").replaceChildren(
    h("p", {}, "Nothing is recorded yet. An agent's API key names its run:"),
    h("pre", {}, `OpenAI(base_url="${location.origin}/v1", api_key="0/task-7/1")`));
}

async function loadKeys() {
  let after = null;
  for (;;) {
    const page = await api.keys(after);
    runs.takeKeys(page);
    if (page.length < 1000) return;
    after = page.at(-1).key;
    showListSoon();
  }
}

async function follow() {
  let waits = false;
  for (;;) {
    try {
      if (keyAsked) {
        await pause(200);
        continue;
      }
      const begins = cursor === "";
      const news = await api.recent(cursor, waits ? WAIT_S : 0);
      const restarted = cursor !== "" && cursor.split(".")[0] !== news.next.split(".")[0];
      if (restarted) {
        runs.clear();
        say("The server was started anew: what it had in its memory is gone.", true);
      }
      answered = Date.now();
      cursor = news.next;
      if (begins || restarted) {
        await loadKeys();
        explainNothing();
      }
      const changed = runs.take(news);
      waits = news.generations.length + news.runs.length < api.LIMIT;
      setLive("on", api.LIVE);
      if (faulty && !restarted) say("");
      faulty = false;
      if (changed.size || begins || restarted) showListSoon();
      if (open?.forest && changed.has(open.key)) refresh();
      if (waits && changed.size) await pause(300); // news come in bursts
    } catch (error) {
      waits = false;
      fault(error);
      showList();
      await pause(RETRY_MS);
    }
  }
}

async function watchStats() {
  for (;;) {
    if (!document.hidden && !keyAsked) {
      try {
        showStats(await api.stats());
      } catch { /* `follow` says what is wrong */ }
    }
    await pause(STATS_MS);
  }
}

function showStats(stats) {
  const sum = (values) => Object.values(values ?? {}).reduce((total, value) => total + value, 0);
  const { recorder, store } = stats;
  const dropped = sum(recorder.dropped);
  const evicted = store.counters.evicted ?? 0;
  const words = [
    [`stored ${count(store.records)}`],
    [`in flight ${count(recorder.pending)}`],
    [`dropped ${count(dropped)}`, dropped > 0, Object.entries(recorder.dropped).map((each) => each.join(": ")).join("\n")],
    [`evicted ${count(evicted)}`, evicted > 0],
    [store.max_bytes ? `${bytes(store.bytes)} of ${bytes(store.max_bytes)}` : bytes(store.bytes), store.max_bytes && store.bytes > 0.9 * store.max_bytes],
  ];
  const unreachable = stats.unreachable ?? [];
  $("stats").replaceChildren(
    stats.sources ? h("span", { title: stats.sources.join("\n") }, stats.sources.length > 1 ? `${stats.sources.length} sources` : stats.sources[0]) : h("span", {}, location.host),
    ...words.map(([text, warns, title]) => h("span", { class: warns ? "warn" : "", title: title ?? "" }, text + (warns ? " ⚠" : ""))),
    unreachable.length ? h("span", { class: "warn", title: unreachable.join("\n") }, `${unreachable.length} unreachable ⚠`) : "");
}

// The keys.

const KEYS = [
  ["j  k", "next, previous run"],
  ["h  l", "previous, next trajectory of the run"],
  ["n  p", "next, previous worst token"],
  ["[  ]", "previous, next turn"],
  ["←  →", "previous, next token"],
  ["/", "search the keys"],
  ["f", "fold what was not sampled"],
  ["g", "colour by another metric"],
  ["m  v  w", "mask, weight versions, whitespace"],
  ["t", "tokens or text"],
  ["c", "copy the text"],
  ["Esc", "back"],
  ["?", "this"],
];
$("help-keys").append(...KEYS.flatMap(([keys, what]) => [h("dt", {}, keys.split("  ").map((each) => h("kbd", {}, each))), h("dd", {}, what)]));

const click = (id) => () => $(id).click();
const cycle = (id) => () => {
  const element = $(id);
  element.selectedIndex = (element.selectedIndex + 1) % element.options.length;
  element.dispatchEvent(new Event("change"));
};
const ACTIONS = {
  j: () => move(1), k: () => move(-1),
  h: () => open && forestView.next(-1), l: () => open && forestView.next(1),
  n: () => tokenView.nextWorst(1), p: () => tokenView.nextWorst(-1),
  "]": () => tokenView.nextTurn(1), "[": () => tokenView.nextTurn(-1),
  ArrowRight: () => tokenView.selected >= 0 && tokenView.jump(tokenView.selected + 1),
  ArrowLeft: () => tokenView.selected >= 0 && tokenView.jump(tokenView.selected - 1),
  "/": () => $("search").focus(), f: () => tokenView.length && tokenView.foldRest(),
  g: cycle("metric"), m: click("toggle-mask"), v: click("toggle-versions"), w: click("toggle-whitespace"),
  t: cycle("as-text"), c: copy, Escape: closeRun, "?": () => $("help").showModal(),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const typing = event.target.matches("input:not([type=checkbox]), select, textarea");
  if (typing) {
    if (event.key === "Escape" || event.key === "Enter") {
      event.preventDefault();
      event.target.blur();
      $("runs").focus();
    }
    return;
  }
  const action = ACTIONS[event.key];
  if (!action || (event.target.closest("#runs") && event.key.startsWith("Arrow"))) return;
  event.preventDefault();
  action();
});

$("filters").addEventListener("submit", (event) => event.preventDefault());
$("search").addEventListener("input", (event) => set("search", event.target.value.trim()));
for (const name of ["finish", "kind", "sort"]) $(name).addEventListener("change", (event) => set(name, event.target.value));
$("group").addEventListener("change", (event) => set("group", event.target.checked));
$("order").addEventListener("click", () => set("descending", !wanted.descending));
$("help-button").addEventListener("click", () => $("help").showModal());
$("key-dialog").addEventListener("cancel", (event) => event.preventDefault());
$("key-form").addEventListener("submit", () => {
  api.useKey($("key").value, $("keep").checked);
  $("key").value = "";
  $("forget").hidden = false;
  keyAsked = false;
  if (open) refresh();
});
$("forget").addEventListener("click", () => {
  api.forgetKey();
  location.reload();
});
window.addEventListener("hashchange", () => {
  const found = placed();
  if (found && found.key !== open?.key) openRun(found.key, found.leaf, found.token);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  tokenView.drawMap();
  if (open?.forest) forestView.list.render();
});

try {
  await api.takeToken();
} catch (error) {
  say(`${error.message}: start \`recorder view\` again`, true);
}
$("forget").hidden = !api.hasKey();
explain("Asking the server …");
showList();
follow();
watchStats();
const found = placed();
if (found) openRun(found.key, found.leaf, found.token);
