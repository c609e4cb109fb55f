// The ring of a job: members in rank order, and the measured link from each to its right neighbour.

import * as format from "./format.js";
import { svg } from "./dom.js";

const WIDTH = 420;
const HEIGHT = 350;
const FEW = 12; // so many members have room for level names, and for the figures of each link

/** The way of the circuit that `peer` has dialled to another one; empty for none. */
export const wayOf = (peer, target) => format.text(peer?.ways?.[target] ?? "", 80);

/** The links of `job`: `{from, to, ms, bps, way}` in rank order. */
export function linksOf(job, peers) {
  const size = job.members.length;
  if (size < 2) return [];
  const measured = job.edge_ms?.length === size && job.edge_bps?.length === size;
  return job.members.map((id, rank) => ({
    from: id,
    to: job.members[(rank + 1) % size],
    ms: measured ? job.edge_ms[rank] : null,
    bps: measured ? job.edge_bps[rank] : null,
    way: wayOf(peers.get(id), job.members[(rank + 1) % size]),
  }));
}

/** The links from the slowest on; those that are not measured come last. */
export function slowestFirst(links) {
  const speed = (link) => link.bps ?? Infinity;
  return [...links].sort((a, b) => (speed(a) === speed(b) ? (b.ms ?? -1) - (a.ms ?? -1) : speed(a) - speed(b)));
}

export const linkText = (link) =>
  (link.ms === null && link.bps === null ? "not measured" : `${format.rate(link.bps)} · ${format.millis(link.ms)}`) +
  (link.way ? ` · ${link.way}` : "");

export class Ring {
  #place;
  #shown = "";

  constructor(place) {
    this.#place = place;
  }

  /** Draw again, if anything changed. `job`: undefined for none. */
  update(job, peers) {
    const members = (job?.members ?? []).map((id, rank) => {
      const { name, state = "unknown", stage = null } = peers.get(id) ?? {};
      return { id, rank, name: format.text(name ?? id, 40), state, stage: job.stages > 1 ? stage : null };
    });
    const links = job ? linksOf(job, peers) : [];
    const shown = JSON.stringify([members, links]);
    if (shown === this.#shown) return;
    this.#shown = shown;
    this.#place.replaceChildren(members.length ? picture(members, links) : "");
  }
}

const heightOf = (size) => (size > 2 ? HEIGHT : HEIGHT / 2);
const nodeRadius = (size) => (size > FEW ? Math.max(4, 190 / size) : 15);

function picture(members, links) {
  const size = members.length;
  const height = heightOf(size);
  const name = new Map(members.map((member) => [member.id, member.name]));
  const ends = (link, most) => [link.from, link.to].map((id) => format.text(name.get(id), most)).join(" → ");
  const slowest = slowestFirst(links).find((link) => link.bps !== null || link.ms !== null);
  const said = slowest ? `; the slowest link is ${ends(slowest)}, ${linkText(slowest)}` : "";
  const about = `Ring of ${format.plural(size, "member")}${said}`;
  const drawn = svg("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": about }, arrows(size));
  const points = members.map((_, rank) => placeOf(rank, size));
  links.forEach((link, rank) => {
    drawn.append(...edge(link, points[rank], points[(rank + 1) % size], size, link === slowest, ends(link)));
  });
  members.forEach((member, rank) => drawn.append(node(member, points[rank], size)));
  if (size > FEW) {
    const known = links.map((link) => link.bps).filter((bps) => bps !== null).sort((a, b) => a - b);
    const lines = [[about.split(";")[0].replace("Ring of ", ""), "name"]];
    if (known.length) lines.push([`median ${format.rate(known[Math.floor(known.length / 2)])}`, "figure"]);
    const worst = slowest ? ["slowest link", ends(slowest, 9), linkText(slowest)] : [];
    lines.push(...worst.map((line) => [line, "figure slowest"]));
    const top = height / 2 - 7 * (lines.length - 1);
    drawn.append(...lines.map(([line, kind], index) => label(kind, WIDTH / 2, top + 15 * index, line)));
  }
  return drawn;
}

function label(kind, x, y, said, anchor = "middle", turn = undefined) {
  return svg("text", { class: kind, x, y, "text-anchor": anchor, transform: turn }, said);
}

