// The sections below the charts: one table each, filled from the store.

import * as format from "./format.js";
import { Table, byId, h, setText } from "./dom.js";
import { linksOf, linkText, slowestFirst, wayOf } from "./ring.js";
import { isFinished } from "./store.js";

const PHASES = ["detect", "agree", "form", "transfer", "commit"];
const MOST_SHOWN = 200; // rows of a table

const { UNKNOWN, isFigure, text } = format;
const column = (label, value, kind) => ({ label, value, class: kind });
const number = (label, value) => column(label, value, "number");

/** A column of buttons. `verbs(record)`: their `[label, action]`; `about(record)`: what they act on. */
function buttons(verbs, about) {
  const value = (record) => ({ buttons: verbs(record).map((verb) => [...verb, text(about(record), 60)]) });
  return column("Actions", value, "actions");
}

/** What can be done with a job now: `[label, verb]`. */
export function verbsOf(job) {
  if (isFinished(job)) return [["Forget", "forget"]];
  const verbs = job.state === "paused" ? [["Resume", "resume"]] : [["Pause", "pause"]];
  return [...verbs, ["Save", "save"], ["Cancel", "cancel"]];
}

function servedModel({ model, upstream, loaded = 1 }) {
  if (upstream) return `${model} (upstream${loaded < 1 ? ", away" : ""})`;
  return loaded < 1 ? `${model} (loading, ${format.percent(loaded)})` : model;
}

function memory(peer) {
  const [used, all] = [peer.memory_bytes, peer.memory_total_bytes];
  return all ? { text: format.usedOf(used, all), bar: used / all } : UNKNOWN;
}

function seen(peer) {
  const age = peer.heartbeat_age_s + (performance.now() - peer.seen_ms) / 1000;
  return age < 5 ? "now" : `${format.duration(age)} ago`;
}

/** Load, memory, temperature and power of each GPU; the bar is their mean load. */
function gpus({ gpus: all = [] }) {
  const told = ({ load, memory_bytes: used, memory_total_bytes: total, temperature_c: heat, power_w: power }) => {
    const more = [total && format.usedOf(used, total), isFigure(heat) && `${Math.round(heat)} °C`];
    return [format.percent(load), ...more, isFigure(power) && `${Math.round(power)} W`].filter(Boolean).join(", ");
  };
  const load = all.reduce((sum, gpu) => sum + (gpu.load ?? 0), 0) / all.length;
  return all.length ? { text: all.map(told).join("; "), bar: load } : UNKNOWN;
}

const runs = ({ runs: done, planned }) => ({ text: `${done} of ${planned}`, bar: planned ? done / planned : 0 });

function progress(item) {
  const part = item.steps_total ? item.step / item.steps_total : 0;
  return { text: format.steps(item), bar: part };
}

const named = (item) => ({ text: text(item.name || item.id, 60), title: text(item.id) });

function phases(item) {
  const known = PHASES.map((phase) => [phase, item[`${phase}_s`]]).filter(([, s]) => isFigure(s) && s >= 0);
  const stack = known.map(([phase, s]) => [phase, s, `${phase} ${format.millis(1000 * s)}`]);
  return { text: "", stack, title: stack.map(([, , said]) => said).join(", ") };
}

/** Median and 99th percentile (nearest rank) of the recoveries' duration. */
function spread(items) {
  const times = items.map((item) => item.total_s).filter(isFigure).sort((a, b) => a - b);
  if (!times.length) return "";
  const at = (part) => format.millis(1000 * times[Math.max(0, Math.ceil(part * times.length) - 1)]);
  return `${format.plural(times.length, "interruption")}: median ${at(0.5)}, 99th percentile ${at(0.99)}`;
}

export class Panels {
  #store;
  #tables;
  #spread = h("p", { class: "dim" });

