// The page: connects the feed, the store and what is drawn; carries out what the person asks for.

import { Charts } from "./charts.js";
import { Chat } from "./chat.js";
import { announce, byId, confirmed, copy, fill, h, notify, openDialog, setText, svg } from "./dom.js";
import { Feed, Problem, ask, setKey } from "./feed.js";
import * as format from "./format.js";
import { Panels, verbsOf } from "./panels.js";
import { Ring } from "./ring.js";
import { Store } from "./store.js";

const DRAW_MS = 500; // at most one drawing in this time: the page may share the machine with a worker
const QUIET_S = 10; // from then on the status says for how long nothing was heard
const EXPERIMENTS_MS = 10_000; // between two looks at the experiments
const { text } = format;

const store = new Store();
const feed = new Feed(store, draw);
const charts = new Charts(byId("charts"));
const ring = new Ring(byId("ring"));
const panels = new Panels(store, (action, record) => act(action, record));
const chat = new Chat(store, { changed: showView, unlock });
const theJob = () => store.jobs.get(store.job);

// ------------------------------------------------------------------------------------------------------------ actions

const path = encodeURIComponent;
const jobPath = (job, rest = "") => `training/jobs/${path(job.id)}${rest}`;
const checkpointPath = (item, rest = "") => `checkpoints/${path(item.id)}${rest}`;
const jobOf = (checkpoint) => text(store.jobs.get(checkpoint.job)?.name ?? checkpoint.job);

/** Buttons and keys: the request, what is said when it is done, and the question before what cannot be undone. */
const ACTIONS = {
  pause: { send: (job) => ["PUT", jobPath(job, "/pause")], done: (job) => `${text(job.name)} pauses at the next step` },
  resume: { send: (job) => ["PUT", jobPath(job, "/resume")], done: (job) => `${text(job.name)} goes on` },
  save: { send: (job) => ["PUT", jobPath(job, "/save")], done: (job) => `${text(job.name)} is saved as soon as no step runs` },
  cancel: {
    send: (job) => ["DELETE", jobPath(job)],
    done: (job) => `${text(job.name)} is cancelled`,
    question: (job) => `Cancel ${text(job.name)}?`,
    consequence: (job) => `It stops for good at step ${format.steps(job)}. Its checkpoints stay.`,
  },
  forget: {
    send: (job) => ["DELETE", jobPath(job, "?forget=true")],
    done: (job) => `${text(job.name)} is forgotten`,
    question: (job) => `Forget ${text(job.name)}?`,
    consequence: () => "Its metrics are removed for good. Its checkpoints stay on the workers' disks.",
  },
  restore: {
    send: (item) => ["POST", checkpointPath(item, "/restore"), {}],
    done: (item) => `${jobOf(item)} goes back to step ${format.whole(item.step)}`,
    question: (item) => `Go back to step ${format.whole(item.step)}?`,
    consequence: (item) => `The job ${jobOf(item)} goes on from this checkpoint. Later steps are lost.`,
  },
  delete: {
    send: (item) => ["DELETE", checkpointPath(item)],
    done: (item) => `the checkpoint of step ${format.whole(item.step)} is deleted`,
    question: (item) => `Delete the checkpoint of step ${format.whole(item.step)}?`,
    consequence: (item) => `Its ${format.size(item.size_bytes)} on ${text(item.peer_name)} are removed for good.`,
  },
  evict: {
    send: (peer) => ["DELETE", `cluster/nodes/${path(peer.id)}`],
    done: (peer) => `${text(peer.name)} is evicted`,
    question: (peer) => `Evict ${text(peer.name)}?`,
    consequence: () => "It is disconnected, and needs a new ticket to come back. Its job goes on without it.",
  },
};

const underWay = new Set(); // a repeated key or click sends one request

async function act(name, record) {
  const request = `${name} ${record.id}`;
  if (underWay.has(request)) return;
  underWay.add(request);
  try {
    if (name === "show") return void chooseJob(record.id);
    if (name === "analyse") return void (await analyse(record));
    const { send, done, question, consequence } = ACTIONS[name];
    if (question && !(await confirmed(question(record), consequence(record)))) return;
    const [method, where, body] = send(record);
    await ask(where, { method, body });
    notify(done(record));
  } catch (problem) {
    fail(`Cannot ${name} ${text(record.name ?? record.id, 60)}`, problem);
  } finally {
    underWay.delete(request);
  }
}

function fail(what, problem) {
  if (!(problem instanceof Problem)) console.error(problem);
  notify(`${what}: ${text(problem.message, 500)}`, { remedy: text(problem.remedy, 500), role: "bad" });
  if (problem.status === 401) unlock(problem);
}

function chooseJob(id) {
  feed.choose(id);
  history.replaceState(null, "", `?job=${path(id)}`);
  draw();
}

