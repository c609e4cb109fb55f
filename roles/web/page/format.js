// How values read: units, ages, clock times, symbols. Unknown, infinite and negative values read as a dash.

export const UNKNOWN = "–";

export const isFigure = (value) => typeof value === "number" && Number.isFinite(value);

/** A peer's text as one short line, without control characters and changes of the writing direction. */
export function text(value, most = 300) {
  const clean = String(value ?? "").replace(/[\p{Cc}\u2028-\u202e\u2066-\u2069]/gu, "�");
  return clean.length > most ? `${clean.slice(0, most)}…` : clean;
}

export function threeDigits(value) {
  if (!isFigure(value)) return UNKNOWN;
  if (value >= 99.95 || Number.isInteger(value)) return value.toFixed(0);
  return value.toFixed(value >= 9.995 ? 1 : 2);
}

function scaled(value, units, base) {
  if (!isFigure(value) || value < 0) return UNKNOWN;
  let at = 0;
  while (at + 1 < units.length && value >= base * 0.9995) {
    value /= base;
    at += 1;
  }
  return threeDigits(value) + units[at];
}

export const count = (value) => scaled(value, ["", "k", "M", "G", "T"], 1000);
export const size = (value) => scaled(value, [" B", " KiB", " MiB", " GiB", " TiB"], 1024);
/** `6.6 of 12 GiB`: both in the unit of the whole. */
export function usedOf(used, total) {
  const [number, unit] = size(total).split(" ");
  const digits = Number(number) >= 100 ? 0 : 1;
  return `${((used / total) * Number(number)).toFixed(digits)} of ${Number(Number(number).toFixed(digits))} ${unit}`;
}
export const rate = (value) => scaled(value, [" bit/s", " kbit/s", " Mbit/s", " Gbit/s"], 1000);
export const percent = (part) => (isFigure(part) ? `${Math.round(100 * Math.min(Math.max(part, 0), 1))}%` : UNKNOWN);
export const loss = (value) => (isFigure(value) && Math.abs(value) < 1e5 ? value.toFixed(4) : UNKNOWN);
const tenPower = (value) => value.toExponential(1).replace("e+", "e").replace("0.0e0", "0");
export const scientific = (value) => (isFigure(value) ? tenPower(value) : UNKNOWN);
const grouped = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
export const whole = (value) => (isFigure(value) ? grouped.format(value) : UNKNOWN);
export const steps = (job) => `${whole(job.step)} of ${whole(job.steps_total)}`;
export const plural = (number, what) => `${number} ${what}${number === 1 ? "" : "s"}`;

export function millis(value) {
  if (!isFigure(value) || value < 0) return UNKNOWN;
  if (value < 999.5) return `${threeDigits(value)} ms`;
  return value < 60_000 ? `${threeDigits(value / 1000)} s` : duration(value / 1000);
}

export function duration(seconds) {
  if (!isFigure(seconds) || seconds < 0) return UNKNOWN;
  const s = Math.floor(seconds);
  const two = (number) => String(number).padStart(2, "0");
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)}m ${two(s % 60)}s`;
  if (s < 86_400) return `${Math.floor(s / 3600)}h ${two(Math.floor((s % 3600) / 60))}m`;
  return `${Math.floor(s / 86_400)}d ${Math.floor((s % 86_400) / 3600)}h`;
}

/** Time of day; with the date, if that is not today's. `wall`: Unix seconds. */
export function clock(wall) {
  if (!isFigure(wall)) return UNKNOWN;
  const at = new Date(wall * 1000);
  const time = at.toLocaleTimeString("en-GB");
  return at.toDateString() === new Date().toDateString() ? time : `${at.toLocaleDateString("en-CA")} ${time}`;
}

// Colour role → state → symbol. Colour alone carries no meaning: the state's name stands beside it.
const LOOKS = {
  good: { training: "●", serving: "◆", drafting: "◈", running: "▶", done: "✓" },
  busy: { healing: "✚", following: "◑", building: "◔", joining: "◌", forming: "◔" },
  calm: { waiting: "○", queued: "○" },
  dim: { idle: "·", left: "–", cancelled: "–", info: "·" },
  warn: { held: "□", paused: "■", saving: "▲", leaving: "↗", away: "◇", warning: "▲", interrupted: "■" },
  bad: { failed: "✗", lost: "✗", evicted: "⊘", error: "✗" },
};

export function look(state) {
  const role = Object.keys(LOOKS).find((name) => Object.hasOwn(LOOKS[name], state)) ?? "dim";
  return { symbol: LOOKS[role][state] ?? "?", role, text: text(state, 40) };
}