function arrows(members) {
  const wide = members > FEW ? 5 : 9;
  const units = { viewBox: "0 0 8 8", markerUnits: "userSpaceOnUse", markerWidth: wide, markerHeight: wide };
  const more = { refX: 7, refY: 4, orient: "auto", ...units };
  const arrow = (id) => svg("marker", { id, class: id, ...more }, svg("path", { d: "M0,0L8,4L0,8z" }));
  return svg("defs", {}, arrow("arrow"), arrow("arrow-slowest"));
}

/** Where a member stands. Rank 0 is at the top, of two at the left. */
function placeOf(rank, size) {
  const angle = size === 2 ? Math.PI * (1 - rank) : (2 * Math.PI * rank) / size - Math.PI / 2;
  const radius = size > FEW ? 108 : 118;
  const across = size > FEW ? radius : 1.15 * radius;
  const [x, y] = size === 1 ? [0, 0] : [across * Math.cos(angle), size === 2 ? 0 : radius * Math.sin(angle)];
  return { x: WIDTH / 2 + x, y: heightOf(size) / 2 + y, angle };
}

function node(member, { x, y, angle }, size) {
  const radius = nodeRadius(size);
  const { symbol, role } = format.look(member.state);
  const stage = member.stage === null ? "" : `, stage ${member.stage}`;
  const about = `${member.name}: rank ${member.rank}, ${member.state}${stage}`;
  const kind = `member ${stage ? `stage-${member.stage % 6}` : role}`;
  const group = svg("g", { class: kind }, svg("title", {}, about), svg("circle", { cx: x, cy: y, r: radius }));
  if (size <= FEW) group.append(label("mark", x, y + 4.5, stage ? String(member.stage) : symbol));
  group.append(nameOf(format.text(member.name, size > FEW ? 11 : 14), x, y, angle, radius, size));
  return group;
}

/** A name outside of the ring: level if there are few, else along the radius and never upside down. */
function nameOf(said, x, y, angle, radius, size) {
  const [cos, sin] = [Math.cos(angle), Math.sin(angle)];
  if (size <= 2) return label("name", x, y + radius + 18, said);
  if (size <= FEW && Math.abs(cos) <= 0.25) return label("name", x, sin < 0 ? y - radius - 6 : y + radius + 15, said);
  const anchor = cos < -0.01 ? "end" : "start";
  if (size <= FEW) return label("name", x + (radius + 5) * Math.sign(cos), y + 4 + 8 * sin, said, anchor);
  const degrees = (angle * 180) / Math.PI + (anchor === "end" ? 180 : 0);
  const [atX, atY] = [x + (radius + 5) * cos, y + (radius + 5) * sin];
  return label("name small", atX, atY + 3, said, anchor, `rotate(${degrees} ${atX} ${atY})`);
}

/** A link: an arrow, wider for more bandwidth, and inside of the ring its figures, if there is room. */
function edge(link, from, to, size, isSlowest, about) {
  const length = Math.hypot(to.x - from.x, to.y - from.y) || 1;
  const [dx, dy] = [(to.x - from.x) / length, (to.y - from.y) / length];
  const radius = nodeRadius(size) + 3;
  const bend = size === 2 ? 46 : 0; // of two members both links lie between the same points: they are bent apart
  const [x, y] = [(from.x + to.x) / 2 + dy * bend, (from.y + to.y) / 2 - dx * bend];
  const isKnown = link.ms !== null || link.bps !== null;
  const width = link.bps === null ? 1 : Math.min(5, Math.max(1, Math.log10(link.bps) - 5)) * (size > FEW ? 0.6 : 1);
  const d = `M${from.x + dx * radius},${from.y + dy * radius} Q${x},${y} ${to.x - dx * radius},${to.y - dy * radius}`;
  const kind = `edge${isSlowest ? " slowest" : ""}${isKnown ? "" : " unknown"}`;
  const arrow = `url(#arrow${isSlowest ? "-slowest" : ""})`;
  const line = svg("path", { class: kind, d, "stroke-width": width, "marker-end": arrow }, svg("title", {}, about));
  if (size > FEW || !isKnown) return [line];
  const figure = isSlowest ? "figure slowest" : "figure";
  const [atX, atY] = size === 2 ? [x, y] : [x - dy * 36, y + dx * 22];
  const lines = [format.rate(link.bps), format.millis(link.ms)];
  return [line, ...lines.map((said, index) => label(figure, atX, atY - 1 + 12 * index, said))];
}