/** Settings as `section.name = value`, one a line. A value that is not JSON is a text. */
function readSettings(lines) {
  const pairs = lines.split("\n").filter((line) => line.trim()).map((line) => {
    const [, name, value] = /^([^=]*)=(.*)$/.exec(line) ?? [];
    if (value === undefined) throw new Problem(`“${line.trim()}” is no setting`, "write section.name = value");
    try {
      return [name.trim(), JSON.parse(value)];
    } catch {
      return [name.trim(), value.trim()];
    }
  });
  return Object.fromEntries(pairs);
}

async function createJob() {
  const option = ({ name, about }) => h("option", { value: text(name, 60) }, text(about));
  const listed = ({ items }) => byId("profiles").replaceChildren(...items.map(option));
  ask("training/profiles").then(listed, () => {}); // without the list a name can still be typed
  const form = await openDialog("create");
  if (form === null) return;
  try {
    const body = { profile: form.profile, name: form.name, set: readSettings(form.settings) };
    const job = await ask("training/jobs", { method: "POST", body });
    notify(`${text(job.name)} is created`);
    store.apply("jobs", [job]);
    chooseJob(job.id);
  } catch (problem) {
    fail("Cannot create the job", problem);
  }
}

async function addWorker() {
  const form = await openDialog("invite");
  if (form === null) return;
  try {
    const body = { role: form.role, expires_s: Number(form.expires_s), host: form.host };
    const { command } = await ask("cluster/nodes", { method: "POST", body });
    setText(byId("command-text"), text(command, 4000));
    await openDialog("command");
    setText(byId("command-text"), ""); // it holds a secret
  } catch (problem) {
    fail("Cannot make a command", problem);
  }
}

async function showWatchLink() {
  try {
    const { rows } = await ask("cluster/watch-link");
    const dark = rows.flatMap((row, y) => [...row].map((cell, x) => (cell === "1" ? `M${x} ${y}h1v1h-1z` : "")));
    const code = { viewBox: `-4 -4 ${rows.length + 8} ${rows.length + 8}`, role: "img", "aria-label": "QR code" };
    byId("watch-code").replaceChildren(svg("svg", code, svg("path", { d: dark.join("") })));
    await openDialog("watch");
    byId("watch-code").replaceChildren(); // it holds a secret
  } catch (problem) {
    fail("Cannot show the code", problem);
  }
}

async function unlock(problem) {
  setText(byId("unlock-text"), text(problem.message));
  const form = await openDialog("unlock");
  if (form === null) return;
  setKey(form.key.trim());
  byId("unlock").querySelector("form").reset();
  told.link = "connecting"; // a wrong key is asked for again
  feed.retry();
}

async function loadExperiments() {
  if (feed.state !== "live" || document.hidden) return;
  const { items } = await ask("experiments").catch(() => ({})); // the feed tells why
  if (items) panels.showExperiments(items);
}

async function analyse(experiment) {
  const { summary } = await ask(`experiments/${path(experiment.id)}/analyze`, { method: "POST", body: {} });
  const place = byId("analysis");
  place.hidden = false;
  byId("experiments").append(place);
  const items = summary.conclusions.map((conclusion) => h("li", {}, text(conclusion, 1000)));
  place.replaceChildren(h("h3", {}, text(experiment.id)), h("ul", {}, items));
  place.scrollIntoView({ block: "nearest" });
}

// ------------------------------------------------------------------------------------------------------------ drawing

let asked = false;
let drawnAt = 0;

/** Draw soon: once for all changes of a frame, and not more often than each DRAW_MS. */
function draw() {
  if (asked) return;
  asked = true;
  const frame = () => requestAnimationFrame(() => {
    asked = false;
    drawnAt = performance.now();
    drawNow();
  });
  setTimeout(frame, Math.max(0, DRAW_MS - (performance.now() - drawnAt)));
}

function drawNow() {
  const job = theJob();
  drawLink();
  if (store.cluster) byId("main").classList.remove("is-empty");
  setText(byId("cluster"), store.cluster ? text(store.cluster.name, 40) : "");
  drawJobs(job);
  drawTiles(job);
  drawCharts(job);
  ring.update(job, store.peers);
  panels.update(job, byId("filter").value);
  chat.update(feed.state === "live");
  tellChanges(job);
}

let chartsShown = "";

/** Draw the last steps, as many as the person chose, if there are other ones than before. */
function drawCharts(job) {
  const { rows, last, changes } = store.series;
  const range = Number(byId("range").value);
  const settings = job?.changes ?? [];
  const shownNow = `${store.job} ${changes} ${range} ${settings.length}`;
  if (shownNow === chartsShown) return;
  chartsShown = shownNow;
  charts.draw(range && last ? rows.filter((row) => row.step > last.step - range) : rows, settings);
}