  /** `act(action, record)`: carries out what a button asks for. */
  constructor(store, act) {
    this.#store = store;
    const jobName = (id) => text(store.jobs.get(id)?.name ?? id, 40);
    const drafterOf = (item) => ({ peer }) => `${store.nameOf(peer)} ${wayOf(store.peers.get(item.peer), peer)}`.trim();
    const stage = (peer) => (peer.stage === null || peer.stage === undefined ? "" : `, stage ${peer.stage}`);
    const nodes = new Table(
      byId("nodes"),
      "Nodes of the cluster",
      [
        column("Name", named),
        column("State", (peer) => format.look(peer.state)),
        column("Role", (peer) => text(peer.roles.join(", "))),
        column("Device", (peer) => text(peer.device, 60), "wide"),
        column("Memory", memory, "barred"),
        column("GPU", gpus, "barred wide"),
        column("Place", (peer) => (peer.rank === null ? UNKNOWN : `rank ${peer.rank}${stage(peer)}`)),
        number("Share", (peer) => (peer.share ? format.whole(peer.share) : UNKNOWN)),
        number("Tokens/s", (peer) => (peer.tokens_per_s ? format.count(peer.tokens_per_s) : UNKNOWN)),
        number("In", (peer) => (peer.in_bps ? format.rate(peer.in_bps) : UNKNOWN)),
        number("Out", (peer) => (peer.out_bps ? format.rate(peer.out_bps) : UNKNOWN)),
        number("Round trip", (peer) => format.millis(peer.rtt_ms)),
        number("Heard", seen),
        buttons(() => [["Evict", "evict"]], (peer) => peer.name),
      ],
      { empty: "No node has joined. Choose “Add worker” for the command to run on another machine.", act },
    );
    const links = new Table(
      byId("links-table"),
      "Links of the ring",
      [
        column("From", (link) => text(store.nameOf(link.from), 40)),
        column("To", (link) => text(store.nameOf(link.to), 40)),
        column("Link", linkText),
      ],
      { key: (link) => `${link.from} ${link.to}` },
    );
    const jobs = new Table(
      byId("jobs"),
      "Jobs",
      [
        column("Name", named),
        column("State", (item) => format.look(item.state)),
        column("Profile", (item) => `${text(item.profile, 40)}, ${text(item.strategy, 20)}`),
        column("Steps", progress, "barred"),
        number("Loss", (item) => format.loss(item.loss)),
        number("Validation", (item) => format.loss(item.val_loss)),
        number("Trained", (item) => (item.trained_s ? format.duration(item.trained_s) : UNKNOWN)),
        column("Created", (item) => format.clock(item.created_at)),
        column("Note", (item) => text(item.reason), "wide"),
        buttons((item) => [["Show", "show"], ...verbsOf(item)], (item) => item.name),
      ],
      { empty: "There is no job. Choose “New job”, or run p2ptrain jobs create --profile tiny.", act },
    );
    const checkpoints = new Table(
      byId("checkpoints"),
      "Checkpoints",
      [
        column("Step", (item) => ({ text: format.whole(item.step), title: text(item.path) })),
        column("Job", (item) => jobName(item.job)),
        column("On", (item) => text(item.peer_name, 40) + stage(item)),
        number("Size", (item) => format.size(item.size_bytes)),
        number("Validation", (item) => format.loss(item.val_loss)),
        column("Saved", (item) => format.clock(item.created_at)),
        buttons(() => [["Restore", "restore"], ["Delete", "delete"]], (item) => `step ${item.step}`),
      ],
      { empty: "No checkpoint is saved yet.", act },
    );
    byId("recoveries").append(this.#spread);
    const recoveries = new Table(
      byId("recoveries"),
      "Interruptions of the job shown, and the time to recover",
      [
        column("At", (item) => ({ text: format.clock(item.wall), title: `generation ${item.generation}` })),
        column("What", (item) => text(item.text || item.kind), "wide"),
        number("Step", (item) => format.whole(item.step)),
        column("Time by phase", phases, "barred phases"),
        number("Total", (item) => format.millis(1000 * item.total_s)),
        number("Fetched", (item) => (item.fetched_bytes ? format.size(item.fetched_bytes) : UNKNOWN)),
      ],
      { key: (item) => String(item.number), empty: "The job shown was never interrupted." },
    );
    const serving = new Table(
      byId("serving"),
      "Verifiers and drafters",
      [
        column("Name", named),
        column("Role", (item) => text(item.role)),
        column("Model", (item) => text(servedModel(item), 60)),
        column("Address", (item) => text(item.http || `${item.host}:${item.port}`), "wide"),
        number("Texts", (item) => format.whole(item.sessions)),
        number("Waiting", (item) => format.whole(item.stats?.waiting)),
        number("Tokens/s", (item) => format.count(item.stats?.tokens_per_s)),
        number("First token", (item) => format.millis(item.stats?.first_ms)),
        number("Between tokens", (item) => format.millis(item.stats?.between_ms)),
        number("Cached", (item) => format.percent(item.stats?.cached_share)),
        number("Accepted", (item) => format.percent(item.stats?.alpha)),
        number("Speed-up", (item) => (item.stats?.speed_up ? `${item.stats.speed_up.toFixed(2)}×` : UNKNOWN)),
        column("Drafters", (item) => text((item.drafters ?? []).map(drafterOf(item)).join(", ") || UNKNOWN)),
      ],
      { empty: "No verifier or drafter is connected." },
    );
    const experiments = new Table(
      byId("experiments"),
      "Experiments",
      [
        column("Name", named),
        column("State", (item) => format.look(item.state)),
        column("Runs", runs, "barred"),
        column("Now", (item) => text(item.text), "wide"),
        number("Left", (item) => format.duration(item.left_s)),
        buttons(() => [["Analysis", "analyse"]], (item) => item.id),
      ],
      { empty: "No experiment was begun on this seed: POST /api/v1/experiments begins one.", act },
    );
    const events = new Table(
      byId("events"),
      "Events, the newest first",
      [
        column("Time", (item) => format.clock(item.wall)),
        column("Level", (item) => format.look(item.level)),
        column("What", (item) => text(item.text, 500), "wide"),
      ],
      { empty: "No event matches." },
    );
    this.#tables = { nodes, links, jobs, checkpoints, recoveries, serving, experiments, events };
  }

  /** `job`: the one shown, or undefined. `filter`: words that an event must have. */
  update(job, filter) {
    const store = this.#store;
    this.#tables.nodes.update(store.peersInOrder());
    const links = job ? slowestFirst(linksOf(job, store.peers)) : [];
    byId("links").hidden = !links.length;
    this.#tables.links.update(links);
    this.#tables.jobs.update(store.jobsInOrder().slice(0, MOST_SHOWN));
    const checkpoints = [...store.checkpoints.values()].sort((a, b) => b.created_at - a.created_at);
    this.#tables.checkpoints.update(checkpoints.slice(0, MOST_SHOWN));
    const recoveries = [...store.recoveries.values()].sort((a, b) => b.number - a.number);
    this.#tables.recoveries.update(recoveries.slice(0, MOST_SHOWN));
    setText(this.#spread, spread(recoveries));
    this.#tables.serving.update([...store.serving.values()]);
    const wanted = filter.toLowerCase().split(/\s+/).filter(Boolean);
    const matches = ({ level, kind, text: said }) =>
      wanted.every((word) => `${level} ${kind} ${said}`.toLowerCase().includes(word));
    const events = [...store.events.values()].sort((a, b) => b.id - a.id).filter(matches);
    this.#tables.events.update(events.slice(0, MOST_SHOWN));
  }

  showExperiments(items) {
    this.#tables.experiments.update(items.slice(0, MOST_SHOWN));
  }
}
