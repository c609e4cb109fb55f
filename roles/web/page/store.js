// What the page knows: the newest record of everything, and the history of one job. Everything is bounded.

import { isFigure } from "./format.js";

const MAX_RECORDS = 1024; // of each kind
const MAX_EVENTS = 500;
const MAX_ROWS = 4000;
const RECENT_ROWS = 500; // the newest rows of a series are never thinned
const FINISHED = new Set(["done", "cancelled", "failed"]);
const URGENCY = ["running", "forming", "saving", "paused", "waiting", "queued"];

/** First index in `rows` whose step is at least `step`. */
function place(rows, step) {
  let low = 0;
  let high = rows.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (rows[middle].step < step) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Metric rows of one job in the order of their steps. Generations never fall along the steps: a row of a newer
 *  generation at an earlier step (the job was restored from a checkpoint) removes the rows that it invalidates. */
class Series {
  rows = [];
  changes = 0;
  #stride = 1;

  get last() {
    return this.rows.at(-1);
  }

  add(row) {
    const { rows } = this;
    const generation = row.generation ?? 0;
    const at = place(rows, row.step);
    if (at > 0 && (rows[at - 1].generation ?? 0) > generation) return;
    let stop = at;
    while (stop < rows.length && (rows[stop].step === row.step || (rows[stop].generation ?? 0) < generation)) stop += 1;
    rows.splice(at, stop - at, row);
    this.changes += 1;
    if (rows.length > MAX_ROWS) this.#thin();
  }

  /** Thin old rows evenly, so that the curves keep their shape. Of neighbours the one with a validation stays. */
  #thin() {
    const [old, recent] = [this.rows.slice(0, -RECENT_ROWS), this.rows.slice(-RECENT_ROWS)];
    for (; ; this.#stride *= 2) {
      const kept = new Map();
      for (const row of old) {
        const bucket = Math.floor(row.step / this.#stride);
        if (!kept.has(bucket) || isFigure(row.val_loss)) kept.set(bucket, row);
      }
      this.rows = [...kept.values(), ...recent];
      if (this.rows.length <= (MAX_ROWS * 3) / 4) return;
    }
  }
}

export class Store {
  cluster = null;
  job = ""; // id of the job whose history is kept
  series = new Series();
  peers = new Map();
  jobs = new Map();
  checkpoints = new Map();
  serving = new Map();
  parts = new Map();
  events = new Map();
  recoveries = new Map();
  #snapshot = null; // topic → ids of the snapshot that is arriving

  /** Keep the history of `job` from now on, and drop that of another one. */
  choose(job) {
    if (job === this.job) return;
    this.job = job;
    this.series = new Series();
    this.recoveries.clear();
  }

  /** Step after which the history of `job` is still unknown. -1: all of it is, or the job was restored meanwhile. */
  resumeAfter(job) {
    const last = this.job === job ? this.series.last : undefined;
    return last && last.generation === this.jobs.get(job)?.generation ? last.step : -1;
  }

  beginSnapshot() {
    this.#snapshot = new Map();
  }

  /** Take a message of the stream. A topic that is unknown here is ignored: the seed may be newer. */
  apply(topic, items) {
    if (topic === "ready") return void this.#endSnapshot();
    const gone = topic.endsWith("-gone");
    const kind = gone ? topic.slice(0, -"-gone".length) : topic;
    if (!Array.isArray(items)) return;
    const records = items.filter((item) => item !== null && typeof item === "object");
    if (kind === "cluster") this.#enter(records.at(-1));
    else if (kind === "metrics")
      records.forEach((row) => row.job === this.job && isFigure(row.step) && this.series.add(row));
    else if (kind === "recoveries")
      records.forEach((item) => item.job === this.job && this.#put(kind, item.number, item));
    else if (!(this[kind] instanceof Map)) return;
    else if (gone) records.forEach((item) => this[kind].delete(item.id));
    else records.forEach((item) => this.#put(kind, item.id, item));
  }

  #put(kind, id, record) {
    const known = this[kind];
    const most = kind === "events" ? MAX_EVENTS : MAX_RECORDS;
    if (!known.has(id) && known.size >= most) known.delete(known.keys().next().value);
    if (kind === "peers") record.seen_ms = performance.now();
    known.set(id, record);
    if (this.#snapshot) this.#snapshot.set(kind, (this.#snapshot.get(kind) ?? new Set()).add(id));
  }

  #endSnapshot() {
    for (const kind of ["peers", "jobs", "checkpoints", "parts", "serving"]) {
      const ids = this.#snapshot?.get(kind);
      for (const id of this.#snapshot ? [...this[kind].keys()] : []) if (!ids?.has(id)) this[kind].delete(id);
    }
    this.#snapshot = null;
  }

  #enter(cluster) {
    if (cluster && this.cluster && cluster.cluster_id !== this.cluster.cluster_id) {
      for (const kind of ["peers", "jobs", "checkpoints", "parts", "serving", "events"]) this[kind].clear();
      this.choose("");
    }
    this.cluster = cluster ?? this.cluster;
  }

  /** Ring members by job and rank, then the others by name. */
  peersInOrder() {
    const isOutside = (peer) => Number(peer.rank === null);
    const order = (a, b) => isOutside(a) - isOutside(b) || a.job.localeCompare(b.job) || a.rank - b.rank;
    return [...this.peers.values()].sort((a, b) => order(a, b) || a.name.localeCompare(b.name));
  }

  jobsInOrder() {
    return [...this.jobs.values()].sort((a, b) => b.created_at - a.created_at || a.id.localeCompare(b.id));
  }

  /** The job to show if the person chose none: one that runs, else one that waits to run, else the newest. */
  currentJob() {
    const urgency = (job) => (URGENCY.includes(job.state) ? URGENCY.indexOf(job.state) : URGENCY.length);
    return this.jobsInOrder().sort((a, b) => urgency(a) - urgency(b))[0];
  }

  nameOf(peer) {
    return this.peers.get(peer)?.name ?? peer;
  }

  /** Seconds until the last step of `job` at the pace of its recent rows; undefined if unknown. */
  eta(job) {
    const [first, last] = [this.series.rows.at(-50) ?? this.series.rows[0], this.series.last];
    if (job.state !== "running" || !first || last.step <= first.step || last.wall <= first.wall) return undefined;
    return (Math.max(0, job.steps_total - job.step) * (last.wall - first.wall)) / (last.step - first.step);
  }
}

export const isFinished = (job) => FINISHED.has(job.state);