const LINKS = {
  live: ["●", "good", "live"],
  connecting: ["◌", "busy", "connecting"],
  lost: ["✗", "bad", "not connected"],
  locked: ["!", "warn", "needs a key"],
};

function drawLink() {
  const [symbol, role, said] = LINKS[feed.state];
  const quietS = feed.heardAt ? (Date.now() - feed.heardAt) / 1000 : 0;
  const isQuiet = feed.state === "live" && quietS > QUIET_S;
  setText(byId("link-symbol"), isQuiet ? "○" : symbol);
  byId("link-symbol").className = `symbol ${isQuiet ? "calm" : role}`;
  setText(byId("link-text"), isQuiet ? `live, quiet for ${format.duration(quietS)}` : said);
  const isLost = feed.state === "lost" || feed.state === "locked";
  byId("stale").hidden = !isLost;
  document.body.classList.toggle("is-stale", isLost && store.cluster !== null);
  if (!isLost) return;
  const age = feed.heardAt ? `The figures are from ${format.clock(feed.heardAt / 1000)}. ` : "";
  const waitS = Math.max(0, (feed.retryAt - Date.now()) / 1000);
  const wait = feed.state === "lost" ? ` Next try in ${format.duration(waitS)}.` : "";
  const remedy = feed.problem.remedy ? ` (${text(feed.problem.remedy)})` : "";
  setText(byId("stale-text"), `${age}${text(feed.problem.message)}${remedy}.${wait}`);
  setText(byId("retry"), feed.state === "locked" ? "Enter the key" : "Try now");
}

function drawJobs(job) {
  const choice = byId("job");
  const options = store.jobsInOrder().map((item) => [item.id, `${text(item.name, 40)} (${text(item.state, 20)})`]);
  if (!options.length) options.push(["", "no job yet"]);
  if (JSON.stringify(options) !== choice.dataset.shown) {
    choice.dataset.shown = JSON.stringify(options);
    choice.replaceChildren(...options.map(([value, said]) => h("option", { value }, said)));
  }
  choice.value = job?.id ?? "";
  fill(byId("job-state"), job ? format.look(job.state) : "");
  setText(byId("job-reason"), job && job.state !== "running" ? text(job.reason) : "");
  const verbs = JSON.stringify(job ? verbsOf(job) : []);
  const actions = byId("job-actions");
  if (actions.dataset.shown !== verbs) {
    actions.dataset.shown = verbs;
    const focused = [...actions.children].indexOf(document.activeElement);
    const does = (verb) => ({ type: "button", id: `do-${verb}`, onclick: () => act(verb, theJob()) });
    actions.replaceChildren(...JSON.parse(verbs).map(([label, verb]) => h("button", does(verb), label)));
    actions.children[focused]?.focus();
  }
}

function drawTiles(job) {
  const eta = job ? store.eta(job) : undefined;
  const tiles = {
    Step: job ? format.steps(job) : format.UNKNOWN,
    Loss: format.loss(job?.loss),
    Validation: format.loss(job?.val_loss),
    "Tokens/s": format.count(job?.tokens_per_s),
    "Time of a step": format.millis(job?.step_ms),
    Members: job ? format.whole(job.members.length) : format.UNKNOWN,
    Left: format.duration(eta),
    Codec: text(job?.codec, 20) || format.UNKNOWN,
  };
  const place = byId("tiles");
  if (!place.childElementCount) {
    place.append(...Object.keys(tiles).map((name) => h("div", {}, h("dt", {}, name), h("dd"))));
  }
  Object.values(tiles).forEach((said, index) => setText(place.children[index].lastElementChild, said));
  byId("progress").value = job?.steps_total ? job.step / job.steps_total : 0;
  setText(document.querySelector("title"), job ? `${text(job.name, 40)}: step ${format.whole(job.step)}` : "p2ptrain");
}

const told = { link: "connecting", job: "", state: "" };

/** Tell a screen reader what changed: the connection and the job's state, but not each step. */
function tellChanges(job) {
  const now = { link: feed.state, job: job?.id ?? "", state: job?.state ?? "" };
  const said = [];
  if (now.link !== told.link) said.push(LINKS[now.link][2]);
  const isNews = now.job !== told.job || now.state !== told.state;
  if (job && isNews) said.push(`${text(job.name)}: ${text(job.state)} at step ${job.step}`);
  if (said.length) announce(said.join(". "));
  if (now.link === "locked" && told.link !== "locked") unlock(feed.problem);
  if (now.link === "live" && told.link !== "live") loadExperiments();
  Object.assign(told, now);
}

// -------------------------------------------------------------------------------------------------------- the keyboard

const system = matchMedia("(prefers-color-scheme: dark)");

