// What is known of all runs, and which of them are shown in which order.

export class Runs {
  constructor() {
    this.byKey = new Map();
  }

  get(key) {
    let run = this.byKey.get(key);
    if (!run) {
      const parts = key.split("/");
      run = {
        key, name: parts.at(-1), task: parts.slice(0, -1).join("/"),
        turns: 0, prompt: 0, sampled: 0, length: 0, worst: null, sum: 0, counted: 0,
        finish: null, versions: [], flags: new Set(), reward: null, drained: false,
        last: 0, missing: 0, pending: 0, ids: new Set(),
      };
      this.byKey.set(key, run);
    }
    return run;
  }

  // What finished lately, and what became of runs. Returns the keys that changed.
  take(news) {
    const changed = new Set();
    const entries = [...news.generations.map((each) => [each, true]), ...news.runs.map((each) => [each, false])];
    entries.sort((a, b) => a[0].seq - b[0].seq);
    for (const [each, generation] of entries) {
      if (generation) this.#generation(this.get(each.key), each);
      else if (each.removed) this.#remove(each.key, changed);
      else {
        const run = this.get(each.key);
        if (each.reward !== undefined && each.reward !== null) run.reward = each.reward;
        if (typeof each.drained === "boolean") run.drained = each.drained;
      }
      changed.add(each.key);
    }
    return changed;
  }

  #generation(run, each) {
    if (run.ids.has(each.id)) return;
    run.ids.add(each.id);
    run.turns = Math.max(run.turns, run.ids.size);
    run.sampled += each.response;
    run.length = Math.max(run.length, each.prompt + each.response);
    run.finish = each.finish_reason;
    run.last = each.finished_at;
    run.drained = false;
    for (const version of each.versions ?? []) if (!run.versions.includes(version)) run.versions.push(version);
    for (const flag of each.flags ?? []) run.flags.add(flag);
    const { logprob_mean: mean, logprob_min: low } = each;
    if (typeof mean === "number") {
      run.sum += mean * each.response;
      run.counted += each.response;
    }
    if (typeof low === "number") run.worst = run.worst === null ? low : Math.min(run.worst, low);
  }

  #remove(prefix, changed) {
    for (const key of [...this.byKey.keys()]) {
      if (prefix === "" || key === prefix || key.startsWith(`${prefix}/`)) {
        this.byKey.delete(key);
        changed.add(key);
      }
    }
  }

  // A page of what the store holds: of older runs there is no more than that.
  takeKeys(page) {
    const now = Date.now() / 1000;
    for (const each of page) {
      const run = this.get(each.key);
      run.turns = Math.max(run.turns, each.records);
      run.reward = each.reward ?? run.reward;
      run.missing = Object.values(each.missing).reduce((sum, value) => sum + value, 0);
      run.pending = each.pending;
      run.last = run.last || now - each.age_s;
    }
  }

  clear() {
    this.byKey.clear();
  }
}

const mean = (run) => (run.counted ? run.sum / run.counted : null);

const METRICS = {
  latest: (run) => run.last,
  reward: (run) => run.reward,
  tokens: (run) => run.length,
  turns: (run) => run.turns,
  worst: (run) => run.worst,
  mean,
};

// Runs whose keys are numbers in the order of the numbers.
const collator = new Intl.Collator("en", { numeric: true });

function compare(metric, descending) {
  const sign = descending ? -1 : 1;
  if (metric === "key") return (a, b) => sign * collator.compare(a.key, b.key);
  const value = METRICS[metric];
  return (a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x === y) return collator.compare(a.key, b.key);
    if (x === null) return 1; // what has none comes last, either way round
    if (y === null) return -1;
    return sign * (x - y);
  };
}

export function tasksOf(runs) {
  const tasks = new Map();
  for (const run of runs) {
    if (!tasks.has(run.task)) tasks.set(run.task, []);
    tasks.get(run.task).push(run);
  }
  return tasks;
}

function spreadless(runs) {
  const rewards = runs.map((run) => run.reward).filter((each) => each !== null);
  return rewards.length > 1 && rewards.every((each) => each === rewards[0]);
}

// The rows to show: runs, under a heading for each task where they are grouped.
export function select(all, wanted) {
  const tasks = tasksOf(all.byKey.values());
  const flat = new Set([...tasks].filter(([, runs]) => spreadless(runs)).map(([task]) => task));
  const kinds = {
    flagged: (run) => run.flags.size > 0,
    drained: (run) => run.drained,
    kept: (run) => !run.drained,
    unrewarded: (run) => run.reward === null,
    incomplete: (run) => run.missing > 0,
    "no-spread": (run) => flat.has(run.task),
  };
  const kind = kinds[wanted.kind] ?? (() => true);
  const matching = [...all.byKey.values()].filter((run) =>
    (!wanted.search || run.key.includes(wanted.search))
    && (!wanted.finish || run.finish === wanted.finish)
    && kind(run));
  const shown = wanted.bar === null ? matching
    : matching.filter((run) => run.reward !== null && run.reward >= wanted.bar.from
      && (run.reward < wanted.bar.to || (wanted.bar.last && run.reward === wanted.bar.to)));
  const order = compare(wanted.sort, wanted.descending);
  shown.sort(order);
  const rows = [];
  if (wanted.group) {
    // Tasks come in the order of their first run.
    for (const [task, runs] of tasksOf(shown)) {
      const rewards = runs.map((run) => run.reward).filter((each) => each !== null);
      const average = rewards.length ? rewards.reduce((sum, each) => sum + each, 0) / rewards.length : null;
      rows.push({ task, runs: runs.length, average, flat: flat.has(task) });
      for (const run of runs) rows.push({ run });
    }
  } else {
    for (const run of shown) rows.push({ run });
  }
  return { rows, shown: shown.length, total: all.byKey.size, flat: flat.size, tasks: tasks.size, rewards: rewardsOf(matching) };
}

const BARS = 20;

// How many runs have which reward: bars of equal width over the range that there is.
function rewardsOf(runs) {
  const rewards = runs.map((run) => run.reward).filter((each) => each !== null);
  if (!rewards.length) return [];
  let [low, high] = [Infinity, -Infinity];
  for (const each of rewards) {
    low = Math.min(low, each);
    high = Math.max(high, each);
  }
  if (low === high) return [{ from: low, to: high, last: true, runs: rewards.length }];
  const width = (high - low) / BARS;
  const bars = Array.from({ length: BARS }, (_, number) => ({
    from: low + number * width, to: number === BARS - 1 ? high : low + (number + 1) * width,
    last: number === BARS - 1, runs: 0,
  }));
  for (const each of rewards) bars[Math.min(BARS - 1, Math.floor((each - low) / width))].runs += 1;
  return bars;
}

export const meanLogprob = mean;