function switchTheme() {
  const root = document.documentElement;
  const isDark = (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  root.dataset.theme = isDark ? "light" : "dark";
  localStorage.setItem("theme", root.dataset.theme);
  charts.repaint();
}

function nextJob(by) {
  const ids = store.jobsInOrder().map((job) => job.id);
  const to = ids[ids.indexOf(store.job) + by];
  if (to) chooseJob(to);
}

const isChatting = () => document.body.classList.contains("is-chatting");

/** Show the chat, if the address names it, or else all other sections. */
function showView() {
  byId("to-chat").hidden = !chat.isAvailable;
  if (location.hash === "#main") return; // the link that skips the head
  const isWanted = location.hash === "#chat" && chat.isAvailable;
  if (isWanted === isChatting()) return;
  document.body.classList.toggle("is-chatting", isWanted);
  if (isWanted) byId("to-chat").setAttribute("aria-current", "page");
  else byId("to-chat").removeAttribute("aria-current");
  if (isWanted) chat.focus();
  else byId(location.hash.slice(1))?.scrollIntoView();
}

function go(section) {
  if (section === "chat" || isChatting()) return void (location.hash = section);
  const place = byId(section);
  place.tabIndex = -1;
  place.scrollIntoView();
  place.focus({ preventScroll: true });
}

const SECTIONS = [...document.querySelectorAll("nav a")].map((link) => link.hash.slice(1));
const onJob = (...verbs) => () => {
  const found = theJob() && verbsOf(theJob()).find(([, verb]) => verbs.includes(verb));
  if (found) act(found[1], theJob());
};
const SHORTCUTS = {
  p: ["Pause or resume the job shown", onJob("pause", "resume")],
  s: ["Save it", onJob("save")],
  c: ["Cancel it (asks first)", onJob("cancel")],
  j: ["Show the next job", () => nextJob(1)],
  k: ["Show the one before", () => nextJob(-1)],
  n: ["New job", createJob],
  a: ["Add a node", addWorker],
  t: ["Light or dark", switchTheme],
  r: ["Connect now", () => feed.retry()],
  "/": ["Filter the events", () => byId("filter").focus()],
  "?": ["This list", () => openDialog("shortcuts")],
};

function press(event) {
  const isTyping = event.target.matches("input, textarea, select") || document.querySelector("dialog[open]");
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  if (!byId("single-keys").checked && event.key !== "?") return;
  const section = /^\d$/.test(event.key) && SECTIONS[event.key];
  const isKnown = Object.hasOwn(SHORTCUTS, event.key) && (!isChatting() || "tr?".includes(event.key));
  if (!section && !isKnown) return;
  event.preventDefault();
  if (section) go(section);
  else SHORTCUTS[event.key][1]();
}

function start() {
  const sections = { 0: ["Chat with a model"], [`1 – ${SECTIONS.length - 1}`]: ["Go to a section"] };
  const more = { ...sections, "← →": ["Read the chart in focus"] };
  const explained = ([key, [about]]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, about)];
  byId("shortcut-list").append(...Object.entries({ ...SHORTCUTS, ...more }).flatMap(explained));
  const single = byId("single-keys");
  single.checked = localStorage.getItem("single-keys") !== "off";
  single.addEventListener("change", () => localStorage.setItem("single-keys", single.checked ? "on" : "off"));
  const clicks = {
    "add-worker": addWorker,
    "new-job": createJob,
    phone: showWatchLink,
    theme: switchTheme,
    help: SHORTCUTS["?"][1],
    copy: () => copy(byId("command-text").textContent, byId("command-text")),
    retry: () => (feed.state === "locked" ? unlock(feed.problem) : feed.retry()),
  };
  for (const [id, does] of Object.entries(clicks)) byId(id).addEventListener("click", () => does());
  byId("job").addEventListener("change", ({ target }) => target.value && chooseJob(target.value));
  for (const id of ["filter", "range"]) byId(id).addEventListener("input", draw);
  document.addEventListener("keydown", press);
  addEventListener("hashchange", showView);
  system.addEventListener("change", () => charts.repaint());
  setInterval(draw, 1000); // ages and the time until the next try
  setInterval(loadExperiments, EXPERIMENTS_MS);
  takeKey();
  store.choose(new URL(location.href).searchParams.get("job") ?? "");
  draw();
  feed.run();
  keepShell();
}

/** Keep the key of a link that was scanned, and take it out of the address. */
function takeKey() {
  const [, key] = /^#key=([\w.~-]+)$/.exec(location.hash) ?? [];
  if (!key) return;
  setKey(key);
  history.replaceState(null, "", location.pathname + location.search);
}

/** Let the page open without a connection. It needs HTTPS or this machine; the page works without it. */
function keepShell() {
  const policy = window.trustedTypes?.createPolicy("page", { createScriptURL: () => "sw.js" });
  navigator.serviceWorker?.register(policy?.createScriptURL("") ?? "sw.js").catch(() => {});
}

start();
